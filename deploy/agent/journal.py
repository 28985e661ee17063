"""The one transaction of the agent: staged, committed, finished or undone, whatever happens.

A journal in the site says what is under way. Its first line lists every name that will be made,
before one is made; its second line is the commit point. Until that line is on disk, a call that
finds the journal removes what was staged and nothing has changed. From then on it finishes: each
step is one rename, and the name it leaves or takes tells whether it was done. A third line says
that all steps are done, or that they are to be undone; a fourth, that they are undone: from then on
a name that is gone tells nothing any more.

A journal is believed only beside the anchor, a file that was staged among the destinations: records
that were copied here from another site name files that never were here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from typing import Any, NamedTuple

from .receipt import HOME, JOURNAL, KEPT, RECEIPT, read_receipt
from .tree import TreeReader, TreeWriter, join, split
from .words import BundleError, NeedsPerson, RolledBack, canonical, printable

LOCK = f"{HOME}/lock"
_TEMP = re.compile(r"\.dcu-bundle-\d+(-\d+)?\.tmp")
COMMIT, UNDO, UNDONE, DONE = "commit", "undo", "undone", "done"
# What a step does. Where a file makes way for a folder, or a folder for a file, the folder itself
# is one more step: it is staged empty, or has lost all it held.
PUT, DROP, PUT_FOLDER, DROP_FOLDER = "put", "drop", "put folder", "drop folder"


class Step(NamedTuple):
    """One rename. put: `temp` becomes `path`; drop: `path` becomes `temp`, removed at the end.

    `was` names the kept twin of what a put replaces; "" where nothing was there.
    """

    kind: str
    path: str
    temp: str
    was: str = ""

    @property
    def puts(self) -> bool:
        return self.kind in (PUT, PUT_FOLDER)

    @property
    def of_folder(self) -> bool:
        return self.kind in (PUT_FOLDER, DROP_FOLDER)

    def forth(self, tree: TreeWriter) -> None:
        self._rename(tree, *((self.temp, self.path) if self.puts else (self.path, self.temp)))

    def back(self, tree: TreeWriter) -> None:
        self._rename(tree, *((self.path, self.temp) if self.puts else (self.temp, self.path)))

    def _rename(self, tree: TreeWriter, old: str, new: str) -> None:
        try:
            tree.rename(old, new)
        except OSError as err:
            # In a container: overlayfs renames no folder of an image. It is empty, so one made
            # like it is as good.
            if err.errno != errno.EXDEV or not self.of_folder:
                raise
            _move_empty(tree, old, new)
        if self.of_folder:
            tree.forget()  # where folders were found to be

    def remove_temp(self, tree: TreeWriter) -> None:
        if self.of_folder:
            tree.remove_folder(self.temp)
        else:
            tree.unlink(self.temp)


def _move_empty(tree: TreeWriter, old: str, new: str) -> None:
    found = tree.stat(old)
    assert found is not None
    tree.make_folder(new, stat.S_IMODE(found.st_mode), (found.st_uid, found.st_gid))
    if not tree.remove_folder(old):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), old)


class Header(NamedTuple):
    """The journal's first line: every name that the transaction makes or removes."""

    serial: int
    verb: str
    plan: str
    steps: tuple[Step, ...]
    anchor: str  # a file beside the destinations, there as long as there is something to finish
    folders: tuple[str, ...] = ()  # made before the commit, parents first
    emptied: tuple[str, ...] = ()  # removed at the end, deepest first, if empty

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "steps": [list(step) for step in self.steps]}


class Found(NamedTuple):
    """A journal that an earlier call left behind. `header` is None where its first line is torn."""

    header: Header | None
    mark: str  # "", COMMIT, UNDO, UNDONE or DONE


class Journal:
    """Writes one transaction's journal."""

    def __init__(self, tree: TreeWriter, header: Header) -> None:
        self.tree, self.header = tree, header
        line = canonical(header.to_json())
        self._sha = hashlib.sha256(line).hexdigest()
        folder, name = split(JOURNAL)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(name, flags, 0o644, dir_fd=tree.folder(folder))
        self._append(line)
        self._length = len(line) + 1
        os.fsync(tree.folder(folder))

    def mark(self, word: str) -> None:
        """Add a line and bring it to disk: COMMIT is the commit point."""
        self._append(canonical({"mark": word, "header": self._sha}))

    def cast_anchor(self) -> None:
        """Make the file without which nobody believes this journal."""
        said, site = self._sha.encode(), os.fstat(self.tree.site_fd)
        owner = (site.st_uid, site.st_gid)
        self.tree.create(self.header.anchor, lambda fd: os.write(fd, said), 0o644, owner)

    def anchored(self) -> bool:
        """True when the transaction was staged in this very site."""
        try:
            return self.tree.read(self.header.anchor) == self._sha.encode()
        except OSError:
            return False

    def uncommit(self) -> None:
        """Take back a commit line that could not be brought to disk."""
        os.ftruncate(self._fd, self._length)

    def _append(self, line: bytes) -> None:
        data = line + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def read_journal(tree: TreeReader) -> Found | None:
    """Return what an interrupted call left, or None. A torn last line counts as not written."""
    try:
        lines = tree.read(JOURNAL).split(b"\n")[:-1]
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not lines:
        return Found(None, "")
    try:
        return _understood(lines)
    except (ValueError, TypeError, KeyError, RecursionError) as err:
        raise NeedsPerson(
            "the journal of an interrupted deploy cannot be read",
            why=f"{tree.visible(JOURNAL)}: {type(err).__name__}: {printable(str(err))}",
            fix="compare with `verify`; install the base anew and remove that folder, or rebuild"
            " the target; then deploy again",
        ) from err


def _understood(lines: list[bytes]) -> Found:
    raw = json.loads(lines[0])
    raw["steps"] = tuple(Step(*step) for step in raw["steps"])
    raw["folders"], raw["emptied"] = tuple(raw["folders"]), tuple(raw["emptied"])
    texts = [text for step in raw["steps"] for text in step]
    if not all(isinstance(text, str) for text in (*texts, *raw["folders"], *raw["emptied"])):
        raise ValueError("a name in it is no text")
    ours = [step.temp for step in raw["steps"]] + [raw["anchor"]]
    if strange := [name for name in ours if not _TEMP.fullmatch(split(name)[1])]:
        raise ValueError(f"{strange[0]} is no name of a staged file")
    sha, mark = hashlib.sha256(lines[0]).hexdigest(), ""
    for line in lines[1:]:
        said = json.loads(line)
        if said["header"] == sha:
            mark = said["mark"]
    return Found(Header(**raw), mark)


def recover(tree: TreeWriter) -> str:
    """Finish or undo what an earlier call left; return "", "undone" or "finished"."""
    found = read_journal(tree)
    if found is None:
        _tidy(tree)
        return ""
    if found.header is None:
        tree.unlink(JOURNAL)
        _tidy(tree)
        return "undone"
    try:
        return _recover(tree, found, found.header)
    except OSError as err:
        raise _stuck(tree, err) from err


def _recover(tree: TreeWriter, found: Found, header: Header) -> str:
    if found.mark == DONE:
        clean(tree, header)
        return "finished"
    if found.mark in ("", UNDONE):
        abort(tree, header)
        return "undone"
    journal = _reopened(tree, header)
    try:
        if not journal.anchored():
            raise _of_another_site(tree, header)
        if found.mark == COMMIT:
            try:
                finish(journal)
                return "finished"
            except RolledBack:
                return "undone"
        undo(journal)
        return "undone"
    finally:
        journal.close()


def _reopened(tree: TreeWriter, header: Header) -> Journal:
    journal = Journal.__new__(Journal)
    journal.tree, journal.header = tree, header
    folder, name = split(JOURNAL)
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    journal._fd = os.open(name, flags, dir_fd=tree.folder(folder))  # noqa: SLF001
    journal._sha = hashlib.sha256(canonical(header.to_json())).hexdigest()  # noqa: SLF001
    _cut_torn_line(tree)
    return journal


def _of_another_site(tree: TreeReader, header: Header) -> NeedsPerson:
    return NeedsPerson(
        "the journal in this site was not written for it",
        why=f"{tree.visible(JOURNAL)} tells of files that were staged here, and"
        f" {tree.visible(header.anchor)}, which is made with them, is not there",
        fix=f"if {HOME} was copied here from another site, remove that folder and run it again; if"
        " not, compare with `verify` and install the base anew; nothing was changed",
    )


def _cut_torn_line(tree: TreeWriter) -> None:
    # Another line is about to follow: half a line before it would swallow it.
    data = tree.read(JOURNAL)
    if not data.endswith(b"\n"):
        folder, name = split(JOURNAL)
        fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=tree.folder(folder))
        os.ftruncate(fd, data.rfind(b"\n") + 1)
        os.close(fd)


def finish(journal: Journal) -> None:
    """Do every step that is not done yet, then clean up.

    Raises RolledBack when a step failed and all were undone, NeedsPerson when that failed, too.
    """
    tree, steps = journal.tree, journal.header.steps
    try:
        for step in steps:
            _do(tree, step)
    except OSError as err:
        _roll_back(journal, err)
    try:
        # This fsync brings the renames to disk, too: journalling file systems keep their order.
        journal.mark(DONE)
        clean(tree, journal.header)
    except OSError as err:
        raise _stuck(tree, err) from err


def _roll_back(journal: Journal, err: OSError) -> None:
    try:
        journal.mark(UNDO)
        undo(journal)
    except OSError as again:
        raise _stuck(journal.tree, again) from err
    raise RolledBack(
        "the deploy failed and was rolled back",
        why=f"{printable(str(err.filename or ''))}: {err.strerror}".lstrip(": "),
        fix="every file is as it was found; mend the cause and run it again",
    ) from err


def _do(tree: TreeWriter, step: Step) -> None:
    try:
        if step.puts:
            if tree.exists(step.temp):
                step.forth(tree)
        elif step.of_folder:
            if tree.is_own_folder(step.path):  # a call that was killed may have got half-way
                step.forth(tree)
        elif not tree.exists(step.temp) and tree.exists(step.path):
            step.forth(tree)
    except OSError as err:
        err.filename = tree.visible(step.path)
        raise


def undo(journal: Journal) -> None:
    """Take back every step that was done, the last one first; may itself be interrupted."""
    tree = journal.tree
    for step in reversed(journal.header.steps):
        done = not tree.exists(step.temp)
        if not step.puts:
            if not done:
                step.back(tree)
        elif done and not step.was:
            if tree.exists(step.path):
                step.back(tree)
        elif done and tree.exists(join(KEPT, step.was)):
            tree.rename(join(KEPT, step.was), step.path)
    settle(tree, journal.header)
    journal.mark(UNDONE)
    abort(tree, journal.header)


def abort(tree: TreeWriter, header: Header) -> None:
    """Remove everything that was staged; the destinations are as they were."""
    for step in header.steps:
        if step.puts:
            step.remove_temp(tree)
    tree.unlink(header.anchor)
    for folder in reversed(header.folders):
        tree.remove_folder(folder)
    _end(tree)


def clean(tree: TreeWriter, header: Header) -> None:
    """Remove what the steps left: outgoing files, twins nobody needs, emptied folders, records."""
    for step in header.steps:
        if not step.puts:
            step.remove_temp(tree)
    tree.unlink(header.anchor)
    for folder in header.emptied:
        tree.remove_folder(folder)
    _end(tree)


def _end(tree: TreeWriter) -> None:
    needed = read_receipt(tree).kept_names()
    for name in tree.names(KEPT):
        if name not in needed:
            tree.unlink(join(KEPT, name))
    tree.unlink(LOCK)
    tree.unlink(JOURNAL)
    _tidy(tree)


def _tidy(tree: TreeWriter) -> None:
    """Remove our own folder when it holds no receipt any more."""
    if tree.exists(HOME) and not tree.exists(RECEIPT):
        for name in tree.names(KEPT):
            tree.unlink(join(KEPT, name))
        for name in (LOCK, JOURNAL):
            tree.unlink(name)
        tree.remove_folder(KEPT)
        tree.remove_folder(HOME)


def settle(tree: TreeWriter, header: Header) -> None:
    """Bring every staged file and every touched folder to disk.

    One `syncfs` a file system instead of an fsync a file: five times faster for eighty files, and,
    unlike `sync`, it waits for nobody else's disk.
    """
    paths = [name for step in header.steps for name in (step.temp, step.path)] + [header.anchor]
    folders = sorted({split(path)[0] for path in paths} | {HOME, KEPT})
    folders = [folder for folder in folders if tree.is_folder(folder)]
    devices: dict[int, str] = {}
    for folder in folders:
        devices.setdefault(tree.device(folder), folder)
    if all(_syncfs(tree.folder(folder)) for folder in devices.values()):
        return
    for path in paths:
        _fsync(tree, path)
    for folder in folders:
        os.fsync(tree.folder(folder))


def _fsync(tree: TreeReader, path: str) -> None:
    try:
        fd = tree.open(path)
    except OSError as err:
        if err.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return  # not there (any more), or a link: it lives in its folder
        raise
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _syncfs(fd: int) -> bool:
    """Return False where there is no syncfs; raise OSError where it fails."""
    try:
        import ctypes

        call = ctypes.CDLL(None, use_errno=True).syncfs
    except (ImportError, AttributeError, OSError):
        return False
    if call(fd) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EPERM):  # a sandbox may forbid the call
        return False
    raise OSError(code, os.strerror(code))


def _stuck(tree: TreeReader, err: OSError | BundleError) -> NeedsPerson:
    return NeedsPerson(
        "an interrupted deploy can neither be finished nor undone",
        why=f"{printable(str(getattr(err, 'filename', '') or ''))}: {err}".lstrip(": "),
        fix=f"mend the cause and run it again; {tree.visible(JOURNAL)} says what is under way",
    )


def temp_name(path: str, serial: int, number: int) -> str:
    """Return a name beside `path` that no package uses and that a person recognises."""
    return join(split(path)[0], f".dcu-bundle-{serial}-{number}.tmp")


def anchor_name(folder: str, serial: int) -> str:
    return join(folder, f".dcu-bundle-{serial}.tmp")


def kept_name(serial: int, number: int) -> str:
    return f"{serial}-{number}"
