"""One writer a site, and one who can be stopped until the commit point.

The lock is a flock of the site's own folder: it dies with its process, needs no file, and a deploy
that finds nothing to do leaves no trace. Who holds it stands in a file, for people only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import signal
import time
from types import FrameType
from typing import Any

from .journal import LOCK
from .receipt import HOME, KEPT
from .tree import TreeReader, TreeWriter
from .words import Interrupted, Refused, canonical, printable

_PAUSE = 0.1  # seconds between two tries for the lock


class Lock:
    """Held while it exists; `release` or the end of the process lets go."""

    def __init__(self, tree: TreeReader, wait: float) -> None:
        self._fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=tree.site_fd)
        end = time.monotonic() + wait
        while not self._try(tree):
            if time.monotonic() >= end:
                os.close(self._fd)
                raise _held(tree)
            time.sleep(_PAUSE)

    def _try(self, tree: TreeReader) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            if err.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise Refused(
                "the site cannot be locked",
                why=f"{tree.visible('')}: {err.strerror}",
                fix="a site must lie on a file system of this machine, not on a share",
            ) from err
        return True

    def sign(self, tree: TreeWriter, info: dict[str, Any]) -> None:
        """Say who holds it, now that something is going to be written."""
        owner = owner_of(os.fstat(tree.site_fd))
        for folder in (HOME, KEPT):
            tree.make_folder(folder, 0o755, owner)
        tree.unlink(LOCK)  # of a process that died
        line = canonical(info)
        tree.create(LOCK, lambda fd: os.write(fd, line), 0o644, owner)

    def release(self) -> None:
        os.close(self._fd)


def owner_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_uid, found.st_gid


def _held(tree: TreeReader) -> Refused:
    try:
        info = json.loads(tree.read(LOCK))
    except (OSError, ValueError):
        info = {}
    who = ", ".join(f"{key} {printable(str(value))}" for key, value in sorted(info.items()))
    return Refused(
        "another deploy is at work in this site",
        why=who or "it has only just begun and has not said yet who it is",
        fix="wait for it with --wait SECONDS, or end that process: the lock ends with it",
    )


class Watch:
    """Turns signals, and the end of the line, into Interrupted, until the commit point."""

    def __init__(self, line: int | None = None) -> None:
        self._line = line  # a descriptor whose end means that the caller is gone
        self._committed = False
        self.late = 0  # the last signal seen

    def arm(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(number, self._signal)

    def _signal(self, number: int, _: FrameType | None) -> None:
        if self._committed or self.late:
            self.late = number
            return
        self.late = number  # only the first one interrupts: the second must not stop the clean-up
        raise _interrupted(signal.Signals(number).name)

    def check(self) -> None:
        """Raise Interrupted when the line has ended; called between two files."""
        if self._line is None or self._committed:
            return
        ready, _, _ = select.select([self._line], [], [], 0)
        if ready and not os.read(self._line, 1):
            raise _interrupted("the end of the line")

    def commit(self) -> None:
        """From here on nothing stops the agent but its end."""
        self.check()
        self._committed = True


def _interrupted(by: str) -> Interrupted:
    return Interrupted(
        "stopped before the commit point",
        why=f"it was ended by {by}",
        fix="nothing was changed; run it again",
    )
