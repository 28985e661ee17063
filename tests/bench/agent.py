"""Deploy, verify and doing nothing, on forty files of the real vLLM tree, against plain rivals.

The rivals are the least that a careful person would do in one Python process: copy and py_compile
the files; hash sources and bytecode. Both sides run the stand-in interpreter of a laid root.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy import bundle as bundles
from deploy import manifest, wheel
from deploy.agent.plan import Plan, PlannedFile, State
from deploy.bundle import Bundle, Sink
from deploy.carriers.local import lay_root
from deploy.layout import HERE

_FILES = 40
_ROUNDS = 11
_PYTHON, _LAUNCH = "/usr/bin/python3", "/root/submission"

_COPY = """
import py_compile, shutil, sys
for line in open(sys.argv[1]):
    source, to = line.rstrip("\\n").split("\\t")
    shutil.copy2(source, to)
    py_compile.compile(to, doraise=True)
"""
_HASH = """
import hashlib, importlib.util, sys
for line in open(sys.argv[1]):
    to = line.rstrip("\\n").split("\\t")[1]
    for path in (to, importlib.util.cache_from_source(to)):
        with open(path, "rb") as file:
            hashlib.sha256(file.read()).hexdigest()
"""


def main() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=HERE.out) as name:
        return _measure(Path(name))


def _measure(folder: Path) -> list[dict[str, Any]]:
    bench = _Bench(folder)
    deploys: list[tuple[float, float]] = []
    verifies: list[tuple[float, float]] = []
    nothing: list[tuple[float, float]] = []
    for _ in range(_ROUNDS):
        bench.agent("restore")
        deploy = bench.agent("deploy")
        before = bench.stamps()
        again, verify = bench.agent("deploy"), bench.agent("verify")
        if bench.stamps() != before:
            raise AssertionError("an unchanged deploy, or a verify, has written something")
        copy = bench.rival(_COPY)
        hashing = bench.rival(_HASH)
        deploys.append((deploy, copy))
        verifies.append((verify, hashing))
        nothing.append((again, hashing))
    return [
        _row("deploy 40 files, against copying and compiling them", deploys, 1.5),
        _row("verify 40 files, against hashing sources and pycs", verifies, 3.0),
        _row("deploy with nothing to do, against the same hashing", nothing, None),
    ]


def _row(what: str, pairs: list[tuple[float, float]], limit: float | None) -> dict[str, Any]:
    ours, rival = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = ours / rival
    print(f"{what}: {ours * 1000:.0f} ms against {rival * 1000:.0f} ms, ratio {ratio:.2f}")
    return {"what": what, "ours": ours, "rival": rival, "ratio": ratio, "limit": limit}


class _Bench:
    """A laid root, a bundle of forty edited files, and a folder for the rivals to copy into."""

    def __init__(self, folder: Path) -> None:
        demo = manifest.load(HERE.manifest("demo"))
        pinned = demo.source.wheel
        assert pinned is not None
        spec = wheel.WheelSpec(
            name=pinned.name,
            version=pinned.version,
            sha256=pinned.sha256,
            platform=pinned.platform,
        )
        fetched = wheel.fetch(spec, HERE.cache / "wheels")
        self.root, self.site = folder / "root", demo.base.site
        lay_root(
            self.root,
            python=_PYTHON,
            site=self.site,
            launch_dir=_LAUNCH,
            fill=lambda top: wheel.unpack(fetched, top),
        )
        self.top = self.root / self.site.strip("/")
        paths = _chosen(self.top)
        new = {path: (self.top / path).read_bytes() + b"\n# measured\n" for path in paths}
        self.bundle = _bundle(folder, self.site, self.top, new)
        self._table = _rival_files(folder, new)

    def agent(self, verb: str) -> float:
        """Run the bundle; return seconds. Restoring a pristine root is no error."""
        argv = (sys.executable, "-I", "-S", str(self.bundle.path), verb, "--root", str(self.root))
        return _timed(argv)

    def rival(self, code: str) -> float:
        return _timed((str(self.root / _PYTHON.strip("/")), "-c", code, str(self._table)))

    def stamps(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for folder, _, names in os.walk(self.top):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                info = os.lstat(path)
                found[path] = (info.st_ino, info.st_mtime_ns, info.st_ctime_ns)
        return found


def _chosen(top: Path) -> list[str]:
    """Return forty modules of ordinary size, the same ones every time."""
    found = [str(path.relative_to(top)) for path in top.glob("vllm/**/*.py")]
    usual = [path for path in found if 2_000 < (top / path).stat().st_size < 20_000]
    return sorted(sorted(usual, key=lambda p: hashlib.sha256(p.encode()).digest())[:_FILES])


def _bundle(folder: Path, site: str, top: Path, new: dict[str, bytes]) -> Bundle:
    files = tuple(
        PlannedFile(
            path=path,
            role="module",
            want=_state(data),
            assume=(_state((top / path).read_bytes()),),
        )
        for path, data in sorted(new.items())
    )
    plan = Plan(
        name="bench", package="vllm", python=_PYTHON, site=site, launch_dir=_LAUNCH, files=files
    )
    contents = {_state(data).sha256: data for data in new.values()}

    def fill(sinks: Iterator[tuple[str, Sink]]) -> None:
        for sha256, sink in sinks:
            sink.write(contents[sha256])

    return bundles.pack(plan, {}, fill, folder)


def _state(data: bytes) -> State:
    sha = hashlib.sha256(data).hexdigest()
    return State(type="file", mode="0644", sha256=sha, size=len(data))


def _rival_files(folder: Path, new: dict[str, bytes]) -> Path:
    lines = []
    for path, data in new.items():
        source, to = folder / "edited" / path, folder / "copied" / path
        for place in (source, to):
            place.parent.mkdir(parents=True, exist_ok=True)
        source.write_bytes(data)
        lines.append(f"{source}\t{to}\n")
    table = folder / "table"
    table.write_text("".join(lines))
    return table


def _timed(argv: tuple[str, ...]) -> float:
    start = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    return time.perf_counter() - start
