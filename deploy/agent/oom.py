"""Read what the kernel said of processes that it ended for want of memory, and whose they were.

The kernel's log is the host's: it tells of every container, and of days ago. A line is this
service's only if it names this container's cgroup and lies after the start; what cannot be told is
counted and not blamed on anybody.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .proc import text

_RECORD = re.compile(
    r"^(?:\d+,\d+,(?P<micro>\d+),[^;]*;|\[\s*(?P<seconds>\d+\.\d+)\]\s*)(?P<text>.*)$", re.MULTILINE
)
_KILL = re.compile(r"^oom-kill:.*task_memcg=(?P<group>[^,]*),task=(?P<task>[^,]*),pid=(?P<pid>\d+)")
_ID = re.compile(r"[0-9a-f]{64}")
_MOST = 20000  # records of a kernel's ring that are read


@dataclass(frozen=True, slots=True)
class Kill:
    """One process that the kernel ended. `seconds` since boot; `host_pid` names nothing here."""

    seconds: float
    group: str
    task: str
    host_pid: int

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "task": self.task, "host_pid": self.host_pid}


def parse(lines: Iterable[str]) -> tuple[Kill, ...]:
    """Return the kills among lines of dmesg or of /dev/kmsg."""
    found = []
    for line in lines:
        record = _RECORD.match(line)
        kill = _KILL.match(record["text"]) if record else None
        if record is None or kill is None:
            continue
        seconds = int(record["micro"]) / 1e6 if record["micro"] else float(record["seconds"])
        found.append(Kill(seconds, kill["group"], kill["task"], int(kill["pid"])))
    return tuple(found)


def attributed(kills: Iterable[Kill], container: str, since: float) -> tuple[tuple[Kill, ...], int]:
    """Return this container's kills after `since`, and how many later ones nobody can attribute.

    `container` is this container's id (64 digits), "" outside of containers, "?" where it is not
    known: then nothing is attributed.
    """
    later = [kill for kill in kills if kill.seconds >= since]
    if container == "?":
        return (), len(later)
    ours = tuple(kill for kill in later if _container(kill.group) == container)
    return ours, 0


def look(since: float) -> dict[str, Any]:
    """Read the kernel's log; `error` says why it cannot be read."""
    try:
        kills = parse(_records())
    except OSError as err:
        return {"ours": [], "unattributed": 0, "error": f"the kernel's log: {err.strerror}"}
    ours, unknown = attributed(kills, here(), since)
    return {"ours": [kill.to_json() for kill in ours], "unattributed": unknown, "error": ""}


def here() -> str:
    """Return this container's id, "" outside of one, "?" where a cgroup namespace hides it."""
    group = text("/proc/self/cgroup")
    if _ID.search(group):
        return _container(group)
    # In a cgroup namespace the path is "/"; what Docker mounts into a container names it still.
    mounted = re.findall(r"/containers/([0-9a-f]{64})/", text("/proc/self/mountinfo"))
    if mounted:
        return str(mounted[0])
    inside = os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv")
    return "?" if inside else ""


def _container(group: str) -> str:
    found = _ID.findall(group)
    return str(found[-1]) if found else ""


def _records() -> list[str]:
    """Read the ring as it is now, without waiting for more."""
    found: list[str] = []
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while len(found) < _MOST:
            try:
                found.append(os.read(fd, 8192).decode("utf-8", "replace"))
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # the ring overtook us: the next read goes on with what is left
    finally:
        os.close(fd)
    return found
