"""The tasks for those who change this project: test, lint, bench-self."""

from __future__ import annotations

import json as jsonlib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from invoke import Context

from deploy.console import say, show_json, task
from deploy.errors import BadValues, Exit
from deploy.layout import HERE

_TESTS = HERE.top / "tests"
_SERVICES = {"docker", "sshd", "hip", "live"}
# A real server takes all cores; nothing else runs beside it.
_ALONE = "live"
# The edit loop: nothing that is slow or that a service is needed for.
_FAST = "not slow and not docker and not sshd and not hip and not live"


@task(
    example="./inv test --area agent --match kill",
    help={
        "area": "only this folder below tests/ (and no lint)",
        "fast": "only what is quick and needs no service: the edit loop",
        "live": "also what runs the real vLLM server (fetches about 3 GB once; CI=true implies it)",
        "match": "only tests whose names match this expression (pytest's -k)",
        "workers": "run each area in this many processes; by default two, but for live",
    },
)
def test(
    _: Context,
    area: str = "",
    fast: bool = False,
    live: bool = False,
    match: str = "",
    workers: int = 0,
    json: bool = False,
) -> int:
    """Set up and run the tests, after lint; end with what was skipped and why."""
    folders = _areas(area)
    lint_code = 0 if area or match else _lint(to_stderr=json)
    live = live or os.environ.get("CI") == "true"
    if not fast:
        _provision(_services(folders, live=live))
    options = ["-m", _FAST] if fast else []
    options += ["--live"] if live else []
    options += ["-k", match] if match else []
    codes, counts = [], Counter[str]()
    reasons: Counter[str] = Counter()
    for some, processes in _batches(folders, workers):
        code, tally = _pytest(some, options, processes, to_stderr=json)
        codes.append(code)
        reasons.update(tally.pop("reasons", {}))
        counts.update(tally)
    if json:
        lint_said = "failed" if lint_code else "passed"
        show_json({"schema": "tests/1", "lint": lint_said, **counts, "reasons": dict(reasons)})
    if lint_code:
        say("lint failed before the tests; its lines are above")
    return max(lint_code, _tests_exit(codes))


def _batches(folders: Sequence[Path], workers: int) -> list[tuple[list[Path], int]]:
    """Split the areas into those that may run two tests at a time, and what must be alone, last.

    What uses one engine or one compiler is kept in one process (tests/conftest.py).
    """
    if workers:
        return [(list(folders), workers)]
    alone = [path for path in folders if path.name == _ALONE]
    others = [path for path in folders if path.name != _ALONE]
    return [(some, n) for some, n in ((others, 2), (alone, 1)) if some]


def _pytest(
    folders: Sequence[Path], options: Sequence[str], processes: int, *, to_stderr: bool
) -> tuple[int, dict[str, Any]]:
    """Run the tests of some areas; return pytest's exit code and its counts."""
    # A mount that a test left there must not take the account of the others with it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        tally = Path(scratch, "tally.json")
        argv = [sys.executable, "-E", "-m", "pytest", *map(str, folders), f"--tally={tally}"]
        # A folder of this run's own: pytest's shared one is cleaned by whoever else runs tests.
        # What takes long is shown: the whole has half an hour.
        argv += [f"--basetemp={scratch}/pytest", "--durations=40", "--durations-min=5", *options]
        argv += ["-n", str(processes), "--dist", "loadgroup"] if processes > 1 else []
        code = _run(argv, to_stderr=to_stderr)
        return code, jsonlib.loads(tally.read_bytes()) if tally.exists() else {}


@task(example="./inv lint --fix", help={"fix": "mend and format what can be mended by a program"})
def lint(_: Context, fix: bool = False, json: bool = False) -> int:
    """Check style, types and layers: ruff, mypy --strict, import-linter."""
    code = _lint(fix=fix, to_stderr=json)
    if json:
        show_json({"schema": "lint/1", "lint": "failed" if code else "passed"})
    return code


@task(
    example="./inv bench-self --area agent",
    help={"area": "only tests/bench/AREA.py"},
)
def bench_self(_: Context, area: str = "", json: bool = False) -> int:
    """Measure this project against plain rivals, in one run; a ratio over its limit is exit 10."""
    rows: list[dict[str, Any]] = []
    for bench in _benches(area):
        say(f"bench {bench.stem}")
        rows += [{"area": bench.stem, **row} for row in _measure(bench, to_stderr=json)]
    over = [row for row in rows if row["limit"] is not None and row["ratio"] > row["limit"]]
    if json:
        show_json({"schema": "bench-self/1", "rows": rows})
    for row in over:
        say(f"{row['area']}: {row['what']}: ratio {row['ratio']:.2f} is over {row['limit']}")
    return int(Exit.DIFFERS) if over else 0


def _run(argv: Sequence[str], *, to_stderr: bool = False) -> int:
    """Run `argv` in the checkout and return its exit code; its stdout may go to our stderr."""
    sys.stdout.flush()
    out = sys.stderr if to_stderr else None
    return subprocess.run(argv, cwd=HERE.top, stdout=out, check=False).returncode


def _lint(*, fix: bool = False, to_stderr: bool = False) -> int:
    """Run all of the checks even when one fails; 1 when any did. One that passes is silent."""
    python = (sys.executable, "-E", "-m")
    checks = {
        "ruff": (*python, "ruff", "check", "--quiet", *(["--fix"] if fix else [])),
        "format": (*python, "ruff", "format", "--quiet", *([] if fix else ["--diff"])),
        "mypy": (*python, "mypy", "--no-error-summary"),
        "layers": (str(Path(sys.executable).with_name("lint-imports")), "--no-logo"),
    }
    failed = []
    for name, argv in checks.items():
        say(f"lint: {name}")
        done = subprocess.run(
            argv, cwd=HERE.top, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode:
            failed.append(name)
            print(done.stdout.decode("utf-8", "replace"), file=sys.stderr if to_stderr else None)
    if failed:
        say(f"lint: failed: {', '.join(failed)}")
    return 1 if failed else 0


def _areas(area: str) -> list[Path]:
    """The folders that hold tests, or the one asked for.

    Raises:
        BadValues: there is no such area.
    """
    found = sorted({path.parent for path in _TESTS.glob("*/test_*.py")})
    if not area:
        return found
    chosen = [path for path in found if path.name == area]
    if not chosen:
        raise BadValues(
            f"cannot test the area {area}",
            why=f"tests/{area}/ holds no test_*.py",
            fix=f"choose one of {', '.join(path.name for path in found)}",
        )
    return chosen


def _services(folders: Sequence[Path], *, live: bool) -> list[str]:
    """The services that tests in these folders are marked with."""
    texts = [path.read_text("utf-8") for folder in folders for path in folder.glob("test_*.py")]
    marked = {name for text in texts for name in re.findall(r"pytest\.mark\.(\w+)", text)}
    return sorted((marked & _SERVICES) - (set() if live else {"live"}))


def _provision(services: Sequence[str]) -> None:
    """Install and start what is needed. A failure is no end: the tests skip or fail with reason."""
    argv = ["sh", str(_TESTS / "provision.sh"), "start", "tools", *services]
    if _run(argv, to_stderr=True):
        say("provision: not everything could be set up; the tests that need it say so")


def _tests_exit(codes: Sequence[int]) -> int:
    """Pytest's exit codes as ours: interrupted is 130, 'nothing was selected' is a wrong value."""
    found = {code for code in codes if code != 5} or {5}
    ours = {0: 0, 2: int(Exit.INTERRUPTED), 5: int(Exit.VALUES)}
    return max(ours.get(code, 1) for code in found)


def _benches(area: str) -> list[Path]:
    found = sorted((_TESTS / "bench").glob("*.py"))
    chosen = [path for path in found if area in ("", path.stem)]
    if area and not chosen:
        raise BadValues(
            f"cannot measure the area {area}",
            why=f"there is no tests/bench/{area}.py",
            fix=f"choose one of {', '.join(path.stem for path in found) or '(none yet)'}",
        )
    return chosen


# A bench runs in a process of its own, so that no other's imports, caches or memory colour it.
_BENCH = """
import json, runpy, sys
sys.path.insert(0, sys.argv[2])
rows = runpy.run_path(sys.argv[1])["main"]() or []
with open(sys.argv[3], "w") as out:
    json.dump(rows, out)
"""


def _measure(bench: Path, *, to_stderr: bool) -> Iterator[dict[str, Any]]:
    """Run one bench's main(); yield the rows that it returns (what, ours, rival, ratio, limit)."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch, "rows.json")
        argv = [sys.executable, "-E", "-c", _BENCH, str(bench), str(HERE.top), str(rows)]
        code = _run(argv, to_stderr=to_stderr)
        if code:
            raise BadValues(
                f"the bench {bench.stem} did not end",
                why=f"its process ended with {code}; what it said is above",
                fix=f"mend tests/bench/{bench.name}, or what it measures",
            )
        for row in jsonlib.loads(rows.read_bytes()):
            yield {"limit": None, **row}
