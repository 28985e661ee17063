"""Say which files a process has mapped, and whether they are the ones that lie there now.

A path proves nothing: after a rename the process still runs the old file under the same name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from .proc import blind, text

_GONE = " (deleted)"
_NO_FILES = ("/memfd:", "/SYSV", "/dev/", "/anon_hugepage", "/drm")
# A file system like any other: code can be loaded from it.
_FILES_AFTER_ALL = "/dev/shm/"  # noqa: S108


@dataclass(frozen=True, slots=True)
class Mapped:
    """One file that a process has mapped. `device` is "major:minor" in hexadecimal, as in maps."""

    path: str
    device: str
    inode: int
    deleted: bool = False


def parse(raw: str) -> tuple[Mapped, ...]:
    """Return the files of a /proc/PID/maps text, each once, in order of appearance.

    A name may itself end in " (deleted)": where such a file lies there with the same inode, it is
    its name; else the mark is the kernel's. Anonymous, memfd, SysV and device mappings are no
    files and are left out; shared memory below /dev/shm is files.
    """
    found: dict[Mapped, None] = {}
    for line in raw.split("\n"):
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith("/") or fields[4] == "0":
            continue
        path = fields[5].replace("\\012", "\n")
        if path.startswith(_NO_FILES) and not path.startswith(_FILES_AFTER_ALL):
            continue
        found[_mapped(path, fields[3], int(fields[4]))] = None
    return tuple(found)


def of(pid: int) -> tuple[Mapped, ...]:
    """Return the files that `pid` has mapped; raise CannotTell where it may not be looked at."""
    try:
        return parse(text(f"/proc/{pid}/maps"))
    except (FileNotFoundError, ProcessLookupError):
        return ()
    except OSError as err:
        raise blind(f"the mappings of process {pid}", err) from err


def identities(paths: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Return device and inode of each file *as maps shows them*, by mapping the files here.

    stat does not do: on an overlay file system it names the overlay's device, and older kernels
    show the layer's in maps.
    """
    import mmap

    held, shown = [], {}
    try:
        for path in paths:
            with open(path, "rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    continue  # an empty file cannot be mapped, and nobody runs it
                held.append(mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ))
                shown[os.path.realpath(path)] = path
        seen = {m.path: (m.device, m.inode) for m in parse(text("/proc/self/maps"))}
    finally:
        for region in held:
            region.close()
    return {path: seen[real] for real, path in shown.items() if real in seen}


def _mapped(path: str, device: str, inode: int) -> Mapped:
    if not path.endswith(_GONE):
        return Mapped(path, device, inode)
    try:
        if os.stat(path).st_ino == inode:
            return Mapped(path, device, inode)
    except OSError:
        pass
    return Mapped(path[: -len(_GONE)], device, inode, deleted=True)
