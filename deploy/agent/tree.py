"""The files of one target, seen from its root; `TreeReader` has no method that writes.

Every folder is reached from the root by one `openat` a component, never following a link; a link
is read and resolved here, below the root. So neither a link that leads out nor one that is swapped
in the middle of a call can lead an operation out of the root. Paths are relative to the site.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator

from .plan import ABSENT, State
from .words import Refused, Unfit, printable

CHUNK = 1 << 18
# A sparse file of terabytes costs its maker nothing, and a reader hours. No plan and no base has a
# file larger than the first; what is read whole (records, sources, bytecode) is no larger than
# the second.
LARGEST, SMALL = 4 << 30, 64 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a fifo that stands where a file should must not hang the reader.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GET_FLAGS, _IMMUTABLE = 0x80086601, 0x10 | 0x20  # FS_IOC_GETFLAGS; immutable, append only
_MOST_OPEN = 200
_MOST_LINKS = 40
Parts = tuple[str, ...]


def split(path: str) -> tuple[str, str]:
    """Return folder and name of a relative path; the folder is "" at the top."""
    folder, _, name = path.rpartition("/")
    return folder, name


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def chain(path: str) -> list[str]:
    """Return the folders above `path`, the nearest first, without the site itself."""
    found = []
    folder, _ = split(path)
    while folder:
        found.append(folder)
        folder, _ = split(folder)
    return found


class TreeReader:
    """Reads below one site. `root` is a real folder; `site` is absolute as seen from that root."""

    def __init__(self, root: str, site: str) -> None:
        self.root = os.path.realpath(root)
        self.site = site
        self._open: dict[Parts, int] = {}
        self._known: dict[str, Parts] = {}  # folder of the site -> where it was found to be
        self._turning: frozenset[str] = frozenset()
        try:
            self._root = os.open(self.root, _FOLDER)
        except OSError as err:
            raise Unfit(
                f"there is no target at {printable(root)}",
                why=err.strerror or str(err),
                fix="give the folder that holds the target's file system as --root",
            ) from err
        try:
            self._site = self.resolve(site, ())
        except OSError as err:
            raise Unfit(
                f"the target has no site {printable(site)}",
                why=f"{self.visible('')}: {err.strerror}",
                fix="set base.site in the manifest (or --site) to the dist-packages of the service",
            ) from err
        self.site_fd = self._fd(self._site)

    def expect(self, paths: Iterable[str]) -> None:
        """Name the paths that are, at one time or another, a file or a link.

        Where one of them lies above another, it is a folder at other times: then nothing else is
        there, and while it is a link, what lies behind it is not below it.
        """
        named = frozenset(paths)
        self._turning = named.intersection(above for path in named for above in chain(path))

    def visible(self, path: str) -> str:
        """Return the absolute path under which an interpreter on this machine sees `path`."""
        top = self.root.rstrip("/") + "/" + self.site.strip("/")
        return join(top, path) if path else top

    def from_root(self, path: str) -> str:
        """Return where an absolute path of the target lies on this machine; links stay unread."""
        return self.root.rstrip("/") + "/" + path.strip("/")

    def resolved(self, path: str) -> str:
        """Return the link-free absolute path of a folder of the site on this machine."""
        return self.root.rstrip("/") + "/" + "/".join(self.resolve(path))

    def resolve(self, path: str, start: Parts | None = None) -> Parts:
        """Return the link-free components below the root of the folder `path`.

        Raises OSError when it is no folder, Refused when a link on the way leads out of the root.
        """
        done = list(self._site if start is None else start)
        todo = path.split("/")[::-1]
        links = 0
        while todo:
            part = todo.pop()
            if part == ".." and not done:
                raise self._leads_out(path)
            if part == "..":
                done.pop()
            elif part not in ("", "."):
                target = self._link_or_none(tuple(done), part)
                if target is None:
                    done.append(part)
                    continue
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if target.startswith("/"):
                    target, done = self._below_root(path, target), []
                todo += target.split("/")[::-1]
        return tuple(done)

    def _link_or_none(self, done: Parts, part: str) -> str | None:
        try:
            self._fd((*done, part))
        except OSError as err:
            if err.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
        else:
            return None
        try:
            return os.readlink(part, dir_fd=self._fd(done))
        except OSError as err:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from err

    def _below_root(self, path: str, target: str) -> str:
        # An absolute link means the target's root to the target, but this machine's root to an
        # interpreter started from here. Only where both agree is there one right answer.
        if self.root == "/":
            return target
        if target == self.root or target.startswith(self.root + "/"):
            return target[len(self.root) :]
        raise self._leads_out(path, target)

    def _leads_out(self, path: str, target: str = "..") -> Refused:
        return Refused(
            f"{printable(path)} leads out of {printable(self.root)}",
            why=f"a link on the way points to {printable(target)}",
            fix="replace the link by a folder, or deploy to the place it points to",
        )

    def _fd(self, parts: Parts) -> int:
        """Return a descriptor of the folder; the most recently used ones stay open."""
        if not parts:
            return self._root
        found = self._open.pop(parts, None)
        if found is None:
            found = os.open(parts[-1], _FOLDER, dir_fd=self._fd(parts[:-1]))
        self._open[parts] = found
        if len(self._open) > _MOST_OPEN:
            oldest = next(key for key in self._open if key != self._site)
            os.close(self._open.pop(oldest))
        return found

    def folder(self, path: str) -> int:
        """Return a descriptor of a folder of the site, valid until two more have been asked for.

        Raises OSError when it is no folder.
        """
        parts = self._known.get(path)
        if parts is None:
            if self._behind_a_link(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            parts = self._known[path] = self.resolve(path)
        return self._fd(parts)

    def _behind_a_link(self, path: str) -> bool:
        if not self._turning:
            return False
        return any(map(self.is_link, self._turning.intersection((path, *chain(path)))))

    def is_link(self, path: str) -> bool:
        found = self.stat(path)
        return found is not None and stat.S_ISLNK(found.st_mode)

    def is_folder(self, path: str) -> bool:
        """True where a folder is, also behind a link that may be followed."""
        try:
            self.folder(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_own_folder(self, path: str) -> bool:
        """True where a folder itself is, and no link to one."""
        found = self.stat(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def stat(self, path: str) -> os.stat_result | None:
        """Return what lstat says of `path`, or None where nothing is."""
        folder, name = split(path)
        try:
            return os.stat(name or ".", dir_fd=self.folder(folder), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def device(self, path: str) -> int:
        """Return the device of the file system that a folder lies on."""
        return os.fstat(self.folder(path)).st_dev

    def exists(self, path: str) -> bool:
        return self.stat(path) is not None

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder; none where there is no folder."""
        try:
            return sorted(os.listdir(self.folder(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def open(self, path: str) -> int:
        folder, name = split(path)
        try:
            return os.open(name, _FILE, dir_fd=self.folder(folder))
        except OSError as err:
            err.filename = self.visible(path)
            raise

    def read(self, path: str) -> bytes:
        """Return the whole content of a small file. Raises OSError, for a large one too."""
        with os.fdopen(self.open(path), "rb") as file:
            data = file.read(SMALL + 1)
        if len(data) > SMALL:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.visible(path))
        return data

    def chunks(self, path: str) -> Iterator[bytes]:
        fd = self.open(path)
        try:
            while chunk := os.read(fd, CHUNK):
                yield chunk
        finally:
            os.close(fd)

    def state(self, path: str) -> State:
        """Return what is at `path`; a folder, a device, or a giant is a type no plan can want."""
        found = self.stat(path)
        if found is None:
            return ABSENT
        if stat.S_ISLNK(found.st_mode):
            folder, name = split(path)
            return State(type="link", link=os.readlink(name, dir_fd=self.folder(folder)))
        if stat.S_ISDIR(found.st_mode) and path in self._turning:
            return ABSENT
        if not stat.S_ISREG(found.st_mode):
            return State(type="folder" if stat.S_ISDIR(found.st_mode) else "special")
        if found.st_size > LARGEST:
            return State(type=f"file of {found.st_size} bytes")
        sha, size = hashlib.sha256(), 0
        for chunk in self.chunks(path):
            sha.update(chunk)
            size += len(chunk)
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        return State(type="file", mode=mode, sha256=sha.hexdigest(), size=size)

    def forget(self) -> None:
        """Look anew where folders are: one of them was renamed."""
        self._known.clear()
        for parts in [parts for parts in self._open if parts != self._site]:
            os.close(self._open.pop(parts))

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        os.close(self._root)
        self._open.clear()


class TreeWriter(TreeReader):
    """What a deploy needs beyond reading. A file is only ever made new, linked, or renamed."""

    def make_folder(self, path: str, mode: int, owner: tuple[int, int]) -> None:
        folder, name = split(path)
        above = self.folder(folder)
        try:
            os.mkdir(name, 0o700, dir_fd=above)
        except FileExistsError:
            return
        fd = os.open(name, _FOLDER, dir_fd=above)
        try:
            _own(fd, owner)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)

    def create(
        self, path: str, fill: Callable[[int], object], mode: int, owner: tuple[int, int]
    ) -> None:
        """Make a new file, let `fill` write its descriptor, and give it mode and owner."""
        folder, name = split(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self.folder(folder))
        except OSError as err:
            err.filename = self.visible(path)
            raise
        try:
            fill(fd)
            _own(fd, owner)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)

    def make_link(self, path: str, target: str) -> None:
        folder, name = split(path)
        os.symlink(target, name, dir_fd=self.folder(folder))

    def keep(self, path: str, kept: str) -> None:
        """Give `path` a second name; where links are refused, an equal copy with equal stat."""
        old, old_name = split(path)
        new, new_name = split(kept)
        old_fd, new_fd = self.folder(old), self.folder(new)
        try:
            os.link(old_name, new_name, src_dir_fd=old_fd, dst_dir_fd=new_fd, follow_symlinks=False)
        except OSError as err:
            refused = err.errno in (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP)
            if not refused or self._immutable(path):
                err.filename = self.visible(path)
                raise
            self._copy(path, kept)

    def _immutable(self, path: str) -> bool:
        """True when chattr forbids to replace the file, which a link would be the first to meet."""
        import fcntl
        import struct

        try:
            fd = self.open(path)
        except OSError:
            return False
        try:
            flags = fcntl.ioctl(fd, _GET_FLAGS, struct.pack("l", 0))
            return bool(struct.unpack("l", flags)[0] & _IMMUTABLE)
        except OSError:
            return False
        finally:
            os.close(fd)

    def _copy(self, path: str, kept: str) -> None:
        found = self.stat(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        folder, name = split(kept)
        owner = (found.st_uid, found.st_gid)
        times = (found.st_atime_ns, found.st_mtime_ns)
        if stat.S_ISLNK(found.st_mode):
            self.make_link(kept, self.state(path).link)
        else:
            mode = stat.S_IMODE(found.st_mode)
            self.create(kept, lambda fd: write(fd, self.chunks(path)), mode, owner)
        os.utime(name, ns=times, dir_fd=self.folder(folder), follow_symlinks=False)

    def rename(self, old: str, new: str) -> None:
        """Rename within the site; the target is replaced in one step."""
        old_folder, old_name = split(old)
        new_folder, new_name = split(new)
        old_fd, new_fd = self.folder(old_folder), self.folder(new_folder)
        os.rename(old_name, new_name, src_dir_fd=old_fd, dst_dir_fd=new_fd)

    def unlink(self, path: str) -> None:
        """Remove a file; one that is not there is as good as removed."""
        folder, name = split(path)
        try:
            os.unlink(name, dir_fd=self.folder(folder))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as err:
            # A read-only file system says so before it looks whether the file is there.
            if err.errno != errno.EROFS or self.exists(path):
                raise

    def remove_folder(self, path: str) -> bool:
        """Remove a folder if it is empty; return whether it is gone."""
        folder, name = split(path)
        try:
            parts = self.resolve(path)
            os.rmdir(name, dir_fd=self.folder(folder))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as err:
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise
            return False
        if (fd := self._open.pop(parts, None)) is not None:
            os.close(fd)
        self._known.clear()
        return True


def write(fd: int, chunks: Iterator[bytes]) -> None:
    for chunk in chunks:
        view = memoryview(chunk)
        while view:
            view = view[os.write(fd, view) :]


def _own(fd: int, owner: tuple[int, int]) -> None:
    found = os.fstat(fd)
    if (found.st_uid, found.st_gid) != owner:
        os.fchown(fd, *owner)
