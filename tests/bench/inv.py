"""What ./inv costs beyond the Invoke that it starts, and what listing the tasks costs."""

from __future__ import annotations

import statistics
import subprocess
import time
from typing import Any

from deploy.layout import HERE

_ROUNDS = 15
_VENV = HERE.top / ".venv/bin"


def _once(argv: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, cwd=HERE.top, timeout=60)
    return time.perf_counter() - start


def _pair(what: str, ours: list[str], rival: list[str]) -> dict[str, Any]:
    """Time both in turns; the medians of `_ROUNDS`."""
    times = [(_once(ours), _once(rival)) for _ in range(_ROUNDS)]
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{what}: {mine * 1000:.0f} ms against {other * 1000:.0f} ms, {mine - other:+.3f} s")
    return {"what": what, "ours": mine, "rival": other, "ratio": mine / other}


def main() -> list[dict[str, Any]]:
    plain = [str(_VENV / "python"), "-E", str(_VENV / "inv")]
    wrapped = [str(HERE.top / "inv")]
    return [
        _pair("./inv --version, against Invoke without the script", [*wrapped, "--version"],
              [*plain, "--version"]),
        _pair("./inv --list, against ./inv --version", [*wrapped, "--list"],
              [*wrapped, "--version"]),
    ]  # fmt: skip
