"""Contents kept in the user's persistent folder, so that a rebuilt target needs none of them again.

A kept content is believed only after its bytes were hashed. Several targets may share the folder;
everything is written beside and renamed, so nobody sees half a file. A folder that cannot be
written is no failure: the contents then come over the line every time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from typing import Any

BOUND = 2 << 30  # bytes of contents that are kept
_CHUNK = 1 << 18


class Store:
    """The folder `state_dir` of one operator. `trouble` says why it is of no use, if so."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.expanduser(folder) if folder else ""
        self._blobs = os.path.join(self._folder, "blobs")
        self.trouble = "" if folder else "no state_dir was given"
        if folder:
            self._make()

    def _make(self) -> None:
        try:
            os.makedirs(self._blobs, mode=0o700, exist_ok=True)
            os.makedirs(os.path.join(self._folder, "targets"), mode=0o700, exist_ok=True)
            if not os.access(self._blobs, os.W_OK | os.X_OK):
                self.trouble = f"{self._folder} cannot be written"
        except OSError as err:
            self.trouble = f"{self._folder}: {err.strerror}"

    def whole(self, sha256: str) -> bool:
        """True when the content is here and its bytes are right; a wrong one is removed."""
        if not self._folder:
            return False
        found = hashlib.sha256()
        try:
            for chunk in self.chunks(sha256):
                found.update(chunk)
        except OSError:
            return False
        if found.hexdigest() == sha256:
            return True
        self._remove(sha256)
        return False

    def chunks(self, sha256: str) -> Iterator[bytes]:
        with open(os.path.join(self._blobs, sha256), "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def aside(self, sha256: str) -> Aside:
        """Begin to set aside a content that is arriving."""
        return Aside("" if self.trouble else self._blobs, sha256)

    def prune(self, needed: Collection[str], bound: int = BOUND) -> None:
        """Remove the longest unused contents beyond `bound` bytes, but none of `needed`."""
        if self.trouble:
            return
        rows, total = [], 0
        for entry in os.scandir(self._blobs):
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:  # another target's
                continue
            total += found.st_size
            rows.append((found.st_mtime, entry.name, found.st_size))
        for _, name, size in sorted(rows):
            if total <= bound:
                break
            if name not in needed:
                self._remove(name)
                total -= size

    def touch(self, sha256: str) -> None:
        """Note that a content was used."""
        try:
            os.utime(os.path.join(self._blobs, sha256))
        except OSError:
            pass

    def recall(self, key: str) -> dict[str, Any] | None:
        """Return what was last deployed to the target of this key, if it is remembered."""
        try:
            with open(self._target(key), encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def remember(self, key: str, value: dict[str, Any] | None) -> None:
        """Remember a deploy, or (None) that there is none any more."""
        if self.trouble or self.recall(key) == value:
            return
        path = self._target(key)
        try:
            if value is None:
                os.unlink(path)
                return
            beside = f"{path}.{_unique()}"
            with open(beside, "w", encoding="utf-8") as file:
                json.dump(value, file, sort_keys=True)
            os.replace(beside, path)
        except OSError:
            pass

    def _target(self, key: str) -> str:
        name = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return os.path.join(self._folder, "targets", f"{name}.json")

    def _remove(self, name: str) -> None:
        try:
            os.unlink(os.path.join(self._blobs, name))
        except OSError:
            pass


class Aside:
    """One content that has arrived and will be read again: in the store, if that can be.

    Where the store cannot take it (no folder, no room) it goes into a file without a name. It stays
    readable whatever its bytes are; only right ones stay in the store.
    """

    def __init__(self, folder: str, sha256: str) -> None:
        self._path = os.path.join(folder, sha256)
        self._beside = ""
        self._sha = hashlib.sha256()
        self._fd = -1
        if folder:
            self._beside = f"{self._path}.{_unique()}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                self._fd = os.open(self._beside, flags, 0o600)
            except OSError:
                self._beside = ""
        if self._fd < 0:
            self._fd = _nameless()

    def write(self, chunk: bytes) -> None:
        """Add a chunk. Raises OSError when it fits nowhere."""
        self._sha.update(chunk)
        at = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            _write(self._fd, chunk)
        except OSError:
            if not self._beside:
                raise
            self._leave_store(at)
            _write(self._fd, chunk)

    def end(self, *, whole: bool) -> None:
        """Keep it in the store if it came whole and is what its name says."""
        if not self._beside:
            return
        try:
            if whole and self._sha.hexdigest() == os.path.basename(self._path):
                os.replace(self._beside, self._path)
            else:
                os.unlink(self._beside)
        except OSError:
            pass
        self._beside = ""

    def chunks(self) -> Iterator[bytes]:
        at = 0
        while chunk := os.pread(self._fd, _CHUNK, at):
            at += len(chunk)
            yield chunk

    def close(self) -> None:
        os.close(self._fd)

    def _leave_store(self, size: int) -> None:
        """Go on in a nameless file with the `size` bytes that have been written so far."""
        old, self._fd = self._fd, _nameless()
        at = 0
        while at < size:
            chunk = os.pread(old, min(_CHUNK, size - at), at)
            _write(self._fd, chunk)
            at += len(chunk)
        os.close(old)
        self.end(whole=False)


def _nameless() -> int:
    for folder in ("/tmp", "/var/tmp"):  # noqa: S108  nobody else can open it
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:  # read-only, full, or a file system without such files
            continue
    return os.memfd_create("dcu-bundle", os.MFD_CLOEXEC)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _unique() -> str:
    # Targets that share the folder have pid spaces of their own.
    return f"{os.getpid()}.{os.urandom(4).hex()}.part"
