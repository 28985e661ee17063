"""What a plan costs on a repository of vLLM's size: 2,000 files, of which 1,000 differ.

The rival is git asked by hand for the same answer: is the work tree clean,
is base an ancestor, which files differ, and what are their sha256.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.source import Rules, delta

_ROUNDS = 5
_FILES, _CHANGED = 2000, 1000
_RULES = Rules(include=("vllm/**",))


def _git(repo: Path, *args: str) -> bytes:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    argv = ("git", *identity, "-C", str(repo), *args)
    return subprocess.run(argv, check=True, capture_output=True, timeout=600).stdout


def _repository(repo: Path) -> tuple[str, str]:
    """Make the two commits: 400 folders, files of 15 kB as vLLM's are on average."""
    seeded = random.Random(1)
    repo.mkdir()
    _git(repo, "init", "-q", "-b", "main")
    paths = [repo / f"vllm/d{n % 40}/e{n % 400}/f{n}.py" for n in range(_FILES)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"x{seeded.getrandbits(60)} = 1\n" for _ in range(630)))
    base = _commit(repo)
    for path in paths[:_CHANGED]:
        path.write_text(path.read_text() + "y = 2\n")
    return base, _commit(repo)


def _commit(repo: Path) -> str:
    _git(repo, "add", "-A")
    _git(repo, "commit", "-qm", "x")
    _git(repo, "repack", "-adq")
    return _git(repo, "rev-parse", "HEAD").decode().strip()


def _by_hand(repo: Path, base: str, head: str) -> None:
    _git(repo, "status", "--porcelain", "--ignored")
    _git(repo, "merge-base", "--is-ancestor", base, head)
    names = _git(repo, "diff", "--name-only", "-z", "--no-renames", base, head).split(b"\0")[:-1]
    for commit in (base, head):
        wanted = b"".join(commit.encode() + b":" + name + b"\n" for name in names)
        argv = ("git", "-C", str(repo), "cat-file", "--batch")
        raw = subprocess.run(argv, input=wanted, check=True, capture_output=True, timeout=600)
        hashlib.sha256(raw.stdout).hexdigest()


def _median(act: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _processes(folder: Path, act: Callable[[], object]) -> int:
    """Count the git processes of one call with a git that writes down each start."""
    log, real, path = folder / "calls", shutil.which("git"), os.environ["PATH"]
    script = folder / "bin/git"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho >> {log}\nexec {real} "$@"\n')
    script.chmod(0o755)
    os.environ["PATH"] = f"{script.parent}:{path}"
    try:
        act()
    finally:
        os.environ["PATH"] = path
    return len(log.read_bytes())


def main() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        repo = Path(name, "repo")
        base, head = _repository(repo)

        def ours() -> object:
            return delta(repo, base=base, head=head, rules=_RULES)

        mine, other = _median(ours), _median(lambda: _by_hand(repo, base, head))
        count = _processes(Path(name), ours)
    what = f"difference of {_CHANGED} of {_FILES} files, against git asked by hand"
    print(f"{what}: {mine:.2f} s against {other:.2f} s, {count} git processes")
    return [{"what": what, "ours": mine, "rival": other, "ratio": mine / other}]
