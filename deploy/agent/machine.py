"""Say what runs on this machine, from /proc alone; signal and change nothing.

`snapshot` is this module's face: every process of interest with its role, and who listens on the
port. No ss, no pgrep and no device tool is needed: containers often lack them, a pattern search
finds itself, and the device tool speaks in pids of the host.

Each file below /proc is read once. A process is held by a descriptor of its folder while it is
read, so a pid that is given away meanwhile yields an error and never another process's facts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .ports import Listener, listening
from .proc import blind, text
from .roles import SERVING, Role, role_of

TICKS = os.sysconf("SC_CLK_TCK")  # ticks a second: the unit of `Process.start`
_PAGE = os.sysconf("SC_PAGE_SIZE")
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_DEVICES = ("/dev/kfd", "/dev/mkfd", "/dev/dri/")
_CONTAINER = re.compile(r"([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process. `start` is in ticks since boot, `memory` in bytes (resident).

    `sockets` is None where this user may not look; `container` is the id's first 12 digits for a
    process of another container, "elsewhere" where only its namespaces tell it apart, else "".
    """

    pid: int
    parent: int
    session: int
    start: int
    state: str
    comm: str
    argv: tuple[str, ...]
    memory: int
    role: Role
    container: str = ""
    devices: tuple[str, ...] = ()
    sockets: frozenset[int] | None = frozenset()
    orphan: bool = False

    @property
    def zombie(self) -> bool:
        return self.state == "Z"

    @property
    def serving(self) -> bool:
        """True for the processes that make up a server."""
        return self.role in SERVING

    @property
    def identity(self) -> tuple[int, int]:
        """Pid and start: together they name one process for as long as the machine is up."""
        return self.pid, self.start

    def to_json(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "parent": self.parent,
            "session": self.session,
            "start_ticks": self.start,
            "state": self.state,
            "comm": self.comm,
            "argv": list(self.argv),
            "memory": self.memory,
            "role": self.role.value,
            "container": self.container,
            "devices": list(self.devices),
            "orphan": self.orphan,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was seen. `processes` holds those of interest, by pid; the others are counted."""

    processes: tuple[Process, ...]
    listeners: tuple[Listener, ...] = ()
    port: int = 0
    seen: int = 0
    hidden: int = 0  # processes whose descriptors this user may not list
    booted: float = 0.0  # seconds since the epoch
    parents: Mapping[int, int] = field(default_factory=dict)

    def _started(self, process: Process) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.booted + process.start / TICKS))

    def of(self, *roles: Role) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.role in roles)

    def at(self, pid: int) -> Process | None:
        return next((process for process in self.processes if process.pid == pid), None)

    def family(self, pid: int) -> tuple[Process, ...]:
        """The process `pid`, its descendants and its session, which outlives the leader."""
        return tuple(
            process
            for process in self.processes
            if pid in (process.pid, process.session) or pid in self.ancestors(process.pid)
        )

    def ancestors(self, pid: int) -> tuple[int, ...]:
        return _ancestors(pid, self.parents)

    def to_json(self) -> dict[str, Any]:
        return {
            "processes": [
                {**process.to_json(), "started": self._started(process)}
                for process in self.processes
            ],
            "listeners": [listener.to_json() for listener in self.listeners],
            "port": self.port,
            "seen": self.seen,
            "hidden": self.hidden,
        }


def snapshot(port: int = 0, *, also: Iterable[int] = ()) -> Snapshot:
    """Read the machine's processes once; `also` names pids to keep whatever they are.

    The caller and its ancestors are left out: they are the question, not the answer.
    """
    heard = listening(port) if port else ()
    wanted = frozenset(listener.inode for listener in heard)
    places = _Places.here()
    found = [p for pid in _pids() if (p := _read(pid, places, wanted)) is not None]
    parents = {process.pid: process.parent for process in found}
    ourselves = {os.getpid(), *_ancestors(os.getpid(), parents)}
    others = [process for process in found if process.pid not in ourselves]
    # A listener may well be an ancestor (a test runner): it still holds the port.
    owners = {inode: _owners(found, inode) for inode in wanted}
    keep = {*also, *(pid for pids in owners.values() for pid in pids)}
    return Snapshot(
        processes=tuple(_of_interest(others, parents, keep)),
        listeners=tuple(replace(listener, pids=owners[listener.inode]) for listener in heard),
        port=port,
        seen=len(found),
        hidden=sum(process.sockets is None for process in others),
        booted=time.time() - uptime(),
        parents=parents,
    )


def device_files() -> list[str]:
    """Return the card's device files that this machine has: those whose holders are looked for."""
    return [path for path in _DEVICES if os.path.exists(path)]


def environment(pid: int) -> dict[str, str]:
    """Return the environment that `pid` was started with; raise CannotTell where it is hidden."""
    try:
        raw = text(f"/proc/{pid}/environ")
    except OSError as err:
        raise blind(f"the environment of process {pid}", err) from err
    pairs = (item.partition("=") for item in raw.split("\0") if "=" in item)
    return {name: value for name, _, value in pairs}


def working_folder(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError as err:
        raise blind(f"the working folder of process {pid}", err) from err


def start_of(pid: int) -> int:
    """Return the start of `pid` in ticks since boot, or 0 when no such process runs (any more)."""
    state, start = _state_of(pid)
    return 0 if state in ("Z", "X") else start


def given_away(pid: int, start: int) -> bool:
    """True when `pid` names another process by now, dead or alive, than the one of that start."""
    return _state_of(pid)[1] not in (0, start)


def _state_of(pid: int) -> tuple[str, int]:
    try:
        fields = text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def boot_id() -> str:
    return text("/proc/sys/kernel/random/boot_id").strip()


def uptime() -> float:
    """Seconds since boot, on the clock of `Process.start`."""
    return float(text("/proc/uptime").split()[0])


@dataclass(frozen=True, slots=True)
class _Places:
    """Where this process lives, to tell processes of other containers apart."""

    pids: str
    mounts: str
    container: str

    @classmethod
    def here(cls) -> _Places:
        group = _container_of(text("/proc/self/cgroup"))
        return cls(os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/mnt"), group)

    def name(self, folder: int) -> str:
        """Return "" for a process of this place, else the name of its container."""
        try:
            pids = os.readlink("ns/pid", dir_fd=folder)
            mounts = os.readlink("ns/mnt", dir_fd=folder)
        except PermissionError:  # another user's, or the host's: its cgroup can still be seen
            pids, mounts = self.pids, ""
        if pids == self.pids and mounts == self.mounts:
            return ""
        cgroup = text("cgroup", folder)
        group = _container_of(cgroup)
        # A path that leads up lies outside of the cgroup namespace that we are in.
        if pids == self.pids and group == self.container and ":/.." not in cgroup:
            return ""  # a service with private mounts (systemd's PrivateTmp) is no container
        # Seen from a container that shares the host's pids, a process of the host has no id.
        return group[:12] if group and group != self.container else "elsewhere"


def _read(pid: int, places: _Places, wanted: frozenset[int]) -> Process | None:
    """Return one process, or None when it has gone or is a thread of the kernel."""
    try:
        folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read_held(pid, folder, places, wanted)
    except (FileNotFoundError, ProcessLookupError):
        return None
    finally:
        os.close(folder)


def _read_held(pid: int, folder: int, places: _Places, wanted: frozenset[int]) -> Process | None:
    head, _, tail = text("stat", folder).rpartition(")")
    fields = tail.split()
    if int(fields[6]) & _KERNEL_THREAD:
        return None
    dead = fields[0] in ("Z", "X")
    argv = () if dead else _argv(text("cmdline", folder))
    comm = head.partition("(")[2]
    devices, sockets = ((), frozenset()) if dead else _descriptors(folder, wanted)
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
        state=fields[0],
        comm=comm,
        argv=argv,
        memory=int(fields[21]) * _PAGE,
        role=role_of(argv, comm),
        container=places.name(folder) if not dead else "",
        devices=devices,
        sockets=sockets,
    )


def _descriptors(
    folder: int, wanted: frozenset[int]
) -> tuple[tuple[str, ...], frozenset[int] | None]:
    """Return the device files that a process holds open, and which of the sockets are its."""
    try:
        fd = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    except PermissionError:
        return (), None
    devices, sockets = set(), set()
    try:
        for name in os.listdir(fd):
            try:
                target = os.readlink(name, dir_fd=fd)
            except OSError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                if wanted and int(target[8:-1]) in wanted:
                    sockets.add(int(target[8:-1]))
            elif target.startswith(_DEVICES):
                devices.add(target)
    finally:
        os.close(fd)
    return tuple(sorted(devices)), frozenset(sockets)


def _of_interest(
    others: list[Process], parents: Mapping[int, int], keep: set[int]
) -> Iterator[Process]:
    by_pid = {process.pid: process for process in others}
    for process in others:
        lineage = [by_pid[pid] for pid in _ancestors(process.pid, parents) if pid in by_pid]
        served = any(ancestor.serving for ancestor in lineage)
        if process.zombie and served:
            yield process
        elif process.role is Role.SPAWNED or process.role is Role.OTHER:
            if served or process.devices or process.pid in keep:
                yield process
        else:
            yield _with_orphan(process, lineage)


def _with_orphan(process: Process, lineage: list[Process]) -> Process:
    """Mark an engine or worker that has no server above it, whoever adopted it."""
    headless = process.role in (Role.ENGINE, Role.WORKER, Role.COORDINATOR) and not any(
        ancestor.role is Role.SERVER and not ancestor.zombie for ancestor in lineage
    )
    if not headless or process.zombie:
        return process
    return replace(process, orphan=True)


def _ancestors(pid: int, parents: Mapping[int, int]) -> tuple[int, ...]:
    chain: list[int] = []
    while (pid := parents.get(pid, 0)) and pid not in chain:
        chain.append(pid)
    return tuple(chain)


def _owners(processes: list[Process], inode: int) -> tuple[int, ...]:
    return tuple(p.pid for p in processes if p.sockets and inode in p.sockets)


def _argv(raw: str) -> tuple[str, ...]:
    # A process that retitled itself leaves its old arguments' room behind as NULs.
    return tuple(raw.rstrip("\0").split("\0")) if raw.strip("\0") else ()


def _container_of(cgroup: str) -> str:
    """Return the container id that a cgroup file names, or ""."""
    found = _CONTAINER.findall(cgroup)
    return str(found[-1]) if found else ""


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
