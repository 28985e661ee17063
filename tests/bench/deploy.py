"""A deploy over a real sshd, against `rsync -rc` and `tar | ssh`, on loopback and at 50 ms.

Forty edited modules of the real vLLM tree and one binary of 21 MB. Every way ends with the same
proof: all bytes hashed, all modules compiled on the target. Ours runs as a process of its own,
start and imports included, as the rivals do; ours also stages, keeps the originals, can be undone,
and proves import origin, which no rival does. The distance is a relay that holds each byte 25 ms.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deploy import bundle as bundles
from deploy import manifest, wheel
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.bundle import Bundle, Sink
from deploy.carriers.local import lay_root
from deploy.layout import HERE
from tests.carriers.relay import Relay
from tests.carriers.sshd import Sshd

_MODULES = 40
_BINARY, _BINARY_SIZE = "vllm/_rocm_C.abi3.so", 21 << 20
_ROUNDS = 3
_HOSTS = 20
_PYTHON, _SITE, _LAUNCH = "/usr/bin/python3", "/usr/lib/python3/dist-packages", "/root/submission"
_SOURCE = "vllm/_C_AVX2.abi3.so"  # whose beginning stands in for the binary

# What a careful person would run on the target after copying.
_CHECK = """
import hashlib, json, py_compile, sys
site, table = sys.argv[1], json.load(sys.stdin)
for path, sha in table.items():
    with open(site + "/" + path, "rb") as file:
        assert hashlib.sha256(file.read()).hexdigest() == sha, path
    if path.endswith(".py"):
        py_compile.compile(site + "/" + path, doraise=True)
"""
# One operator's process: deploy and verify on every alias; timings and memory on stdout.
_DRIVE = """
import json, resource, sys, time
from pathlib import Path
options = json.loads(sys.argv[1])
start = time.perf_counter()
from deploy import bundle, fleet
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.carriers.ssh import Ssh
from deploy.carriers.ssh_config import load
from deploy.inventory import Host
loaded = time.perf_counter() - start
made = bundle.read(Path(options["bundle"]), pinned=options["sha256"])  # as a lock has it
config = load([Path(options["config"])])
pins = {alias: {options["pin"]: "pinned"} for alias in options["aliases"]}
def target(alias):
    where = options["aliases"][alias]
    host = Host(ssh=alias, root=where["root"], state_dir=where["state"])
    return Ssh(alias=alias, host=host, pins=pins, config=config, memory=Path(options["memory"]))
def work(one, tell):
    requests = [Request(verb=Verb.DEPLOY), Request(verb=Verb.VERIFY)]
    return one.deliver_in_turn(made, requests, tell=tell)
said = fleet.each([target(a) for a in options["aliases"]], work, name=lambda one: one.name)
for found in said:
    if isinstance(found, Exception):
        raise found
    assert not any(int(one.exit) for one in found), [one.error for one in found]
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "loaded": loaded, "memory": usage.ru_maxrss * 1024, "cpu": usage.ru_utime + usage.ru_stime,
    "sent": [found[0].raw["incidental"]["sent"] for found in said],
}))
"""


def main() -> list[dict[str, Any]]:
    HERE.out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HERE.out) as name:
        bench = _Bench(Path(name))
        try:
            return bench.measure()
        finally:
            bench.close()


class _Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents, self.base = _files(folder)
        self.edited = folder / "edited"
        for path, data in self.contents.items():
            _write(self.edited / path, data)
        self.bundle = _bundle(folder, self.contents, self.base)
        self.sshd = Sshd(folder / "sshd", "SetEnv SHLVL=5", "MaxStartups 100:30:200").start()
        self.relay = Relay(self.sshd.port, delay=0.025)
        self.table = json.dumps(
            {p: hashlib.sha256(d).hexdigest() for p, d in self.contents.items()}
        )

    def close(self) -> None:
        self.relay.close()
        self.sshd.stop()

    def measure(self) -> list[dict[str, Any]]:
        rows = []
        for where, port in (("on loopback", self.sshd.port), ("at 50 ms", self.relay.port)):
            rows += self._against_rivals(where, port)
        return [*rows, *self._many_hosts(), *self._many_files()]

    def _against_rivals(self, where: str, port: int) -> list[dict[str, Any]]:
        times: dict[str, list[float]] = {}
        sent: list[int] = []

        def note(what: str, act: Callable[[], float]) -> None:
            times.setdefault(what, []).append(act())

        for _ in range(_ROUNDS):
            self._pristine(1, keep_store=False)
            note("tar", lambda: self._tar(port))
            self._pristine(1, keep_store=False)
            note("rsync", lambda: self._rsync(port))
            note("rsync again", lambda: self._rsync(port))
            self._pristine(1, keep_store=False)
            note("ours", lambda: self._ours(port, 1)[0])
            again, said = self._ours(port, 1)
            times.setdefault("ours again", []).append(again)
            sent += said["sent"]
            self._pristine(1, keep_store=True)
            rebuilt, said = self._ours(port, 1)
            times.setdefault("ours rebuilt", []).append(rebuilt)
            sent += said["sent"]
        found = {what: statistics.median(taken) for what, taken in times.items()}
        rows = [
            _row(f"first deploy {where}, against tar | ssh", found["ours"], found["tar"],
                 1.15 if "50" in where else None),
            _row(f"first deploy {where}, against rsync", found["ours"], found["rsync"],
                 0.75 if "50" in where else 1.0),
            _row(f"nothing to do {where}, against rsync's second run", found["ours again"],
                 found["rsync again"], 0.5 if "50" in where else None),
            _row(f"rebuilt, store kept, {where}, against rsync's second run",
                 found["ours rebuilt"], found["rsync again"], 0.5 if "50" in where else None),
        ]  # fmt: skip
        rows.append(_row(f"bytes sent for those two {where}, of 30,000", max(sent), 30_000, 1.0))
        return rows

    def _many_hosts(self) -> list[dict[str, Any]]:
        self._pristine(1, keep_store=False)
        before = self._remote_cpu()
        _, said = self._ours(self.sshd.port, 1)
        single_cpu = said["cpu"] + self._remote_cpu() - before
        one, _ = self._ours(self.relay.port, 1)
        self._pristine(_HOSTS, keep_store=False)
        first, said = self._ours(self.sshd.port, _HOSTS)
        many, _ = self._ours(self.relay.port, _HOSTS)
        ideal = single_cpu * _HOSTS / (os.cpu_count() or 1)
        return [
            _row(f"{_HOSTS} hosts with nothing to send at 50 ms, against one", many, one, 3.0),
            _row(f"first deploy to {_HOSTS} hosts, against the CPU of single ones", first, ideal,
                 1.3),
            _row("operator's memory meanwhile, of 150 MB", said["memory"], 150e6, 1.0),
        ]  # fmt: skip

    def _many_files(self) -> list[dict[str, Any]]:
        rows = []
        for count in (40, 400, 1400):
            contents = {
                f"vllm/many{i % 35}/m{i:04}.py": b"V = %d\n" % i * 300 for i in range(count)
            }
            made = _bundle(self.folder, contents, {})
            self._pristine(1, keep_store=False)
            first, _ = self._ours(self.relay.port, 1, made)
            again, _ = self._ours(self.relay.port, 1, made)
            what = f"{count} small files at 50 ms: first deploy, against nothing to do"
            rows.append(_row(what, first, again))
        return rows

    def _pristine(self, hosts: int, *, keep_store: bool) -> None:
        for index in range(hosts):
            root = self.folder / f"root{index}"
            top = root / _SITE.strip("/")
            shutil.rmtree(top, ignore_errors=True)
            if not root.exists():
                lay_root(root, python=_PYTHON, site=_SITE, launch_dir=_LAUNCH, fill=lambda _: None)
            for path, data in {**self.base, "vllm/__init__.py": b""}.items():
                _write(top / path, data)
            if not keep_store:
                shutil.rmtree(self.folder / f"state{index}", ignore_errors=True)
        if not keep_store:
            shutil.rmtree(self.folder / "memory", ignore_errors=True)

    def _remote_cpu(self) -> float:
        """Seconds of CPU of all ended sessions of the server."""
        time.sleep(0.5)
        fields = Path(f"/proc/{self.sshd.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    def _ours(self, port: int, hosts: int, made: Bundle | None = None) -> tuple[float, Any]:
        here = self.folder
        aliases = {
            f"h{i}": {"root": f"{here}/root{i}", "state": f"{here}/state{i}"} for i in range(hosts)
        }
        options = {
            "bundle": str((made or self.bundle).path),
            "sha256": (made or self.bundle).sha256,
            "config": str(self._config(port)),
            "pin": self.sshd.fingerprint,
            "memory": str(self.folder / "memory"),
            "aliases": aliases,
        }
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _DRIVE, json.dumps(options)],
            cwd=HERE.top,
            env={**os.environ, "PYTHONPATH": str(HERE.top)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if done.returncode:
            raise RuntimeError(f"our own deploy failed:\n{done.stderr}")
        return time.perf_counter() - start, json.loads(done.stdout)

    def _config(self, port: int) -> Path:
        path, known = self.folder / "ssh_config", self.folder / "known_hosts"
        key = (self.sshd.folder / "host.pub").read_text()
        known.write_text(f"[127.0.0.1]:{port} {key}")
        text = self.sshd.config_of("h*", port=port)
        path.write_text(text.replace("KnownHostsFile none", f"KnownHostsFile {known}"))
        return path

    def _rsync(self, port: int) -> float:
        config = self._config(port)
        start = time.perf_counter()
        site = f"{self.folder}/root0{_SITE}"
        _run(("rsync", "-rc", "-e", f"ssh -F {config} -q", f"{self.edited}/", f"h0:{site}/"))
        self._check(config, site)
        return time.perf_counter() - start

    def _tar(self, port: int) -> float:
        config, site = self._config(port), f"{self.folder}/root0{_SITE}"
        start = time.perf_counter()
        command = f"tar -C {self.edited} -c . | ssh -F {config} -q h0 tar -C {site} -x"
        _run(("sh", "-c", command))
        self._check(config, site)
        return time.perf_counter() - start

    def _check(self, config: Path, site: str) -> None:
        script = self.folder / "check.py"
        if not script.exists():
            script.write_text(_CHECK)
        argv = ("ssh", "-F", str(config), "-q", "h0", "python3", str(script), site)
        subprocess.run(argv, input=self.table.encode(), check=True, timeout=120)


def _files(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return what is to be there (edited modules, binary), and the base that it replaces."""
    pinned = manifest.load(HERE.manifest("demo")).source.wheel
    assert pinned is not None
    spec = wheel.WheelSpec(
        name=pinned.name, version=pinned.version, sha256=pinned.sha256, platform=pinned.platform
    )
    tree = folder / "wheel"
    wheel.unpack(wheel.fetch(spec, HERE.cache / "wheels"), tree)
    names = [str(path.relative_to(tree)) for path in tree.glob("vllm/**/*.py")]
    usual = [name for name in names if 2_000 < (tree / name).stat().st_size < 20_000]
    chosen = sorted(usual, key=lambda name: hashlib.sha256(name.encode()).digest())[:_MODULES]
    base = {name: (tree / name).read_bytes() for name in sorted(chosen)}
    with (tree / _SOURCE).open("rb") as stream:
        binary = stream.read(_BINARY_SIZE)
    shutil.rmtree(tree)
    edited = {name: data + b"\n# measured\n" for name, data in base.items()}
    return {**edited, _BINARY: binary}, base


def _bundle(folder: Path, contents: dict[str, bytes], base: dict[str, bytes]) -> Bundle:
    files = tuple(
        PlannedFile(
            path=path,
            role="module" if path.endswith(".py") else "extension",
            want=_state(data),
            assume=(_state(base[path]) if path in base else ABSENT,),
        )
        for path, data in sorted(contents.items())
    )
    plan = Plan(
        name="bench", package="vllm", python=_PYTHON, site=_SITE, launch_dir=_LAUNCH, files=files
    )
    by_sha = {_state(data).sha256: data for data in contents.values()}

    def fill(sinks: Iterator[tuple[str, Sink]]) -> None:
        for sha256, sink in sinks:
            sink.write(by_sha[sha256])

    return bundles.pack(plan, {}, fill, folder)


def _state(data: bytes) -> State:
    sha = hashlib.sha256(data).hexdigest()
    return State(type="file", mode="0644", sha256=sha, size=len(data))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _run(argv: tuple[str, ...]) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, timeout=120)


def _row(what: str, ours: float, rival: float, limit: float | None = None) -> dict[str, Any]:
    ratio = ours / rival
    told = "" if limit is None else f", limit {limit:.2f}{'' if ratio <= limit else ': MISSED'}"
    print(f"{what}: {ours:.4g} against {rival:.4g}, ratio {ratio:.2f}{told}", flush=True)
    return {"what": what, "ours": ours, "rival": rival, "ratio": ratio, "limit": limit}
