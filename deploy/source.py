"""What changed between two commits of a patched vLLM: every path, its bytes' digests, its class.

`delta` is this module's face. It reads git objects only, tree against tree; the work tree is looked
at just to refuse when it holds edits that no commit has (`deploy.worktree`).
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy import worktree
from deploy.agent.words import printable
from deploy.errors import BadValues
from deploy.git import GITLINK, LINK, Commit, Git, Objects, is_commit_id
from deploy.globs import first_match
from deploy.values import Blob, Change, Delta, PathClass, Writer

__all__ = ["KERNEL_GLOBS", "Rules", "copy_blobs", "delta", "read_blobs", "worktree_commit"]

# What vLLM compiles or builds with, and never installs.
KERNEL_GLOBS = (
    "csrc/**",
    "cmake/**",
    "CMakeLists.txt",
    "CMakePresets.json",
    "setup.py",
    "pyproject.toml",
    "requirements/**",
)
LFS = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:ext-.*\n)*"
    rb"oid sha256:(?P<oid>[0-9a-f]{64})\nsize (?P<size>\d+)\n"
)
LFS_LONGEST = 1024
RESERVED = ("__pycache__", ".dcu-bundle")
NONE = "0" * 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which class a path belongs to. `ignore` maps a glob to the reason that the manifest gives.

    An ignore wins, since it alone was written down with a reason; a kernel source is never
    installed, so it wins over an include.
    """

    include: tuple[str, ...]
    ignore: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[str, ...] = KERNEL_GLOBS

    def classify(self, path: str) -> tuple[PathClass, str] | None:
        """Return the class and the rule that gave it, or None when no rule speaks of the path."""
        if (glob := first_match(self.ignore, path)) is not None:
            return PathClass.IGNORED, f"ignore {glob}: {self.ignore[glob]}"
        if (glob := first_match(self.kernels, path)) is not None:
            return PathClass.KERNEL, f"kernel source {glob}"
        if (glob := first_match(self.include, path)) is not None:
            return PathClass.OVERLAY, f"include {glob}"
        return None

    def watched(self, path: str) -> bool:
        """True for a path whose bytes the product uses, now or after the next commit."""
        found = self.classify(path)
        return found is not None and found[0] is not PathClass.IGNORED


def delta(
    repo: Path,
    *,
    base: str,
    head: str,
    rules: Rules,
    may_be_dirty: Iterable[str] = (),
    check_worktree: bool = True,
) -> Delta:
    """Return the complete difference base..head, every path in exactly one class.

    Raises BadValues when a commit is missing, base is no ancestor of head, the work tree holds
    uncommitted edits, or a path cannot be deployed; all such paths at once.
    """
    git = Git(repo)
    with git.objects() as objects:
        _, tip = _commits(git, objects, base, head)
        allowed = tuple(may_be_dirty)
        dirty, seen = _survey(git, objects, head, rules, allowed) if check_worktree else ((), ())
        raw = _diff(git, base, head)
        changes, notes = _changes(repo, objects, raw, rules)
        _refuse_collisions(repo, objects, tip, changes)
    return Delta(
        base=base,
        head=head,
        head_time=tip.time,
        changes=changes,
        dirty=dirty,
        notes=(*notes, *seen),
    )


def read_blobs(repo: Path, oids: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the whole content of each blob, checked against its id; for small files."""
    with Git(repo).objects() as objects:
        for oid in oids:
            yield oid, objects.read(oid)


def copy_blobs(repo: Path, wanted: Iterable[tuple[str, Writer]]) -> None:
    """Copy each blob into its open file without ever holding more than 1 MiB of it."""
    with Git(repo).objects() as objects:
        for oid, out in wanted:
            objects.copy(oid, out)


def worktree_commit(repo: Path, rules: Rules, may_be_dirty: Iterable[str] = ()) -> str:
    """Return a throw-away commit of the watched files as they are on disk, for the edit loop."""
    globs = (*rules.include, *rules.kernels)
    dirty = tuple(may_be_dirty)
    return worktree.worktree_commit(repo, watched=rules.watched, globs=globs, may_be_dirty=dirty)


def _commits(git: Git, objects: Objects, base: str, head: str) -> tuple[Commit, Commit]:
    for role, name in (("base", base), ("head", head)):
        if not is_commit_id(name):
            raise BadValues(
                f"the {role} commit {name!r} is not a full commit id",
                why="40 lower-case hex digits are needed (sha256 repositories are not supported)",
                fix=f"use what `git rev-parse {role.upper()}` prints in {git.folder}",
            )
    found = {name: objects.commit(name) for name in (base, head)}
    for role, name in (("base", base), ("head", head)):
        if found[name] is None:
            raise _missing(git, role, name)
    if git.run("merge-base", "--is-ancestor", base, head, ok=(0, 1)).returncode:
        raise _no_ancestor(git, base, head)
    first, last = found[base], found[head]
    assert first is not None
    assert last is not None
    if first.tree == last.tree:
        raise BadValues(
            "there is nothing to deploy",
            why=f"base {base} and head {head} hold the same files",
            fix="name the commit with your changes as head",
        )
    return first, last


def _missing(git: Git, role: str, name: str) -> BadValues:
    if git.run("rev-parse", "--show-object-format").stdout.strip() != b"sha1":
        return BadValues(
            f"{git.folder} is a repository with sha256 ids",
            why="only repositories with sha1 ids (40 hex digits) are supported",
            fix="use a clone of the repository that has sha1 ids",
        )
    shallow = _is_shallow(git)
    kind = "a shallow clone, which holds only the newest commits" if shallow else "a full clone"
    deepen = f"git -C {git.folder} fetch --unshallow"
    fetch = f"git -C {git.folder} fetch REMOTE {name}, or correct the {role} in the manifest"
    return BadValues(
        f"the {role} commit {name} is not in {git.folder}",
        why=f"the repository does not hold this object; it is {kind}",
        fix=f"run `{deepen}`" if shallow else f"run {fetch}",
    )


def _no_ancestor(git: Git, base: str, head: str) -> BadValues:
    common = git.run("merge-base", base, head, ok=(0, 1)).stdout.decode().strip()
    if common == head:
        why = "it is the other way round: head is an ancestor of base"
        fix = "base and head look swapped: exchange them in the manifest"
    elif common:
        why = f"they parted at {common}: the difference would undo what base has and head has not"
        fix = f"rebase head onto base, or use {common} as base"
    elif _is_shallow(git):
        why = "the history between them is cut off: this is a shallow clone"
        fix = f"run `git -C {git.folder} fetch --unshallow`"
    else:
        why = "their histories have no commit in common (a full clone): they are unrelated"
        fix = "use a base from head's own history, as `git log HEAD` shows it"
    return BadValues(f"base {base} is not an ancestor of head {head}", why=why, fix=fix)


def _is_shallow(git: Git) -> bool:
    return git.run("rev-parse", "--is-shallow-repository").stdout.strip() == b"true"


def _survey(
    git: Git, objects: Objects, head: str, rules: Rules, may_be_dirty: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the allowed dirty paths and the notes of the work tree; refuse every other edit."""
    globs = (*rules.include, *rules.kernels)
    found = worktree.survey(git, objects, head, watched=rules.watched, globs=globs)
    if found is None:
        return (), ("there is no work tree, so none was looked through for uncommitted edits",)
    found = found.without(may_be_dirty)
    return found.allowed, found.notes


@dataclass(frozen=True, slots=True)
class _Record:
    """One record of the raw diff: modes and ids of both sides, the path's exact bytes."""

    modes: tuple[str, str]
    oids: tuple[str, str]
    path: bytes


def _diff(git: Git, base: str, head: str) -> list[_Record]:
    options = ("-r", "--raw", "-z", "--no-renames", "--full-index", "--no-abbrev")
    raw = git.run("diff-tree", *options, "--ignore-submodules=none", base, head).stdout
    fields = raw.split(b"\0")[:-1]
    records = []
    for meta, path in zip(fields[::2], fields[1::2], strict=True):
        old, new, old_id, new_id, _ = meta.decode("ascii").lstrip(":").split(" ")
        records.append(_Record((old, new), (old_id, new_id), path))
    return sorted(records, key=lambda record: record.path)


def _changes(
    repo: Path, objects: Objects, records: list[_Record], rules: Rules
) -> tuple[tuple[Change, ...], list[str]]:
    """Class and hash every record; raise one error that lists every path that cannot be used."""
    changes: list[Change] = []
    notes: list[str] = []
    faults: list[str] = []
    unclassed: list[str] = []
    reader = _Reader(objects)
    seen: set[str] = set()
    for record in records:
        path, why = _name(record.path)
        if why or path in seen:
            faults.append(f"{printable(path)}: {why or 'it stands twice in the tree'}")
            continue
        seen.add(path)
        found = rules.classify(path)
        if found is None:
            unclassed.append(printable(path))
            continue
        cls, reason = found
        old, new = (reader.blob(m, o) for m, o in zip(record.modes, record.oids, strict=True))
        changes.append(Change(path=path, old=old, new=new, cls=cls, reason=reason))
        if cls is PathClass.IGNORED:
            notes += _submodule_note(changes[-1])
        else:
            faults += [f"{printable(path)}: {why}" for why in _faults(changes[-1], reader)]
    _refuse(repo, faults, unclassed)
    return tuple(changes), notes


def _refuse(repo: Path, faults: list[str], unclassed: list[str]) -> None:
    if faults:
        raise BadValues(
            f"{_files(len(faults))} in {repo} cannot be deployed",
            why="; ".join(faults),
            fix="mend them in a new commit, or ignore them in the manifest with a reason",
        )
    if unclassed:
        are = "is" if len(unclassed) == 1 else "are"
        raise BadValues(
            f"{_files(len(unclassed))} in {repo} {are} in no class",
            why="no rule of the manifest speaks of: " + ", ".join(unclassed),
            fix="add each to overlay.include (installed), to the kernel sources (compiled), or to "
            "overlay.ignore with a reason",
        )


def _files(count: int) -> str:
    return f"{count} changed file{'' if count == 1 else 's'}"


def _name(raw: bytes) -> tuple[str, str]:
    """Return the path as text, and why a target could not hold it ("" if it can)."""
    text = raw.decode("utf-8", "backslashreplace")
    parts = raw.split(b"/")
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return text, "its name is not UTF-8"
    if any(part in (b"", b".", b"..") or part.lower() == b".git" for part in parts):
        return text, "its name leaves the repository"
    if any(len(part) > 255 for part in parts):
        return text, "a name in it is longer than 255 bytes, more than file systems hold"
    if len(raw) > 3500:
        return text, "the path is longer than 3,500 bytes, more than Linux can open below a site"
    return text, ""


class _Reader:
    """Hashes blobs, each once, and keeps the little of each that the checks below look at."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: dict[str, tuple[str, int]] = {}
        self._starts: dict[str, bytes] = {}
        self._crlf: set[str] = set()

    def blob(self, mode: str, oid: str) -> Blob | None:
        if oid == NONE:
            return None
        if mode == GITLINK:
            return Blob(oid=oid, mode=mode, sha256="", size=0)
        if oid not in self._known:
            self._read(oid)
        sha, size = self._known[oid]
        return Blob(oid=oid, mode=_mode(mode), sha256=sha, size=size)

    def _read(self, oid: str) -> None:
        sha, size, start, last = hashlib.sha256(), 0, b"", b""
        for piece in self._objects.stream(oid):
            sha.update(piece)
            size += len(piece)
            if len(start) < 4096:
                start += piece[:4096]
            if b"\r\n" in piece or (last == b"\r" and piece[:1] == b"\n"):
                self._crlf.add(oid)
            last = piece[-1:]
        self._known[oid] = sha.hexdigest(), size
        self._starts[oid] = start

    def start(self, blob: Blob) -> bytes:
        """The first bytes of a file, at least 4,096 of them if it has so many."""
        return self._starts[blob.oid]

    def has_crlf(self, blob: Blob) -> bool:
        return blob.oid in self._crlf


def _mode(mode: str) -> str:
    """Return git's mode without the group bit that very old trees still hold (100664)."""
    if mode in (LINK, GITLINK):
        return mode
    return "100755" if int(mode, 8) & 0o100 else "100644"


def _submodule_note(change: Change) -> list[str]:
    if GITLINK not in _modes(change):
        return []
    return [f"{printable(change.path)}: a submodule that is ignored, {_ids(change)}"]


def _modes(change: Change) -> tuple[str, ...]:
    return tuple(blob.mode for blob in (change.old, change.new) if blob)


def _ids(change: Change) -> str:
    old, new = (blob.oid if blob else "absent" for blob in (change.old, change.new))
    return f"from {old} to {new}"


def _faults(change: Change, reader: _Reader) -> Iterator[str]:
    """Yield every reason why this path cannot be deployed or compiled as it is."""
    if GITLINK in _modes(change):
        yield f"it is a submodule, {_ids(change)}; the files inside are in another repository"
        return
    for side, blob in (("", change.new), ("before, ", change.old)):
        if blob and blob.size <= LFS_LONGEST and (found := LFS.match(reader.start(blob))):
            oid, size = found["oid"].decode(), found["size"].decode()
            yield f"{side}it is a Git LFS pointer to {size} bytes with the sha256 {oid}"
    if change.cls is PathClass.OVERLAY and _is_derived(change.path):
        yield "it is bytecode or the agent's own folder: both are made on the target"
    if change.new is None:
        return
    if change.new.mode == LINK:
        yield from _link_faults(change.path, reader.start(change.new), change.new.size)
    elif _is_shell_with_cr(change.path, change.new, reader):
        yield "it is a script with Windows line ends (CR), which Linux cannot run"


def _is_derived(path: str) -> bool:
    return path.endswith(".pyc") or not set(RESERVED).isdisjoint(path.split("/"))


def _link_faults(path: str, raw: bytes, size: int) -> Iterator[str]:
    """A link may lead anywhere below the top folder it stands in, and nowhere else."""
    target = raw.decode("utf-8", "backslashreplace")
    if size > 4000 or b"\0" in raw or not raw:
        yield "it is a link without a usable target"
    elif target.startswith("/"):
        yield f"it is a link to the absolute path {printable(target)}"
    else:
        whole = os.path.normpath(f"/top/{path.rpartition('/')[0]}/{target}")
        package = path.rpartition("/")[0].partition("/")[0]
        if not f"{whole}/".startswith(os.path.normpath(f"/top/{package}") + "/"):
            yield f"it is a link that leads out of {package or 'the repository'}: {target!r}"
    # What the link's folders are on a target is the agent's business; here the names are judged.


def _is_shell_with_cr(path: str, blob: Blob, reader: _Reader) -> bool:
    first, newline, _ = reader.start(blob).partition(b"\n")
    if first.startswith(b"#!") and newline and first.endswith(b"\r"):
        return True
    shell = path.endswith((".sh", ".bash")) or re.match(rb"#!.*\b(ba|da|k|z)?sh\b", first)
    return bool(shell) and reader.has_crlf(blob)


def _refuse_collisions(
    repo: Path, objects: Objects, tip: Commit, changes: tuple[Change, ...]
) -> None:
    """Refuse an installed name that differs from another one only by capitals or accents' form."""
    added = {c.path for c in changes if c.cls is PathClass.OVERLAY and c.new and not c.old}
    if not added:
        return
    groups: dict[str, set[str]] = {}
    for entry in objects.files(tip.tree):
        path = entry.name.decode("utf-8", "backslashreplace")
        for name in _prefixes(path):
            groups.setdefault(_folded(name), set()).add(name)
    wanted = {_folded(name) for path in added for name in _prefixes(path)}
    clashes = [sorted(groups[key]) for key in sorted(wanted) if len(groups.get(key, ())) > 1]
    if clashes:
        raise BadValues(
            f"{len(clashes)} names in {repo} collide where capitals do not count",
            why="; ".join(" and ".join(map(printable, names)) for names in clashes),
            fix="rename one of each pair in a new commit",
        )


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split("/")
    return ("/".join(parts[:n]) for n in range(1, len(parts) + 1))


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
