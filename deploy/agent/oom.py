"""Read what the kernel said of processes that it ended for want of memory, and whose they were.

The kernel's log is the host's: it tells of every container, and of days ago. A line is this
service's only if it names the service's cgroup, or else this container's, and lies after the start;
what cannot be told is counted and not blamed on anybody.
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
_GIVEN = frozenset({"/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/run/.containerenv"})
_GIVER = re.compile(r"containers/([0-9a-f]{64})/")
_FIRST = "cgroup:[4026531835]"  # the number is the kernel's own constant (linux/proc_ns.h)
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


def attributed(
    kills: Iterable[Kill], container: str, since: float, group: str = ""
) -> tuple[tuple[Kill, ...], int]:
    """Return the service's kills after `since`, and how many later ones nobody can attribute.

    `group` is the cgroup in which the service was started. Where nobody could note it, this
    container's kills are taken for its: `container` is its id (64 digits), "" outside of
    containers, "?" where it is not known: then nothing is attributed.
    """
    later = [kill for kill in kills if kill.seconds >= since]
    if group:
        return tuple(kill for kill in later if kill.group == group), 0
    if container == "?":
        return (), len(later)
    ours = tuple(kill for kill in later if _container(kill.group) == container)
    return ours, 0


def look(since: float, group: str = "") -> dict[str, Any]:
    """Read the kernel's log; `error` says why it cannot be read."""
    try:
        kills = parse(_records())
    except OSError as err:
        return {"ours": [], "unattributed": 0, "error": f"the kernel's log: {err.strerror}"}
    ours, unknown = attributed(kills, here(), since, group)
    return {"ours": [kill.to_json() for kill in ours], "unattributed": unknown, "error": ""}


def group_of(pid: int) -> str:
    """Return the cgroup that limits a process's memory, as the kernel's log names it; "" if untold.

    In a namespace of cgroups the paths are other ones than the kernel's.
    """
    if os.readlink("/proc/self/ns/cgroup") != _FIRST:
        return ""
    rows = [row.split(":", 2) for row in text(f"/proc/{pid}/cgroup").splitlines()]
    groups = {name: path for _, names, path in rows for name in names.split(",")}
    return groups.get("memory", groups.get("", ""))


def here() -> str:
    """Return this container's id, "" outside of one, "?" where a cgroup namespace hides it."""
    group = text("/proc/self/cgroup")
    if _ID.search(group):
        return _container(group)
    # In a cgroup namespace the path is "/"; what the engine mounts into a container names it still.
    # Only that: a host shows mounts of all its containers, below the engine's own folders.
    for row in text("/proc/self/mountinfo").splitlines():
        source, place = row.split(" ")[3:5]
        if place in _GIVEN and (named := _GIVER.search(source)):
            return named[1]
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
