"""A submission that is served by the stand-in server, and the places where it may be served.

`Checkout` is the operator's side: repository, locked manifest, and the tasks as they are typed.
`Machine` is a container that has a base in it, reached as `container:ID` and, by its own sshd, as
`ssh:box`.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import flow, inventory
from deploy.agent.words import Exit
from deploy.carriers.engine import open_engine
from deploy.image.layer import Entry
from deploy.inventory import Key
from deploy.layout import HERE, Layout
from tests.carriers import dock
from tests.carriers.boxes import docker
from tests.carriers.sshd import free_port, make_key

STANDIN = Path(__file__).parent / "standin" / "vllm"
PORT = 8001
FOLDER = "/root/submission"
MANIFEST = """\
schema: 1
name: mine
base: {{python: {python}, site: {site}, requires: {{vllm: 0.18.1}}}}
source: {{git: repo, base: {base}, head: {head}, package: vllm}}
overlay: {{include: ["vllm/**"]}}
launch:
  dir: {folder}
  command: [{program}, serve]
  port: {port}
  ready: 60s
  serve: {{max-num-batched-tokens: 4096, enforce-eager: }}
  env:
    VLLM_DCU_KERNEL_DIAG: {{value: "1", why: markers}}
    VLLM_DCU_CANDIDATE: {{value: "1", why: the candidate}}
{env}model: {{path: {model}, served_name: m, files: {{config.json: {{size: 2}}}}}}
dispatch:
  switch: VLLM_DCU_CANDIDATE
  markers: [{{shape: chunks, dtype: bfloat16, phase: prefill}}]
gates:
  not_applicable: {{"2": none is compiled, "3": none is compiled, "4": none is compiled}}
"""


class Checkout:
    """A checkout of the product's own code with one submission, `mine`, that is locked."""

    def __init__(
        self,
        top: Path,
        env: Mapping[str, str] | None = None,
        inside: tuple[str, ...] = (),
        **places: Any,
    ) -> None:
        """`env` is what launch.env holds besides; the tasks run `inside` a namespace."""
        self.top, self.inside, self.layout = top, inside, Layout(top)
        self.calls: dict[str, str] = {}
        shutil.copytree(HERE.top / "deploy", top / "deploy", ignore=_no_bytecode)
        shutil.copytree(HERE.top / "docker", top / "docker")
        shutil.copy(HERE.top / "tasks.py", top / "tasks.py")
        sources = {k: v for k, v in dock.VENDOR.items() if k.endswith((".py", ".json"))}
        base, head = self._commit(sources), self._commit(dock.EDITS)
        rows = "".join(
            f'    {k}: {{value: "{v}", why: the test}}\n' for k, v in (env or {}).items()
        )
        values = {
            "python": dock.PYTHON, "site": dock.SITE, "folder": FOLDER, "port": PORT,
            "program": "/usr/local/bin/vllm", "model": "/srv/model", **places,
        }  # fmt: skip
        text = MANIFEST.format(base=base, head=head, env=rows, **values)
        self.layout.manifest("mine").parent.mkdir()
        self.layout.manifest("mine").write_text(text)
        flow.lock("mine", self.layout)

    def argv(self, *words: str) -> list[str]:
        """One task, as it is typed in this checkout."""
        where = ("--search-root", str(self.top))
        return [*self.inside, sys.executable, "-m", "invoke", *where, *words, "-n", "mine"]

    def inv(self, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """Return a task's exit code and what it says of its one target."""
        done = subprocess.run(
            [*self.argv(*words), "--json"], cwd=self.top, env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.stdout.startswith("{"), done.stderr
        said = json.loads(done.stdout)
        return done.returncode, said["targets"][0] if "targets" in said else said

    def done(self, *words: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return what a task that must succeed says of its one target."""
        code, said = self.inv(*words, env=env)
        assert code == Exit.OK, said["error"] or said["gates"]
        return said

    def _commit(self, files: Mapping[str, bytes | None]) -> str:
        repo = self.top / "repo"
        if not repo.exists():
            repo.mkdir()
            self._git("init", "-q")
        for name, data in files.items():
            (repo / name).parent.mkdir(parents=True, exist_ok=True)
            (repo / name).unlink() if data is None else (repo / name).write_bytes(data)
        self._git("add", "-A")
        self._git("commit", "-q", "-m", "a change")
        return self._git("rev-parse", "HEAD")

    def _git(self, *words: str) -> str:
        argv = ("git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", *words)
        done = subprocess.run(
            argv, cwd=self.top / "repo", capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()


def _no_bytecode(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__"]


def local_place(top: Path) -> dict[str, Any]:
    """Lay the vendor's package, the stand-in and a model below `top`; return where they are."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", top / "venv"], check=True)
    where = {"base": str(top / "venv"), "platbase": str(top / "venv")}
    site = Path(sysconfig.get_path("purelib", "posix_prefix", vars=where))
    for name, data in dock.VENDOR.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)
    _, _, body = STANDIN.read_text().partition("\n")
    python, program = top / "venv" / "bin" / "python3", top / "venv" / "bin" / "vllm"
    program.write_text(f"#!{python}\n{body}")
    program.chmod(0o755)
    (top / "submission").mkdir()
    (top / "model").mkdir()
    (top / "model" / "config.json").write_text("{}")
    return {
        "python": python, "site": site, "program": program, "model": top / "model",
        "folder": top / "submission", "port": free_port(),
    }  # fmt: skip


@contextmanager
def base_image() -> Iterator[str]:
    """An image with the vendor's package, the stand-in server and a model."""
    entries = (
        Entry(path="usr/local/bin/vllm", mode=0o755, data=STANDIN.read_bytes()),
        Entry(path="srv/model/config.json", data=b"{}"),
    )
    with open_engine() as engine, dock.base_image(engine, entries=entries) as reference:
        yield reference


@dataclass(frozen=True)
class Machine:
    """One running container."""

    id: str

    @property
    def to(self) -> str:
        return f"container:{self.id[:12]}"

    def sh(self, script: str) -> str:
        return docker("exec", self.id, "sh", "-c", script)


@contextmanager
def machine(image: str, *options: str) -> Iterator[Machine]:
    """Run a container of an image as long as it is needed."""
    made = Machine(docker("run", "-d", "--init", *options, image, "sleep", "900"))
    try:
        yield made
    finally:
        docker("rm", "-f", made.id)


@contextmanager
def behind_sshd(image: str, home: Path) -> Iterator[tuple[Machine, dict[str, str]]]:
    """A machine with an sshd; yield it with the environment of an operator who knows it as box."""
    port = free_port()
    (home / ".ssh").mkdir(parents=True)
    make_key(home / ".ssh" / "key")
    with machine(image, "-p", f"127.0.0.1:{port}:22") as box:
        public = (home / ".ssh" / "key.pub").read_text().strip()
        box.sh(
            "umask 077; mkdir -p /root/.ssh /run/sshd;"
            f" echo '{public}' >/root/.ssh/authorized_keys;"
            " ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/k;"
            " /usr/sbin/sshd -h /etc/ssh/k -o UsePAM=no -o PasswordAuthentication=no"
        )
        _await_sshd(port)
        (home / ".ssh" / "config").write_text(
            f"Host box\n  HostName 127.0.0.1\n  Port {port}\n  User root\n"
            f"  IdentityFile {home}/.ssh/key\n  IdentitiesOnly yes\n"
        )
        hosts = home / "hosts.yaml"
        hosts.write_text("hosts:\n  box:\n    ssh: box\n")
        fingerprint = box.sh("ssh-keygen -lf /etc/ssh/k.pub").split()[1]
        inventory.trust(hosts, "box", Key(fingerprint=fingerprint, reason="test"))
        yield box, {"HOME": str(home), "DCU_HOSTS": str(hosts), "USER": getpass.getuser()}


def _await_sshd(port: int) -> None:
    argv = ["ssh-keyscan", "-T", "2", "-p", str(port), "127.0.0.1"]
    limit = time.monotonic() + 30
    while b"ssh-ed25519" not in subprocess.run(argv, capture_output=True, check=False).stdout:
        assert time.monotonic() < limit, "no sshd answers"
        time.sleep(0.2)
