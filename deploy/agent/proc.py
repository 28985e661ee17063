"""Read the kernel's files below /proc: whole, once, and never guessing.

What may not be looked at is CannotTell, which no caller may take for "there is none".
"""

from __future__ import annotations

import os

from .words import BundleError, Exit


class CannotTell(BundleError):
    """A question about the machine that could not be answered; never to be read as "no"."""

    exit = Exit.UNFIT


def text(path: str, folder: int | None = None) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        parts = [os.read(fd, 65536)]
        while parts[-1]:
            parts.append(os.read(fd, 65536))
    finally:
        os.close(fd)
    return b"".join(parts).decode("utf-8", "surrogateescape")


def blind(what: str, err: OSError) -> CannotTell:
    mend = "run this as the user who runs the service, or as root"
    if not os.geteuid():  # a container's root, without the right to look into others
        mend = "run this where the service runs, or give this container CAP_SYS_PTRACE"
    return CannotTell(f"cannot tell {what}", why=str(err), fix=mend)
