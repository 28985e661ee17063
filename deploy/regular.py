"""A file that somebody names, read whole: neither a pipe that hangs, nor bytes without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read. Raises OSError, also for what is another kind of thing."""
    # O_NONBLOCK: a FIFO of that name must not hang the caller.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(handle, "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    Raises:
        OSError: it cannot be read, is another kind of thing, or has more bytes.
    """
    with open_regular(path) as file:
        said = os.fstat(file.fileno()).st_size
        # Nothing of what is too large by its own account is read; a file of /proc gives none.
        raw = b"" if said > limit else file.read(limit + 1)
    size = max(said, len(raw))
    if size > limit:
        why = f"it has {size:,} bytes, more than the {limit:,} allowed"
        raise OSError(errno.EFBIG, why, str(path))
    return raw
