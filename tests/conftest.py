"""What all areas share: services by marker, strict skips in CI, and the closing account of skips.

A test that needs a service carries its marker (docker, sshd, hip, live), and
`tests/provision.sh status` says whether it is there. A skip whose reason names a mend
(`apt-get install ...`, `provision.sh`) is something that CI must have installed: with CI=true it is
a failure.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests import table
from tests.table import Table

_PROVISION = Path(__file__).with_name("provision.sh")
_SERVICES = ("docker", "sshd", "hip", "live")
_CANNOT_BE_HAD = 77
_MENDABLE = re.compile(r"apt-get install|provision\.sh")

# Tests speak with git and children of their own; what a developer has set must not colour them.
# Proxies stay: pip may need them, and code that must not use one is tested with one planted.
_STRAY = re.compile(r"(GIT_|VLLM_|DCU_(?!TEST_)|INVOKE_|PYTHON(?!IOENCODING$)).*")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--live", action="store_true", help="also what runs the real vLLM server")
    parser.addoption("--tally", metavar="FILE", help="write the counts as JSON to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "plants(item): plants an item of the table, tests/table.py")
    config.pluginmanager.register(Table())
    config.pluginmanager.register(table)
    # A run in the background (nohup, `... &` in a script) ignores these, and so would the children
    # that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for name in [name for name in os.environ if _STRAY.fullmatch(name)]:
        del os.environ[name]


# First: xdist reads the groups in its own hook of this name.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes, keep together what is in one file, or uses one engine or compiler."""
    for item in items:
        shared = (name for name in ("docker", "hip") if item.get_closest_marker(name))
        item.add_marker(pytest.mark.xdist_group(next(shared, str(item.path.stem))))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Cut what is long: a test's name is put into the environment, which holds 128 KiB a word."""
    if isinstance(val, str | bytes) and len(val) > 200:
        return f"{val[:60]!r}... of {len(val)}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    # What xdist did with a group is seen in the name alone; without it tests meet in silence.
    if getattr(item.config.option, "loadgroup", False) and "@" not in item.nodeid:
        pytest.fail("this test is in no group: it may meet another that uses the same service")
    for service in _SERVICES:
        if item.get_closest_marker(service) is None:
            continue
        if service == "live" and not item.config.getoption("--live"):
            pytest.skip("the live server was not asked for (--live)")
        _require(service)


def _require(service: str) -> None:
    code, said = _status(service)
    if code == _CANNOT_BE_HAD:
        pytest.skip(f"{service} cannot be had here: {said}")
    if code:
        pytest.skip(f"{service} is not set up ({said}): tests/provision.sh start {service}")


@lru_cache
def _status(service: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            ["sh", str(_PROVISION), "status", service],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "no answer within 60 s"
    lines = (done.stderr or done.stdout).strip().splitlines()
    return done.returncode, lines[-1] if lines else f"exit {done.returncode}"


@pytest.fixture(scope="session")
def pythons() -> dict[str, Path]:
    """Every interpreter that is here, "3.10" -> its path: on PATH, or kept by a version manager."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    folders = [Path(f) for f in os.environ.get("PATH", "").split(os.pathsep) if f]
    named = [
        f / name for f in folders for name in ("python3", *(f"python3.{n}" for n in range(6, 15)))
    ]
    found: dict[str, Path] = {}
    for path in [*sorted(kept.glob("*/bin/python")), *named]:
        version = _version_of(path) if os.access(path, os.X_OK) else None
        if version:
            found.setdefault(version, path)
    return found


@lru_cache
def _version_of(python: Path) -> str | None:
    """Return "3.11" for an interpreter that starts, None for one that does not (some shims)."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [python, "-E", "-S", "-c", ask], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.skipped and os.environ.get("CI") == "true" and _MENDABLE.search(_reason(report)):
        report.outcome = "failed"
        report.longrepr = f"CI must not skip what can be installed: {_reason(report)}"
    return report


def _reason(report: Any) -> str:
    """Why a test was skipped, or what an expected failure expected."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(getattr(report, "wasxfail", "") or report.longrepr)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    reasons = Counter(_reason(report) for report in stats.get("skipped", []))
    if reasons:
        terminalreporter.section("skipped", sep="-")
        for reason, count in sorted(reasons.items()):
            terminalreporter.write_line(f"{count:4d}  {reason}")
    if config.getoption("--tally"):
        _write_tally(Path(config.getoption("--tally")), stats, reasons)


def _write_tally(path: Path, stats: dict[str, Any], reasons: Counter[str]) -> None:
    kinds = ("passed", "failed", "error", "skipped", "xfailed")
    counts = {kind: len(stats.get(kind, [])) for kind in kinds}
    path.write_text(json.dumps({**counts, "reasons": dict(sorted(reasons.items()))}))
