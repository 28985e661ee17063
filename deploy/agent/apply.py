"""Make one target as a plan wants it, or as it was: judge, stage, commit.

`deploy` and `restore` are this module's face. Both build one Draft and hand it to `carry_out`; up
to the commit point every failure leaves the target as it was.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .blobs import Blobs, take
from .journal import (
    DROP,
    DROP_FOLDER,
    PUT,
    PUT_FOLDER,
    Header,
    Journal,
    Step,
    abort,
    anchor_name,
    finish,
    kept_name,
    settle,
    temp_name,
)
from .judge import Judgement, losing_all
from .lock import Lock, Watch, owner_of
from .plan import ABSENT, Plan, PlannedFile, State
from .pyc import Compiler, cache_file, module_of, refuse_errors
from .receipt import HOME, KEPT, RECEIPT, Receipt
from .tree import TreeWriter, chain, join, split, write
from .words import (
    SET_PYTHON,
    BundleError,
    Damaged,
    NeedsPerson,
    Refused,
    Unfit,
    canonical,
    printable,
)

Say = Callable[[str], None]
Owner = tuple[int, int]
_FOLDER_MODE = 0o755
_LONGEST = 255  # bytes of a name
_SPARE = 4 << 20  # bytes that must stay free beside what is staged


class Draft:
    """Everything that one transaction will do, before any of it is done."""

    def __init__(
        self, tree: TreeWriter, old: Receipt, verb: str, plan: str, turning: Iterable[str]
    ) -> None:
        self.tree, self.old, self.verb, self.plan = tree, old, verb, plan
        self.turning = frozenset(turning)
        self.serial = old.serial + 1
        self.steps: list[Step] = []
        self.stage: list[Callable[[], None]] = []  # what makes the files that the steps rename
        self.digests: dict[str, str] = {}  # temporary file -> sha256 it must show when read back
        self.folders: dict[str, tuple[int, Owner]] = {}  # to be made before the commit
        self.unfolded: dict[str, tuple[int, Owner]] = {}  # to be made where a file was
        self.emptied: list[str] = []
        self.bytes = 0
        self._dropped: set[str] = set()

    def put(
        self, path: str, fill: Callable[[int], object], mode: int, *, sha256: str, size: int
    ) -> None:
        """Plan a new file at `path`."""
        step = self._step(PUT, path, keep=path not in self._dropped)
        owner = self._owner(path)
        self.digests[step.temp] = sha256
        self.bytes += size
        self.stage.append(lambda: self.tree.create(step.temp, fill, mode, owner))

    def put_link(self, path: str, target: str) -> None:
        step = self._step(PUT, path, keep=True)
        self.stage.append(lambda: self.tree.make_link(step.temp, target))

    def give_back(self, path: str, kept: str) -> None:
        """Plan the return of a kept original: the same inode wherever links are possible."""
        step = self._step(PUT, path, keep=path not in self._dropped)
        self.stage.append(lambda: self.tree.keep(join(KEPT, kept), step.temp))

    def drop(self, path: str, keep: bool = True) -> Step:
        return self._step(DROP, path, keep=keep)

    def _step(self, kind: str, path: str, *, keep: bool) -> Step:
        number = len(self.steps)
        was = ""
        if keep and self.tree.exists(path) and not self.tree.is_own_folder(path):
            was = kept_name(self.serial, number)
            self.stage.append(lambda: self.tree.keep(path, join(KEPT, was)))
        step = Step(kind, path, temp_name(self._outermost(path), self.serial, number), was)
        self.steps.append(step)
        if kind == PUT:
            for folder in reversed(chain(path)):
                self.need_folder(folder)
        elif kind == DROP:
            self._dropped.add(path)
        return step

    def _outermost(self, path: str) -> str:
        """Return what lies in a folder that stays one: `path`, or what above it does not stay."""
        return next((p for p in reversed(chain(path)) if p in self.turning), path)

    def need_folder(self, folder: str) -> None:
        """Plan that a folder will be there."""
        if folder in self.folders or folder in self.unfolded:
            return
        unfolds = self._outermost(folder) in self.turning
        if not unfolds and self.tree.exists(folder):
            return
        mode, uid, gid = self.old.removed.get(folder, (_FOLDER_MODE, *self._owner(folder)))
        if not unfolds:
            self.folders[folder] = (mode, (uid, gid))
            return
        self.unfolded[folder] = (mode, (uid, gid))
        temp = self._step(PUT_FOLDER, folder, keep=False).temp
        self.stage.append(lambda: self.tree.make_folder(temp, mode, (uid, gid)))

    def end_folder(self, folder: str) -> None:
        """Plan the end of a folder that loses all it holds."""
        if self._outermost(folder) in self.turning:
            self._step(DROP_FOLDER, folder, keep=False)
        else:
            self.emptied.append(folder)

    def _owner(self, path: str) -> Owner:
        """Return the owner of what is replaced, or of the nearest folder above."""
        for place in (path, *chain(path)):
            if place.startswith(HOME):
                continue
            if (made := self.folders.get(place) or self.unfolded.get(place)) is not None:
                return made[1]
            if (found := self.tree.stat(place)) is not None:
                return owner_of(found)
        return owner_of(os.fstat(self.tree.site_fd))

    def header(self) -> Header:
        steps = tuple(sorted(self.steps, key=_rank))
        beside = [folder for step in steps if (folder := split(step.temp)[0]) != HOME]
        anchor = anchor_name(beside[0] if beside else "", self.serial)
        folders = tuple(self.folders)
        return Header(
            self.serial, self.verb, self.plan, steps, anchor, folders, tuple(self.emptied)
        )


def _rank(step: Step) -> tuple[int, int]:
    """What goes makes room for what comes; the receipt is the last."""
    deep = step.path.count("/")
    if step.path == RECEIPT:
        return 4, 0
    return {DROP: (0, 0), DROP_FOLDER: (1, -deep), PUT_FOLDER: (2, deep), PUT: (3, 0)}[step.kind]


class Bytecode:
    """Compiles a plan's modules in children while the target is still being judged."""

    def __init__(
        self, tree: TreeWriter, plan: Plan, blobs: Blobs, *, python: str, timeout: float
    ) -> None:
        self._tree, self._blobs, self._python, self._timeout = tree, blobs, python, timeout
        self._wants = {entry.path: entry for entry in plan.files}
        self._begun: list[tuple[list[str], Compiler]] = []

    def begin(self, paths: Iterable[str]) -> None:
        """Start compiling those of `paths` whose content is at hand."""
        begun = {path for part, _ in self._begun for path in part}
        at_hand = [p for p in paths if self._blobs.has(self._wants[p].want.sha256)]
        self._start([path for path in at_hand if path not in begun])

    def finish(self, paths: Iterable[str]) -> tuple[dict[str, str], dict[str, bytes]]:
        """Return what the interpreter is, and the pyc of every one of `paths`.

        Raises Damaged for a wrong blob, Refused for a source that does not compile.
        """
        begun = {path for part, _ in self._begun for path in part}
        self._start([path for path in paths if path not in begun])
        info: dict[str, str] = {}
        verdicts: dict[str, tuple[str, bytes]] = {}
        for part, compiler in self._begun:
            info, results = compiler.finish()
            verdicts.update(zip(part, results, strict=True))
        wanted = sorted(paths)
        refuse_errors([(p, verdicts[p][0]) for p in wanted if verdicts[p][0] != "made"])
        return info, {path: verdicts[path][1] for path in wanted}

    def _start(self, paths: list[str]) -> None:
        jobs = []
        for path in paths:
            data: list[bytes] = []
            take(self._blobs, self._wants[path].want.sha256, data.append)
            jobs.append(("make", self._tree.visible(path), b"".join(data), b""))
        if jobs:
            self._begun.append((paths, Compiler(self._python, jobs, self._timeout)))

    def cancel(self) -> None:
        """End what still runs. May be called again."""
        for _, compiler in self._begun:
            compiler.cancel()


def draft_deploy(
    tree: TreeWriter,
    plan: Plan,
    blobs: Blobs,
    judged: Judgement,
    old: Receipt,
    *,
    bytecode: Bytecode,
    python: Mapping[str, str],
    identities: Mapping[str, str],
    incidental: Mapping[str, Any],
) -> Draft:
    """Return the transaction of a deploy. Every content is read and every module compiled first.

    `python` says what the service's interpreter answered when it was asked for its imports. Raises
    Damaged for a wrong blob, Refused for a source that does not compile, and Unfit where another
    interpreter compiled it; nothing has been written then.
    """
    wants = {entry.path: entry for entry in plan.files}
    files = [e.path for e in judged.put if e.want.type == "file" and e.path not in judged.compile]
    blobs.prepare([wants[path].want.sha256 for path in (*judged.compile, *files)])
    for path in files:
        take(blobs, wants[path].want.sha256, lambda _: None)  # wrong ones stop us before we write
    info, pycs = bytecode.finish(judged.compile)

    if info and info != dict(python):
        raise _two_pythons(python, info)
    draft = Draft(tree, old, "deploy", plan.digest, judged.turning)
    new = Receipt(old.to_json())
    new.serial, new.plan, new.name = draft.serial, plan.digest, plan.name
    new.python = info or old.python
    new.identities, new.incidental = dict(identities), dict(incidental)
    same = _already_there(tree, pycs, new.python)
    drops = [path for path in judged.drop_pyc if path not in same]
    for path in drops:
        _drop_pyc(draft, new, path, module_of(path))
    _leave_others(draft, new, judged, set(wants))
    for entry in judged.put:
        _put(draft, new, entry, blobs, judged)
    for path in judged.drop:
        if path in wants:
            _remember(draft, new, wants[path], judged, draft.drop(path))
            new.files[path] = ABSENT.to_json()
    _record_unchanged(new, plan)
    for path, pyc in pycs.items():
        _put_pyc(draft, new, wants[path], pyc, same)
    _empty_folders(draft, new)
    ended = {*draft.emptied, *(step.path for step in draft.steps if step.kind == DROP_FOLDER)}
    made = {*draft.folders, *draft.unfolded}
    new.folders = sorted({*new.folders, *made} - {HOME, KEPT} - ended)
    _put_receipt(draft, new)
    return draft


def draft_restore(tree: TreeWriter, judged: Judgement, old: Receipt) -> Draft:
    """Return the transaction that gives every original back and leaves no trace of ours."""
    draft = Draft(tree, old, "restore", old.plan, judged.turning)
    for path in judged.drop_pyc:
        draft.drop(path, keep=False)
    _leave_others(draft, Receipt(old.to_json()), judged, set())
    for folder in sorted({*old.folders, *_emptied(draft)}, key=lambda p: (-p.count("/"), p)):
        if folder in old.folders or any(p in judged.turning for p in (folder, *chain(folder))):
            draft.end_folder(folder)
    for folder in sorted(old.removed):
        draft.need_folder(folder)
    draft.folders = dict(sorted(draft.folders.items()))
    draft.drop(RECEIPT, keep=False)
    return draft


def _already_there(
    tree: TreeWriter, pycs: Mapping[str, bytes], python: Mapping[str, str]
) -> set[str]:
    """Return the pycs on the target that equal what would be written: an image may bring them."""
    found = set()
    for path, pyc in pycs.items():
        place = cache_file(path, python["tag"])
        if tree.state(place).sha256 == hashlib.sha256(pyc).hexdigest():
            found.add(place)
    return found


def _remember(
    draft: Draft, new: Receipt, entry: PlannedFile, judged: Judgement, step: Step
) -> None:
    """Note the way back, once: the first original stays the restore point.

    Until a base is installed over what we put: a restore must not bring back files of the one
    before it.
    """
    path, found = entry.path, judged.found[entry.path]
    drifted = path in judged.drifted
    if path in new.originals and not drifted and not _base_again(draft.old, entry, found):
        return
    for pyc in [p for p in new.originals if p.endswith(".pyc") and module_of(p) == path]:
        if path in draft.old.originals:
            del new.originals[pyc]  # of a source that is no longer the way back
    new.originals[path] = {"kept": step.was, "state": found.to_json()}
    if drifted:
        # Replaced by name only: whoever named it gets these very bytes back.
        new.originals[path]["drifted"] = True


def _base_again(old: Receipt, entry: PlannedFile, found: State) -> bool:
    """True where the plan's base lies at a path where we had put something else."""
    ours = old.put(entry.path)
    if ours is not None and found.same_content(ours):
        return False
    return any(found.same_content(state) for state in entry.assume)


def _drop_pyc(draft: Draft, new: Receipt, path: str, module: str) -> None:
    # Whatever lies beside a module that we compiled before came after us: it is no original.
    ours = module in draft.old.files or module in map(module_of, draft.old.pycs)
    step = draft.drop(path, keep=not ours)
    if not ours:
        new.originals[path] = {"kept": step.was, "state": draft.tree.state(path).to_json()}
    new.pycs.pop(path, None)


def _put(draft: Draft, new: Receipt, entry: PlannedFile, blobs: Blobs, judged: Judgement) -> None:
    want = entry.want
    if want.type == "link":
        draft.put_link(entry.path, want.link)
    else:
        fill = _filler(blobs, want.sha256)
        draft.put(entry.path, fill, int(want.mode, 8), sha256=want.sha256, size=want.size)
    _remember(draft, new, entry, judged, draft.steps[-1])
    new.files[entry.path] = want.to_json()


def _filler(blobs: Blobs, sha256: str) -> Callable[[int], object]:
    return lambda fd: take(blobs, sha256, lambda chunk: write(fd, iter((chunk,))))


def _record_unchanged(new: Receipt, plan: Plan) -> None:
    # A file that was right before us has no original to go back to, and stays on a restore.
    for entry in plan.files:
        if entry.path in new.originals:
            new.files[entry.path] = entry.want.to_json()


def _put_pyc(draft: Draft, new: Receipt, entry: PlannedFile, pyc: bytes, same: set[str]) -> None:
    place = cache_file(entry.path, new.python["tag"])
    if len(os.fsencode(split(place)[1])) > _LONGEST:
        raise Refused(
            "a module's name is too long for its bytecode",
            why=f"{printable(place)} has a name of more than {_LONGEST} bytes",
            fix="give it a shorter name; nothing was changed",
        )
    sha = hashlib.sha256(pyc).hexdigest()
    new.pycs[place] = {"sha256": sha, "source": entry.want.sha256}
    if place not in same:
        draft.put(place, lambda fd: write(fd, iter((pyc,))), 0o644, sha256=sha, size=len(pyc))


def _leave_others(draft: Draft, new: Receipt, judged: Judgement, planned: set[str]) -> None:
    """Plan the way back for every path that an earlier plan touched and this one does not."""
    leaving = [p for p in new.originals if p not in planned and _module_of_any(p) not in planned]
    _refuse_spoilt(draft.tree, new, judged.give_back)
    for path in judged.give_back:
        draft.give_back(path, new.originals[path]["kept"])
    for path in judged.drop:
        if path not in planned:
            draft.drop(path, keep=False)
    for path in leaving:
        entry = new.originals.pop(path)
        new.files.pop(path, None)
        if path.endswith(".pyc") and entry["kept"] and _as_kept(draft.tree, entry):
            draft.give_back(path, entry["kept"])  # a spoilt one is derived: Python makes it anew
    for pyc in [p for p in new.pycs if module_of(p) not in planned]:
        del new.pycs[pyc]


def _refuse_spoilt(tree: TreeWriter, receipt: Receipt, paths: Iterable[str]) -> None:
    """Raise Refused naming every original that is lost, or is not what it was when it was kept."""
    if below := [path for path in paths if not receipt.originals[path]["kept"]]:
        base = printable(str(receipt.incidental.get("base") or "")) or "its base image"
        raise Refused(
            f"{len(below)} original(s) lie in the base image, not here",
            why=f"an image replaced them, and keeps none: {', '.join(map(printable, below))}",
            fix=f"start a container of {base}, or of the image of the plan that you want;"
            " nothing was changed",
        )
    spoilt = [path for path in paths if not _as_kept(tree, receipt.originals[path])]
    if spoilt:
        raise Refused(
            f"{len(spoilt)} original(s) cannot be given back as they were",
            why=f"{tree.visible(KEPT)} has lost them, or they were changed there (through another"
            f" link to the same file, for instance): {', '.join(map(printable, spoilt))}",
            fix="install the base anew: what is as it was is left alone; nothing was changed",
        )


def _as_kept(tree: TreeWriter, entry: Mapping[str, Any]) -> bool:
    return tree.state(join(KEPT, entry["kept"])) == State.parse(entry["state"], "receipt")


def _two_pythons(asked: Mapping[str, str], compiled: Mapping[str, str]) -> Unfit:
    return Unfit(
        "the service's interpreter is not the same one every time",
        why=f"in the service's environment it is {asked['version']} ({asked['tag']}), with an empty"
        f" one {compiled['version']} ({compiled['tag']}): its bytecode would never be used",
        fix=f"{SET_PYTHON} to the interpreter itself, not to a script that chooses one",
    )


def _module_of_any(path: str) -> str:
    return module_of(path) if path.endswith(".pyc") else path


def _empty_folders(draft: Draft, new: Receipt) -> None:
    """Plan the end of folders that lose their last file: a left-over one imports as a namespace."""
    for folder in sorted(_emptied(draft), key=lambda p: (-p.count("/"), p)):
        found = draft.tree.stat(folder)
        if found is None or not stat.S_ISDIR(found.st_mode):
            continue
        draft.end_folder(folder)
        if folder not in draft.old.folders:
            new.removed[folder] = [stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid]
    for folder in (*draft.folders, *draft.unfolded):
        new.removed.pop(folder, None)


def _emptied(draft: Draft) -> set[str]:
    going = {step.path for step in draft.steps if step.kind == DROP}
    return losing_all(draft.tree, going, [s.path for s in draft.steps if s.kind == PUT])


def _put_receipt(draft: Draft, new: Receipt) -> None:
    line = canonical(new.to_json())
    sha = hashlib.sha256(line).hexdigest()
    draft.put(RECEIPT, lambda fd: write(fd, iter((line,))), 0o644, sha256=sha, size=len(line))


def carry_out(draft: Draft, lock: Lock, watch: Watch, info: Mapping[str, Any], say: Say) -> None:
    """Stage, commit and finish. Raises BundleError; up to the commit point nothing has changed."""
    tree, header = draft.tree, draft.header()
    _enough_space(draft)
    journal = None
    try:
        lock.sign(tree, dict(info))
        journal = Journal(tree, header)
        _stage(draft, watch)
        journal.cast_anchor()
        settle(tree, header)
        _read_back(draft)
        watch.commit()
        journal.mark("commit")
    except BaseException as err:
        if journal is not None:
            journal.uncommit()
        _give_up(tree, header, err)
        if isinstance(err, OSError):
            raise _cannot_stage(tree, err) from err
        raise
    say(f"committed: {len(header.steps)} steps")
    try:
        finish(journal)
    finally:
        journal.close()


def _give_up(tree: TreeWriter, header: Header, cause: BaseException) -> None:
    try:
        abort(tree, header)
    except OSError as err:
        raise NeedsPerson(
            "what was staged cannot be removed",
            why=f"{err} (after: {cause})",
            fix="the destinations are untouched; run it again once the cause is mended",
        ) from err


def _stage(draft: Draft, watch: Watch) -> None:
    for folder, (mode, owner) in draft.folders.items():
        draft.tree.make_folder(folder, mode, owner)
    for make in draft.stage:
        watch.check()
        make()


def _read_back(draft: Draft) -> None:
    """Hash what lies on the disk, not what was meant."""
    for path, wanted in draft.digests.items():
        found = draft.tree.state(path).sha256
        if found != wanted:
            raise Damaged(
                "a staged file does not read back as it was written",
                why=f"{draft.tree.visible(path)}: {found or 'nothing'}, not {wanted}",
                fix="look at the target's disk (dmesg); nothing was changed",
            )


def _enough_space(draft: Draft) -> None:
    room = os.statvfs(draft.tree.site_fd)
    free = room.f_bavail * room.f_frsize
    needed = draft.bytes + _SPARE
    if needed > free:
        raise Refused(
            "the target's disk is too full",
            why=f"{draft.tree.visible('')} has {free} bytes free, {needed} are needed",
            fix="make room; nothing was changed",
        )


def _cannot_stage(tree: TreeWriter, err: OSError) -> BundleError:
    where = printable(str(err.filename or tree.visible("")))
    if err.errno == errno.EROFS:
        return Unfit(
            "the site is read-only",
            why=f"{where}: {err.strerror}",
            fix="mount it for writing, or build an image",
        )
    return Refused(
        "the new files cannot be laid beside the old ones",
        why=f"{where}: {err.strerror}",
        fix="mend the cause (disk, owner, immutable flag); nothing was changed",
    )


def touched(judged: Judgement) -> Iterable[str]:
    """Return every path whose bytes a transaction would change."""
    return sorted([*(e.path for e in judged.put), *judged.drop, *judged.give_back])
