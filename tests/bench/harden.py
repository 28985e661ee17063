"""The audit of a whole package, the cost over the number of files, and the edit loop.

The audit's rival reads and hashes the same bytes in one Python process, and knows nothing of whose
they are. The cost is fitted by a line over 40, 400 and 1,400 changed files. The edit loop is what a
person waits for from a saved file to a verified target, in a repository of the real size.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy import bundle as bundles
from deploy import flow
from deploy.agent.listing import Entry, text_of
from deploy.agent.plan import Plan, PlannedFile, State
from deploy.agent.words import Verb
from deploy.bundle import Bundle, Sink
from deploy.carriers import Request
from deploy.carriers.local import lay_root
from deploy.layout import HERE, Layout

_ROUNDS = 5
_SITE, _PYTHON, _LAUNCH = "/usr/lib/python3/dist-packages", "/usr/bin/python3", "/launch"
_FILES, _BYTES, _LIBRARIES = 2000, 256 << 20, 4
_COUNTS = (40, 400, 1400)
_MEMORY = 60 << 20

_HASH = """
import hashlib, os, sys
for folder, folders, names in os.walk(sys.argv[1]):
    folders.sort()
    for name in sorted(names):
        sha = hashlib.sha256()
        with open(os.path.join(folder, name), "rb") as file:
            while piece := file.read(1 << 20):
                sha.update(piece)
"""


def main() -> list[dict[str, Any]]:
    HERE.out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HERE.out) as name:
        folder = Path(name)
        return [*_audit(folder / "audit"), *_cost(folder / "cost"), *_loop(folder / "loop")]


# --- the audit


def _audit(folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    contents = _package()
    listing = text_of(
        Entry(path, hashlib.sha256(data).hexdigest(), len(data)) for path, data in contents.items()
    )
    root = _root(folder, contents)
    bundle = _bundle(folder, {"vllm/m0000.py": b"V = 1\n"}, contents, listing)
    _run(_agent(bundle, root, "deploy"))
    top = str(root / _SITE.strip("/") / "vllm")
    pairs, memory = [], 0
    for _ in range(_ROUNDS):
        took, used = _run(_agent(bundle, root, "verify", "--all"))
        rival, _ = _run((sys.executable, "-I", "-S", "-c", _HASH, top))
        pairs.append((took, rival))
        memory = max(memory, used)
    what = f"verify --all of {_FILES} files, {_BYTES >> 20} MB, against hashing them"
    ours, rival = (statistics.median(column) for column in zip(*pairs, strict=True))
    return [
        _row(what, ours, rival, 1.3),
        _row("its peak memory in MB, against 60", memory / 1e6, _MEMORY / 1e6, 1.0),
    ]


def _package() -> dict[str, bytes]:
    """Two thousand files: most are small modules, four are libraries that weigh the most."""
    dice = random.Random(7)
    found = {}
    for number in range(_FILES - _LIBRARIES):
        body = b"".join(b"V%d = %d\n" % (n, dice.getrandbits(40)) for n in range(300))
        found[f"vllm/{'' if number < 500 else f's{number % 40:02d}/'}m{number:04d}.py"] = body
    rest = (_BYTES - sum(map(len, found.values()))) // _LIBRARIES
    for number in range(_LIBRARIES):
        found[f"vllm/_C{number}.abi3.so"] = dice.randbytes(rest)
    found["vllm/__init__.py"] = b""
    return found


# --- the cost over the number of files


def _cost(folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    body = b"".join(b"V%d = %d\n" % (n, n * n) for n in range(400))
    base = {f"vllm/m{number:04d}.py": body for number in range(max(_COUNTS))}
    base["vllm/__init__.py"] = b""
    root = _root(folder, base)
    took: dict[str, list[float]] = {"deploy": [], "verify": [], "restore": []}
    for count in _COUNTS:
        new = dict.fromkeys(sorted(base)[1 : count + 1], body + b"# new\n")
        bundle = _bundle(folder, new, base)
        rounds = [
            {verb: _run(_agent(bundle, root, verb))[0] for verb in took} for _ in range(_ROUNDS)
        ]
        for verb, times in took.items():
            times.append(statistics.median(one[verb] for one in rounds))
    return [_fit(verb, times) for verb, times in took.items()]


def _fit(verb: str, times: list[float]) -> dict[str, Any]:
    """Print the line through the first and the last count, and how far the middle is from it.

    A cost that grows faster than the number of files puts the last count above the line through the
    first two; that is what the limit is about.
    """
    slope = (times[2] - times[0]) / (_COUNTS[2] - _COUNTS[0])
    start = times[0] - slope * _COUNTS[0]
    mean = statistics.mean(times)
    line = [start + slope * count for count in _COUNTS]
    left = sum((t - y) ** 2 for t, y in zip(times, line, strict=True))
    fit = 1 - left / max(sum((t - mean) ** 2 for t in times), 1e-12)
    told = ", ".join(f"{c}: {t:.3f} s" for c, t in zip(_COUNTS, times, strict=True))
    print(f"{verb}: {told}; {start:.3f} s + {slope * 1e6:.0f} us a file, R^2 {fit:.4f}")
    ahead = times[1] + (times[1] - times[0]) / (_COUNTS[1] - _COUNTS[0]) * (_COUNTS[2] - _COUNTS[1])
    return _row(
        f"{verb} of {_COUNTS[2]} files, against the line through fewer", times[2], ahead, 1.3
    )


# --- the edit loop

_MANIFEST = """\
schema: 1
name: loop
base: {{python: {python}, site: {site}}}
source: {{git: repo, base: {base}, head: {head}, package: vllm}}
overlay: {{include: ["vllm/**"]}}
launch: {{dir: {launch}}}
"""


def _loop(folder: Path) -> list[dict[str, Any]]:
    layout, repo = Layout(folder), folder / "repo"
    repo.mkdir(parents=True)
    body = b"".join(b"V%d = %d\n" % (n, n * n) for n in range(400))
    base = {f"vllm/s{n % 60:02d}/m{n:04d}.py": body for n in range(_FILES)}
    base["vllm/__init__.py"] = b""
    _lay(repo, base)
    first = _commit(repo)
    for path in sorted(base)[1:41]:
        (repo / path).write_bytes(body + b"# the patch\n")
    head = _commit(repo)
    layout.manifest("loop").parent.mkdir()
    text = _MANIFEST.format(python=_PYTHON, site=_SITE, base=first, head=head, launch=_LAUNCH)
    layout.manifest("loop").write_text(text)
    to = f"local:{_root(folder, base)}"
    request, edited = Request(verb=Verb.DEPLOY), repo / sorted(base)[1]
    took = []
    for number in range(_ROUNDS + 1):
        edited.write_bytes(body + b"# edit %d\n" % number)
        began = time.monotonic()
        [visit] = flow.deploy("loop", to, request, layout, worktree=True)
        took.append(time.monotonic() - began)
        if visit.exit:
            raise AssertionError(visit)
    # The first one deploys the whole patch; those after it are the loop.
    return [
        _row(
            "saved file to verified target, against a second", statistics.median(took[1:]), 1.0, 1.5
        )
    ]


def _commit(repo: Path) -> str:
    identity = ("-c", "user.name=b", "-c", "user.email=b@example.invalid")
    steps = (("init", "-q"), ("add", "-A"), ("commit", "-qm", "x"), ("rev-parse", "HEAD"))
    said = b""
    for step in steps:
        said = subprocess.run(
            ("git", *identity, *step), cwd=repo, check=True, capture_output=True
        ).stdout
    return said.decode().strip()


# --- what all of them need


def _root(folder: Path, contents: Mapping[str, bytes]) -> Path:
    root = folder / "root"
    lay_root(
        root,
        python=_PYTHON,
        site=_SITE,
        launch_dir=_LAUNCH,
        fill=lambda top: _lay(top, contents),
    )
    return root


def _lay(top: Path, contents: Mapping[str, bytes]) -> None:
    for path, data in contents.items():
        place = top / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod(0o644)


def _bundle(
    folder: Path, new: Mapping[str, bytes], base: Mapping[str, bytes], listing: str = ""
) -> Bundle:
    files = tuple(
        PlannedFile(path=path, role="module", want=_state(data), assume=(_state(base[path]),))
        for path, data in sorted(new.items())
    )
    plan = Plan(
        name="bench", package="vllm", python=_PYTHON, site=_SITE, launch_dir=_LAUNCH, files=files
    )
    contents = {_state(data).sha256: data for data in new.values()}
    pin = {"from": "files", "sha256": hashlib.sha256(listing.encode()).hexdigest()}

    def fill(sinks: Iterator[tuple[str, Sink]]) -> None:
        for sha256, sink in sinks:
            sink.write(contents[sha256])

    return bundles.pack(plan, {"base_files": pin}, fill, folder, listing=listing)


def _state(data: bytes) -> State:
    sha = hashlib.sha256(data).hexdigest()
    return State(type="file", mode="0644", sha256=sha, size=len(data))


def _agent(bundle: Bundle, root: Path, *argv: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", str(bundle.path), *argv, "--root", str(root))


# A child's peak memory begins with what its parent held: the parent must be small.
_LAUNCH_SMALL = """
import os, sys, time
began = time.monotonic()
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
took = time.monotonic() - began
print(took, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status), file=sys.stderr)
"""


def _run(argv: tuple[str, ...]) -> tuple[float, int]:
    """Run a program to its end; return seconds and the most memory that it held, in bytes."""
    done = subprocess.run(
        (sys.executable, "-I", "-S", "-c", _LAUNCH_SMALL, *argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=True,
    )
    took, memory, code = done.stderr.decode("utf-8", "replace").splitlines()[-1].split()
    if code != "0":
        raise AssertionError(done.stderr.decode("utf-8", "replace"))
    return float(took), int(memory)


def _row(what: str, ours: float, rival: float, limit: float | None) -> dict[str, Any]:
    ratio = ours / rival
    print(f"{what}: {ours:.3f} against {rival:.3f}, ratio {ratio:.2f}")
    return {"what": what, "ours": ours, "rival": rival, "ratio": ratio, "limit": limit}
