"""Read a server's own counters (/metrics) and what its log said of compiling inside a window."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

from . import ports
from .log import NoLog, Place, opened
from .proc import CannotTell

# What tells whether a round measured the server or its caches, and whose requests it served.
NAMES = (
    "vllm:num_preemptions",
    "vllm:prefix_cache_hits",
    "vllm:prefix_cache_queries",
    "vllm:prompt_tokens",
    "vllm:prompt_tokens_cached",
    "vllm:request_success",
)
_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})?\s+([-+0-9.eE]+|NaN)$")
_COMPILING = re.compile(
    rb"compiled during inference|Compiling (a|model|kernel)|\b(JIT|just.in.time) compil"
    rb"|Compilation (took|finished)|Capturing (CUDA|HIP) graph|Graph capturing|Autotun(ing|ed)",
    re.IGNORECASE,
)
_LONGEST = 1 << 16
_SHOWN = 5


def parse(text: str) -> dict[str, float]:
    """Add up the counters of interest over their labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line.strip())
        name = match[1].removesuffix("_total") if match else ""
        if match and name in NAMES and match[2] != "NaN":
            found[name] = found.get(name, 0.0) + float(match[2])
    return found


def fetch(port: int, timeout: float = 10.0) -> dict[str, float]:
    """Ask the server on this machine; nothing where it does not say, no proxy in between."""
    import http.client

    try:
        host = ports.host(port)
    except CannotTell:
        return {}
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read(1 << 24).decode("utf-8", "replace")
        return parse(text) if response.status == 200 else {}
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    finally:
        connection.close()


def compiling(path: str, window: Place, end: Place) -> tuple[int, list[str]]:
    """Return how many lines of a log window speak of compiling, and the first of them."""
    count = 0
    lines: list[str] = []
    for line in _lines(path, window, end):
        if _COMPILING.search(line):
            count += 1
            if len(lines) < _SHOWN:
                lines.append(line.decode("utf-8", "replace").strip()[:300])
    return count, lines


def _lines(path: str, window: Place, end: Place) -> Iterator[bytes]:
    """The lines of the window; of one that was rotated away the marker scan says so."""
    if window.inode != end.inode or not end.inode:
        return
    try:
        with opened(path) as file, io.BufferedReader(file) as lines:
            lines.seek(window.offset)
            left = end.offset - window.offset
            while left > 0 and (line := lines.readline(min(_LONGEST, left))):
                left -= len(line)
                yield line
    except (OSError, NoLog):
        return
