"""Who is using this site, from /proc alone."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from .words import printable


class Holder(NamedTuple):
    """A process that runs code of the package.

    `start` is in clock ticks since boot: with the pid it names one process for good. `mapped` is
    the first file of the site that it maps.
    """

    pid: int
    start: int
    command: str
    mapped: str

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    def __str__(self) -> str:
        command = printable(self.command)[:200]
        return f"pid {self.pid} (start {self.start}) maps {printable(self.mapped)}: {command}"


def holders(site: str, package: str) -> list[Holder]:
    """Return the processes that run the package from this site, this one left out.

    Both folders are link-free. A process that maps a file of the package counts. One that has read
    only .py files maps none of them; if it is vLLM by name and maps anything else of the same site
    (numpy's, torch's), it runs from there, too.
    """
    found = []
    for entry in sorted((e for e in os.listdir("/proc") if e.isdigit()), key=int):
        pid = int(entry)
        if pid == os.getpid():
            continue
        try:
            maps = _read(pid, "maps")
            mapped = mapped_below(maps, package)
            if not mapped and mapped_below(maps, site) and _is_vllm(pid):
                mapped = mapped_below(maps, site)
            if mapped:
                found.append(Holder(pid, start_of(pid), _command(pid), mapped))
        except OSError:
            continue  # it has just ended, or belongs to somebody else
    return found


def _is_vllm(pid: int) -> bool:
    words = _read(pid, "cmdline").split(b"\0")
    return _read(pid, "comm").startswith(b"VLLM::") or any(
        word.rpartition(b"/")[2] == b"vllm" or word.startswith(b"vllm.") for word in words
    )


def mapped_below(maps: bytes, folder: str) -> str:
    """Return the first mapped path below `folder` in the text of /proc/PID/maps, or ""."""
    prefix = os.fsencode(folder.rstrip("/") + "/")
    if prefix not in maps:
        return ""
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(prefix):
            return os.fsdecode(fields[5])
    return ""


def start_of(pid: int) -> int:
    """Return when a process started, in clock ticks since boot."""
    # The name in parentheses may hold spaces and parentheses itself: count from the last one.
    return int(_read(pid, "stat").rpartition(b")")[2].split()[19])


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").strip().decode("utf-8", "replace")


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
