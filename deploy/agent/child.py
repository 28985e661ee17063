"""Child processes with a time-out, without `subprocess` (its import costs as much as a child).

Input and output are nameless files in memory, not pipes: nobody can block on a full pipe, and a
grandchild that keeps the output open does not keep us waiting.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping


class Child:
    """One running program. Call `finish` once, or `kill`."""

    def __init__(self, argv: tuple[str, ...], env: Mapping[str, str], stdin: bytes = b"") -> None:
        self._files = [_nameless() for _ in range(3)]
        _write(self._files[0], stdin)
        # The offset is shared with the child: it must read from the start.
        os.lseek(self._files[0], 0, os.SEEK_SET)
        plumbing = [(os.POSIX_SPAWN_DUP2, fd, i) for i, fd in enumerate(self._files)]
        self._ended = False
        # Own group: a time-out ends whatever the program started, too.
        self.pid = os.posix_spawn(argv[0], argv, env, file_actions=plumbing, setpgroup=0)

    def finish(self, timeout: float) -> tuple[int, bytes, bytes]:
        """Return exit status (negative: the signal), output and errors.

        Raises TimeoutError after ending the child and its group.
        """
        try:
            status = _wait(self.pid, timeout)
            if status is None:
                raise TimeoutError(f"no end after {timeout:g} s")
            self._ended = True
            return status, _whole(self._files[1]), _whole(self._files[2])
        finally:
            self.kill()

    def kill(self) -> None:
        """End the child if it still runs, and let go of its files. May be called again."""
        if not self._ended:
            self._ended = True  # its number may belong to another process from now on
            try:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
        while self._files:
            os.close(self._files.pop())


def _nameless() -> int:
    try:
        fd = os.memfd_create("dcu-bundle", os.MFD_CLOEXEC)
    except OSError:  # an old kernel, or a sandbox
        fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)  # noqa: S108
    if fd > 2:
        return fd
    # Started with a closed standard stream: 0..2 would be overwritten by the plumbing.
    import fcntl

    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _whole(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _wait(pid: int, timeout: float) -> int | None:
    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):  # older kernels
        return _poll(pid, timeout)
    try:
        watch = select.poll()
        watch.register(handle, select.POLLIN)
        if not watch.poll(timeout * 1000):
            return None
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _poll(pid: int, timeout: float) -> int | None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None
