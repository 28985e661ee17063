"""Say whether a folder is fit to compile on: its file system's type, else its measured latency.

A configure run does tens of thousands of small metadata calls. On shared storage each of them is a
round trip: the same configure that takes 14 s on local disk was seen to take 111 s there.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import BundleError, Refused, Unfit

# Types that live across a network or in another process; "fuse" also stands for every "fuse.NAME".
REMOTE = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "fuse",
        "fuseblk",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    }
)
# A local disk needs 5 to 50 us for one call, the fastest network file system some 200 us.
SLOW_US = 500.0
ROUNDS = 48


@dataclass(frozen=True, slots=True)
class Disk:
    """Where a folder lies. `latency_us` is the median of one small metadata call."""

    folder: Path
    mount: str
    type: str
    latency_us: float
    free: int


def probe(folder: Path) -> Disk:
    """Measure the file system of `folder`, which must exist and be writable."""
    mount, kind = mount_of(folder)
    try:
        latency = 0.0 if is_remote(kind) else latency_us(folder)
    except OSError as err:
        raise _cannot_write(folder, err) from err
    stats = os.statvfs(folder)
    return Disk(folder, mount, kind, round(latency, 1), stats.f_bavail * stats.f_frsize)


def require_local(folder: Path) -> Disk:
    """Return the probe of a folder fit to build in.

    Raises:
        Unfit: it is on shared storage, or answers as slowly as if it were.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise _cannot_write(folder, err) from err
    found = probe(folder)
    if is_remote(found.type):
        raise Unfit(
            f"{folder} is no place to compile",
            why=f"{found.mount} is a {found.type} file system, which is not a local disk",
            fix="set kernels.build_dir to a folder on local disk (a container's own / is one)",
        )
    if found.latency_us > SLOW_US:
        raise Unfit(
            f"{folder} is no place to compile",
            why=f"one small file call takes {found.latency_us:.0f} us on {found.mount}"
            f" ({found.type}); the limit is {SLOW_US:.0f} us",
            fix="set kernels.build_dir to a folder on local disk, or wait until this one is idle",
        )
    return found


def is_remote(kind: str) -> bool:
    return kind in REMOTE or kind.startswith("fuse.")


def mount_of(folder: Path, table: str | None = None) -> tuple[str, str]:
    """Return the mount point and type that hold `folder`, from the kernel's mountinfo table."""
    real = os.path.realpath(folder)
    best = ("/", "unknown")
    for line in (table or Path("/proc/self/mountinfo").read_text("utf-8", "replace")).splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = _unescaped(fields[4])
        inside = point in ("/", real) or real.startswith(point.rstrip("/") + "/")
        # The last line of a mount point is the one on top.
        if inside and len(point) >= len(best[0]):
            best = (point, after.split()[0])
    return best


def latency_us(folder: Path) -> float:
    """Return the median time of one create, stat, rename or unlink of an empty file, in us."""
    name = folder / f".probe-{os.getpid()}"
    other = name.with_suffix(".renamed")
    times = []
    try:
        for _ in range(ROUNDS):
            start = time.perf_counter()
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
            os.stat(name)
            os.rename(name, other)
            os.unlink(other)
            times.append((time.perf_counter() - start) / 4)
    finally:
        for left in (name, other):
            left.unlink(missing_ok=True)
    return statistics.median(times) * 1e6


def no_space(folder: Path, err: OSError | None = None) -> BundleError:
    """Return the error for a disk that filled up while building."""
    return Refused(
        f"the disk of {folder} is full",
        why=str(err) if err else "a tool of the build said: no space left on device",
        fix="free some space there, or set kernels.build_dir to a larger disk, and build again",
    )


def _cannot_write(folder: Path, err: OSError) -> Unfit:
    return Unfit(
        f"cannot build in {folder}",
        why=str(err),
        fix="set kernels.build_dir to a folder on local disk that you may write to",
    )


def _unescaped(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text
