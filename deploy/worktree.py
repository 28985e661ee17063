"""Edits that no commit has: found by comparing bytes, never by trusting git's memory of a file.

`git status` runs the repository's filters and believes the assume-unchanged bit; here every watched
file is read and its id compared. Nothing is written, but for the throw-away commit of
`worktree_commit`.
"""

# Paths of git are bytes, and pathlib has none of those.
# ruff: noqa: PTH112, PTH114, PTH115, PTH118
from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.agent.words import printable
from deploy.errors import BadValues
from deploy.git import GITLINK, LINK, Commit, Git, GitFailed, Objects
from deploy.globs import first_match, roots

__all__ = ["Found", "Survey", "survey", "worktree_commit"]

SOURCE_SUFFIXES = (".py", ".json", ".jinja", ".cu", ".cuh", ".cpp", ".h", ".hip")
# Ignored by vLLM's own .gitignore because its build writes them; they belong to no commit.
GENERATED = (
    "vllm/_version.py",
    "vllm/vllm_flash_attn/**",
    "vllm/third_party/triton_kernels/**",
    "vllm/third_party/flashmla/flash_mla_interface.py",
    "vllm/third_party/deep_gemm/**",
    "vllm/grpc/vllm_engine_pb2*.py",
)
CACHES = ("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints")
IDENT = re.compile(rb"\$Id:[^$\n]*\$")
LARGEST_FILTERED = 64 << 20  # bytes; of a larger file it is not asked which filter changed it


@dataclass(frozen=True, slots=True)
class Found:
    """One path whose bytes no commit has. `kind` is a word for people: modified, untracked, ..."""

    path: str
    kind: str

    def __str__(self) -> str:
        return f"{printable(self.path)} ({self.kind})"


@dataclass(frozen=True, slots=True)
class Survey:
    """What the work tree holds beside the commit that is checked out."""

    top: Path
    found: tuple[Found, ...]
    notes: tuple[str, ...]
    allowed: tuple[str, ...] = ()

    def without(self, may_be_dirty: tuple[str, ...]) -> Survey:
        """Return the survey if only these globs are dirty; raise BadValues naming the rest."""
        rest = [f for f in self.found if first_match(may_be_dirty, f.path) is None]
        if rest:
            hold = "1 file holds" if len(rest) == 1 else f"{len(rest)} files hold"
            raise BadValues(
                f"the work tree {self.top} is dirty: {hold} what no commit has",
                why=", ".join(map(str, rest)),
                fix="commit them and name that commit as head, remove them, or list them in "
                "source.may_be_dirty",
            )
        notes = tuple(f"dirty, allowed by may_be_dirty: {found}" for found in self.found)
        return replace(
            self, allowed=tuple(f.path for f in self.found), notes=self.notes + notes, found=()
        )


@dataclass(frozen=True, slots=True)
class _Tracked:
    """One line of the index.

    `tag` is git's letter: lower case is assume-unchanged, S or s is skip-worktree.
    """

    tag: str
    mode: str
    oid: str
    stage: str

    @property
    def hidden_by(self) -> str:
        bits = ["skip-worktree"] if self.tag in "Ss" else []
        bits += ["assume-unchanged"] if self.tag.islower() else []
        return " and ".join(bits)


_Index = tuple[dict[bytes, _Tracked], set[bytes]]


def survey(
    git: Git,
    objects: Objects,
    head: str,
    *,
    watched: Callable[[str], bool],
    globs: Iterable[str],
) -> Survey | None:
    """Compare every watched file of the work tree with the commit that is checked out.

    `globs` only bounds where to look. Returns None for a bare repository.
    """
    index = _index(git)
    if index is None:
        return None
    look = _Look(git, objects, index, watched)
    at = objects.commit("HEAD")
    look.tracked_files(at)
    look.conversions()
    look.other_files(roots(globs))
    if at is not None and at.id != head:
        look.notes.append(f"the work tree has another commit checked out than head: {at.id}")
    return Survey(git.folder, tuple(sorted(set(look.found), key=str)), tuple(look.all_notes()))


def _index(git: Git) -> _Index | None:
    """Return the index by path, and the untracked paths that are not ignored."""
    try:
        options = ("--cached", "--others", "--exclude-standard", "--stage", "-v", "-z")
        raw = git.run("ls-files", *options).stdout
    except GitFailed as err:
        if "must be run in a work tree" in err.why:
            return None
        raise
    tracked: dict[bytes, _Tracked] = {}
    untracked: set[bytes] = set()
    for line in raw.split(b"\0")[:-1]:
        tag, _, rest = line.partition(b" ")
        if tag == b"?":
            untracked.add(rest)
            continue
        meta, _, path = rest.partition(b"\t")
        mode, oid, stage = meta.decode("ascii").split(" ")
        tracked[path] = _Tracked(tag.decode("ascii"), mode, oid, stage)
    return tracked, untracked


class _Look:
    """Collects what `survey` finds."""

    def __init__(
        self, git: Git, objects: Objects, index: _Index, watched: Callable[[str], bool]
    ) -> None:
        self._git, self._objects, self._watched = git, objects, watched
        self._top = os.fsencode(os.path.realpath(git.folder))
        self._tracked, self._untracked = index
        self.found: list[Found] = []
        self.notes: list[str] = []
        self._doubtful: dict[bytes, tuple[str, ...]] = {}
        self._absent = self._ignored = 0

    def all_notes(self) -> Iterator[str]:
        yield from self.notes
        if self._absent:
            yield f"{self._absent} files are left out of this sparse work tree"
        if self._ignored:
            yield f"{self._ignored} files below the watched folders are ignored by git"

    def tracked_files(self, at: Commit | None) -> None:
        committed = {e.name: (e.mode, e.oid) for e in self._objects.files(at.tree)} if at else {}
        for raw in sorted(committed.keys() | self._tracked.keys()):
            path = _text(raw)
            entry = self._tracked.get(raw)
            inside = _is_module(entry) and self._watched(f"{path}/_")
            if not (inside or self._watched(path)):
                continue
            if entry is None:
                self._add(path, "removed, not committed")
            elif entry.stage != "0":
                self._add(path, "unmerged")
            elif raw not in committed:
                self._add(path, "added, not committed")
            elif committed[raw] != (entry.mode, entry.oid):
                self._add(path, "staged, not committed")
            elif _is_module(entry):
                self._submodule(path, entry)
            else:
                self._file(raw, path, entry)

    def other_files(self, folders: Iterable[str]) -> None:
        for raw in self._untracked:
            path = _text(raw)
            if self._watched(path) or (path.endswith("/") and self._watched(f"{path}_")):
                self._add(path, "untracked")
        twins = {twin for raw in self._tracked for twin in _twins(_text(raw))}
        # Repositories inside this one: a submodule is surveyed on its own, another is untracked.
        others = {raw for raw, entry in self._tracked.items() if _is_module(entry)}
        others |= {raw[:-1] for raw in self._untracked if raw.endswith(b"/")}
        for raw in _walk(self._top, folders, others):
            path = _text(raw)
            if raw in self._tracked or raw in self._untracked or not self._watched(path):
                continue
            if path in twins or not _could_be_source(path):
                self._ignored += 1
            else:
                self._add(path, "ignored by git, yet it could be source")

    def _add(self, path: str, kind: str) -> None:
        self.found.append(Found(path, kind))

    def _file(self, raw: bytes, path: str, entry: _Tracked) -> None:
        where = os.path.join(self._top, raw)
        try:
            state = os.lstat(where)
            oid = _oid_on_disk(where, state)
        except (FileNotFoundError, NotADirectoryError):
            if entry.tag in "Ss":
                self._absent += 1
            else:
                self._add(path, _with_bits("deleted", entry))
            return
        except OSError as err:
            self._add(path, f"unreadable: {err.strerror}")
            return
        if entry.mode != _mode_on_disk(state) and self._keeps_modes(entry):
            self._add(path, _with_bits("mode changed", entry))
        if oid == entry.oid:
            self._note_bits(path, entry)
        elif conversion := _conversion(where, state, entry.oid):
            self._doubtful[raw] = conversion
        else:
            self._add(path, _with_bits("modified", entry))

    def _note_bits(self, path: str, entry: _Tracked) -> None:
        if entry.hidden_by:
            self.notes.append(f"{printable(path)}: marked {entry.hidden_by}, its bytes are right")

    def conversions(self) -> None:
        """Tell git's own conversions, which were asked for, from edits that look like one."""
        if not self._doubtful:
            return
        asked = b"".join(raw + b"\0" for raw in self._doubtful)
        names = ("text", "eol", "crlf", "ident", "filter")
        said = self._git.run("check-attr", "-z", "--stdin", *names, stdin=asked).stdout.split(b"\0")
        attributes: dict[bytes, dict[str, str]] = {}
        for raw, name, value in zip(said[::3], said[1::3], said[2::3], strict=False):
            attributes.setdefault(raw, {})[name.decode()] = value.decode("utf-8", "replace")
        config = self._git.run("config", "--get", "core.autocrlf", ok=(0, 1)).stdout
        autocrlf = config.decode("utf-8", "replace").strip().lower() not in ("", "false", "0", "no")
        for raw, conversion in self._doubtful.items():
            path, found = _text(raw), attributes.get(raw, {})
            if all(_asked_for(part, found, autocrlf=autocrlf) for part in conversion):
                kinds = " and ".join(conversion)
                text = f"the work tree differs from the blob by filter: {kinds}"
                self.notes.append(f"{printable(path)}: {text}")
            else:
                self._add(path, _with_bits("modified", self._tracked[raw]))

    def _keeps_modes(self, entry: _Tracked) -> bool:
        """False where git was told that this file system keeps no execute bit or no links."""
        name = "core.symlinks" if entry.mode == LINK else "core.fileMode"
        found = self._git.run("config", "--type=bool", "--get", name, ok=(0, 1)).stdout
        return found.strip() != b"false"

    def _submodule(self, path: str, entry: _Tracked) -> None:
        git = Git(self._git.folder / path)
        if not (git.folder / ".git").exists():
            self.notes.append(f"{printable(path)}: a submodule that is not checked out")
            return
        with git.objects() as objects:
            at = objects.commit("HEAD")
            if at is None or at.id != entry.oid:
                found = at.id if at else "no commit"
                self._add(path, f"submodule at {found} instead of {entry.oid}")
            inner = survey(
                git,
                objects,
                entry.oid,
                watched=lambda name: self._watched(f"{path}/{name}"),
                globs=("**",),
            )
        for item in inner.found if inner else ():
            self._add(f"{path}/{item.path}", f"{item.kind}, in a submodule")


def _is_module(entry: _Tracked | None) -> bool:
    return entry is not None and entry.mode == GITLINK


def _with_bits(kind: str, entry: _Tracked) -> str:
    return f"{kind}, hidden from git by {entry.hidden_by}" if entry.hidden_by else kind


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _raw(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _oid_on_disk(where: bytes, state: os.stat_result) -> str:
    """Return the id that the bytes on disk would have as a blob; "" for a device or a socket."""
    if stat.S_ISLNK(state.st_mode):
        return _oid(os.readlink(where))
    if not stat.S_ISREG(state.st_mode):
        return ""
    sha = hashlib.sha1(b"blob %d\0" % state.st_size, usedforsecurity=False)
    with open(where, "rb", buffering=0) as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


def _conversion(where: bytes, state: os.stat_result, oid: str) -> tuple[str, ...]:
    """Say which of git's own conversions would make these bytes of that blob; () if none.

    They are undone on a copy. No filter is run: it is a program that the repository names.
    """
    if not stat.S_ISREG(state.st_mode) or state.st_size > LARGEST_FILTERED:
        return ()
    with open(where, "rb") as file:
        data = file.read()
    plain = data.replace(b"\r\n", b"\n")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n"
    tries = {
        ("CRLF",): plain,
        ("ident",): IDENT.sub(b"$Id$", data),
        ("CRLF", "ident"): IDENT.sub(b"$Id$", plain),
        ("LFS",): pointer % (hashlib.sha256(data).hexdigest().encode(), len(data)),
    }
    return next((kinds for kinds, blob in tries.items() if _oid(blob) == oid), ())


def _asked_for(kind: str, attributes: dict[str, str], *, autocrlf: bool) -> bool:
    """True where the repository's attributes or the user's configuration ask for the conversion."""
    if kind == "ident":
        return attributes.get("ident") == "set"
    if kind == "LFS":
        return attributes.get("filter") == "lfs"
    text, eol, crlf = (attributes.get(name, "unspecified") for name in ("text", "eol", "crlf"))
    if text == "unset" or crlf == "unset":
        return False
    return autocrlf or text in ("set", "auto") or eol != "unspecified" or crlf != "unspecified"


def _mode_on_disk(state: os.stat_result) -> str:
    if stat.S_ISLNK(state.st_mode):
        return LINK
    return "100755" if state.st_mode & 0o100 else "100644"


def _walk(top: bytes, folders: Iterable[str], skipped: set[bytes]) -> Iterator[bytes]:
    """Yield every file and link below the folders, as paths from the top.

    Neither `.git` nor the folders `skipped` are entered.
    """
    for folder in folders:
        start = os.path.join(top, _raw(folder))
        if os.path.islink(start) or not os.path.isdir(start):
            continue  # os.walk would follow a link, out of the repository perhaps
        for where, names, files in os.walk(start, onerror=_unreadable):
            inside = os.path.relpath(where, top)
            paths = {name: os.path.normpath(os.path.join(inside, name)) for name in names}
            names[:] = [n for n in names if n != b".git" and paths[n] not in skipped]
            links = [n for n in names if os.path.islink(os.path.join(where, n))]
            for name in (*files, *links):
                yield os.path.normpath(os.path.join(inside, name))


def _unreadable(err: OSError) -> None:
    # Left to itself, os.walk passes over a folder that it cannot list.
    raise BadValues(
        f"the folder {printable(os.fsdecode(err.filename))} cannot be looked through",
        why=str(err.strerror),
        fix="make it readable; without that nobody knows whether it holds an uncommitted edit",
    ) from err


def _could_be_source(path: str) -> bool:
    parts = path.split("/")
    if any(part in CACHES for part in parts) or first_match(GENERATED, path):
        return False
    return path.endswith(SOURCE_SUFFIXES)


def _twins(path: str) -> Iterator[str]:
    """Yield the names under which hipify leaves its translation of a source beside it."""
    if not path.endswith((".cu", ".cuh", ".cpp", ".h", ".cc", ".hpp")):
        return
    folder, slash, name = path.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    suffix = "hip" if suffix == "cu" else suffix
    new = stem.replace("cuda", "hip").replace("CUDA", "HIP")
    for where in {folder, folder.replace("cuda", "hip")}:
        if (where, new, f"{dot}{suffix}") != (folder, stem, f"{dot}{name.rpartition('.')[2]}"):
            yield f"{where}{slash}{new}{dot}{suffix}"
        yield f"{where}{slash}{new}_hip{dot}{suffix}"


def worktree_commit(
    repo: Path,
    *,
    watched: Callable[[str], bool],
    globs: Iterable[str],
    may_be_dirty: tuple[str, ...] = (),
) -> str:
    """Return a throw-away commit on top of HEAD that holds the watched files as they are on disk.

    No reference names it and the user's index is not touched; git removes the objects in time.
    Files that differ from their blob only by a filter keep the blob. Returns HEAD's id when there
    is nothing to add.
    """
    git = Git(repo)
    with git.objects() as objects:
        at = objects.commit("HEAD")
        found = survey(git, objects, "", watched=watched, globs=globs)
    if at is None or found is None:
        raise BadValues(
            f"{repo} has no work tree with a commit",
            why="it is bare, or nothing was committed yet",
            fix="name a base and a head commit instead of --worktree",
        )
    wanted = [f.path for f in found.found if first_match(may_be_dirty, f.path) is None]
    if modules := [f for f in found.found if "submodule" in f.kind and f.path in wanted]:
        raise BadValues(
            f"{repo} has edits in a submodule",
            why=", ".join(map(str, modules)),
            fix="commit inside the submodule; its files are not part of this repository",
        )
    return _commit(git, at, found.top, wanted) if wanted else at.id


def _commit(git: Git, at: Commit, top: Path, paths: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        env = {"GIT_INDEX_FILE": os.path.join(folder, "index")} | _who(at.time)
        git.run("read-tree", at.tree, env=env)
        rows = b"".join(_index_row(git, top, path) for path in paths)
        git.run("update-index", "-z", "--index-info", stdin=rows, env=env)
        tree = git.run("write-tree", env=env).stdout.decode().strip()
        made = git.run(
            *("-c", "i18n.commitEncoding=UTF-8", "commit-tree", tree, "-p", at.id),
            stdin=b"Work tree, not committed\n",
            env=env,
        )
    return made.stdout.decode().strip()


def _who(time: int) -> dict[str, str]:
    """The same author and time for the same bytes, so that a repeated call gives the same id."""
    person = {"NAME": "dcu-bundle", "EMAIL": "dcu-bundle@invalid", "DATE": f"{time} +0000"}
    return {f"GIT_{role}_{k}": v for role in ("AUTHOR", "COMMITTER") for k, v in person.items()}


def _index_row(git: Git, top: Path, path: str) -> bytes:
    raw = _raw(path)
    where = os.path.join(os.fsencode(top), raw)
    try:
        mode = _mode_on_disk(os.lstat(where))
    except (FileNotFoundError, NotADirectoryError):
        return b"0 %s\t%s\0" % (b"0" * 40, raw)
    if mode == LINK:
        data = os.readlink(where)
    else:
        with open(where, "rb") as file:
            data = file.read()
    oid = git.run("hash-object", "-w", "--no-filters", "--stdin", stdin=data).stdout.strip()
    return b"%s %s\t%s\0" % (mode.encode(), oid, raw)
