"""A pinned change of a third-party tree, written without quoting a line of it.

`overlay/NAME/series` lists edits in order; each sees what those above it left. What an edit changes
is named by its path and the sha256 of its content, never by its text:

    series 1
    new    vllm/dcu/diag.py  from files/diag.py
    new    vllm/dcu/run.sh  mode 0755  from files/run.sh
    insert vllm/version.py  was 4d1c...
        after 12  from files/version.12.py
        after 40  from files/version.40.py
    delete vllm/scripts.py  was 77ab...
    rename vllm/a.py  to vllm/b.py  was 09fe...
    mode   vllm/collect_env.py  0755  was c01d...

`after N` counts the lines of the file before this edit, from 1; `after 0` is its start. A word that
holds a blank or a quote is written as a JSON string. `#` starts a comment line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import BadValues, StaleLock
from deploy.git import Git, Objects, commit_head, fast_import, quoted

__all__ = ["Edit", "Hunk", "Series", "head_commit", "read"]

LARGEST = 1 << 20  # bytes of a series file; a real one has a few kilobytes
WORD = re.compile(r'"(?:[^"\\]|\\.)*"(?=\s|$)|\S+')
SHA256 = re.compile(r"[0-9a-f]{64}")
BROKEN = "broken"
GIT_MODES = {"0644": "100644", "0755": "100755"}


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines that are put behind line `after` of the file before the edit."""

    after: int
    text: bytes
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One edit. `was` is the sha256 of the file before it; `where` is "file:line" for errors."""

    verb: str
    path: str
    where: str
    was: str = ""
    mode: str = ""
    to: str = ""
    text: bytes = b""
    hunks: tuple[Hunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    edits: tuple[Edit, ...]


def read(folder: Path) -> Series:
    """Read `folder/series` and the files it names; raise one BadValues that lists every fault."""
    path = folder / "series"
    parser = _Parser(folder, path)
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as err:
        raise BadValues(
            f"cannot read the series {path}", why=str(err), fix="correct `series:` in the manifest"
        ) from err
    edits = parser.parse(raw)
    if parser.faults:
        raise BadValues(
            f"the series {path} has faults: {len(parser.faults)}",
            why="\n       ".join(parser.faults),
            fix="correct these lines",
        )
    return Series(folder.name, edits)


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    column: int


class _Fault(Exception):
    def __init__(self, column: int, message: str) -> None:
        super().__init__(message)
        self.column = column


class _Words:
    """The words of one line, taken one by one; a wrong one is a fault at its column."""

    def __init__(self, words: list[_Word], end: int) -> None:
        self._words, self._end = words, end
        self.column = words[0].column if words else 1

    def take(self, what: str) -> str:
        if not self._words:
            raise _Fault(self._end, f"{what} is missing")
        word = self._words.pop(0)
        self.column = word.column
        return word.text

    def keyword(self, *allowed: str) -> str:
        text = self.take(" or ".join(f"`{word}`" for word in allowed))
        if text not in allowed:
            raise self.fault(f"expected {' or '.join(allowed)}, found {text!r}")
        return text

    def path(self) -> str:
        text = self.take("a path")
        if why := _bad_path(text):
            raise self.fault(f"the path {text!r} {why}")
        return text

    def sha256(self) -> str:
        self.keyword("was")
        text = self.take("a sha256")
        if not SHA256.fullmatch(text):
            raise self.fault("a sha256 has 64 lower-case hex digits")
        return text

    def mode(self) -> str:
        text = self.take("a mode")
        if text not in GIT_MODES:
            raise self.fault(f"the mode must be 0644 or 0755, found {text!r}")
        return text

    def count(self) -> int:
        text = self.take("a line number")
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise self.fault(f"a line number was expected, found {text!r}")
        return int(text)

    def next_is(self, word: str) -> bool:
        return bool(self._words) and self._words[0].text == word

    def end(self) -> None:
        if self._words:
            word = self._words[0]
            raise _Fault(word.column, f"{word.text!r} is too much")

    def fault(self, message: str) -> _Fault:
        return _Fault(self.column, message)


def _bad_path(text: str) -> str:
    parts = text.split("/")
    if not text or any(part in ("", ".", "..") or part.lower() == ".git" for part in parts):
        return "is absolute, leaves its folder or is not in its shortest form"
    if not text.isprintable():
        return "holds a control character"
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
        return "has a name longer than 255 bytes"
    return ""


class _Parser:
    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path
        self.faults: list[str] = []

    def parse(self, raw: bytes) -> tuple[Edit, ...]:
        if len(raw) > LARGEST:
            self._fault(1, 1, f"the file is larger than {LARGEST} bytes")
            return ()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as err:
            line = raw[: err.start].count(b"\n") + 1
            column = err.start - raw.rfind(b"\n", 0, err.start)
            self._fault(line, column, "the file is not UTF-8")
            return ()
        return self._edits(text.split("\n"))

    def _edits(self, lines: list[str]) -> tuple[Edit, ...]:
        edits: list[Edit] = []
        hunks: list[Hunk] = []
        headed = False
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                words = self._words(line)
                if not headed:
                    headed = True
                    self._head(words)
                elif line[0].isspace():
                    hunks.append(self._hunk(words, number, edits, hunks))
                else:
                    _close(edits, hunks)
                    # Stands in while the line is read: what is indented below a faulty line is
                    # still looked at, and goes to nobody else.
                    edits.append(Edit(verb=BROKEN, path="", where=""))
                    edits[-1] = self._edit(words, number)
            except _Fault as fault:
                self._fault(number, fault.column, str(fault))
        _close(edits, hunks)
        if not headed:
            self._fault(1, 1, "the file must start with `series 1`")
        for edit in edits:
            if edit.verb == "insert" and not edit.hunks and not self.faults:
                self.faults.append(f"{edit.where}:1: an insert needs indented `after` lines")
        return tuple(edits)

    def _words(self, line: str) -> _Words:
        if bad := next((c for c in line if not c.isprintable() and c != "\t"), None):
            raise _Fault(line.index(bad) + 1, f"the line holds the character {bad!r}")
        words = []
        for found in WORD.finditer(line):
            text = found[0]
            if text.startswith('"'):
                try:
                    text = str(json.loads(text))
                except ValueError as err:
                    message = "a quoted word must be a JSON string on one line"
                    raise _Fault(found.start() + 1, message) from err
            words.append(_Word(text, found.start() + 1))
        return _Words(words, len(line) + 1)

    def _head(self, words: _Words) -> None:
        words.keyword("series")
        words.keyword("1")
        words.end()

    def _edit(self, words: _Words, number: int) -> Edit:
        verb = words.keyword("new", "insert", "delete", "rename", "mode")
        where = f"{self._path}:{number}"
        path = words.path()
        edit = Edit(verb=verb, path=path, where=where)
        if verb == "new":
            mode = "0644"
            if words.next_is("mode"):
                words.keyword("mode")
                mode = words.mode()
            edit = Edit(verb=verb, path=path, where=where, mode=mode, text=self._file(words))
        elif verb == "rename":
            words.keyword("to")
            to = words.path()
            edit = Edit(verb=verb, path=path, where=where, to=to, was=words.sha256())
        elif verb == "mode":
            mode = words.mode()
            edit = Edit(verb=verb, path=path, where=where, mode=mode, was=words.sha256())
        else:
            edit = Edit(verb=verb, path=path, where=where, was=words.sha256())
        words.end()
        return edit

    def _hunk(self, words: _Words, number: int, edits: list[Edit], before: list[Hunk]) -> Hunk:
        if not edits or edits[-1].verb not in ("insert", BROKEN):
            raise words.fault("an indented line belongs below an `insert`")
        words.keyword("after")
        after = words.count()
        if before and before[-1].after >= after:
            raise words.fault(f"the lines must go upwards, {before[-1].after} stands above")
        text = self._file(words)
        if not text.endswith(b"\n"):
            raise words.fault("the inserted file must end with a newline")
        words.end()
        return Hunk(after, text, f"{self._path}:{number}")

    def _file(self, words: _Words) -> bytes:
        words.keyword("from")
        name = words.path()
        path = self._folder / name
        inside = path.resolve().is_relative_to(self._folder.resolve())
        if not inside or not path.is_file():
            raise words.fault(f"there is no file {name!r} below {self._folder}")
        return path.read_bytes()

    def _fault(self, line: int, column: int, message: str) -> None:
        self.faults.append(f"{self._path}:{line}:{column}: {message}")


def _close(edits: list[Edit], hunks: list[Hunk]) -> None:
    """Give the hunks read so far to the edit they stand below."""
    if hunks:
        last = edits[-1]
        edits[-1] = Edit(
            verb=last.verb, path=last.path, where=last.where, was=last.was, hunks=tuple(hunks)
        )
        hunks.clear()


def head_commit(repo: Path, base: str, folder: Path) -> str:
    """Apply a series to the commit `base` in our own `repo` and return the new commit's id.

    The id depends on the base, the folder's name and the edits alone. Raises StaleLock, with every
    line that does not fit, when the base is not the one that the series was written for.
    """
    series = read(folder)
    git = Git(repo, own=True)
    with git.objects() as objects:
        commit = objects.commit(base)
        if commit is None:
            raise BadValues(
                f"the base commit {base} is not in {repo}",
                why="the cached repository was made from another wheel",
                fix=f"delete {repo}; it is made again",
            )
        tree = _Tree(objects, commit.tree)
        _apply(series, tree, base)
    ref = f"refs/bundle/series-{hashlib.sha256(series.name.encode()).hexdigest()[:16]}"
    message = f"Apply series {series.name}\n"
    head = commit_head(ref, message=message, time=commit.time, parent=base)
    return fast_import(git, (head, *tree.stream()))


@dataclass(frozen=True, slots=True)
class _Node:
    """A file of the tree being edited: either a blob of the base or new text."""

    mode: str
    oid: str = ""
    text: bytes = b""


class _Tree:
    """The base's files by path, and what the edits made of them."""

    def __init__(self, objects: Objects, tree: str) -> None:
        self._objects = objects
        self._base = {e.name: _Node(e.mode, e.oid) for e in objects.files(tree)}
        self._now = dict(self._base)

    def get(self, path: str) -> _Node | None:
        return self._now.get(path.encode())

    def put(self, path: str, node: _Node) -> None:
        self._now[path.encode()] = node

    def remove(self, path: str) -> None:
        del self._now[path.encode()]

    def content(self, node: _Node) -> bytes:
        return self._objects.read(node.oid) if node.oid else node.text

    def blocked(self, path: str) -> bool:
        """True when the path is a folder, or runs through a file."""
        raw = path.encode()
        parents = {raw.rsplit(b"/", n)[0] for n in range(1, raw.count(b"/") + 1)}
        below = any(name.startswith(raw + b"/") for name in self._now)
        return below or not parents.isdisjoint(self._now)

    def stream(self) -> Iterator[bytes]:
        """Yield fast-import's commands for what differs from the base, sorted, deletions first."""
        for path in sorted(self._base.keys() - self._now.keys()):
            yield b"D %s\n" % quoted(path)
        for path, node in sorted(self._now.items()):
            if self._base.get(path) == node:
                continue
            if node.oid:
                yield b"M %s %s %s\n" % (node.mode.encode(), node.oid.encode(), quoted(path))
            else:
                yield b"M %s inline %s\n" % (node.mode.encode(), quoted(path))
                yield b"data %d\n%s\n" % (len(node.text), node.text)


def _apply(series: Series, tree: _Tree, base: str) -> None:
    faults: list[str] = []
    for edit in series.edits:
        faults += [f"{where}:1: {why}" for where, why in _one(edit, tree)]
    if faults:
        raise StaleLock(
            f"the series {series.name} does not fit the base {base}",
            why="\n       ".join(faults),
            fix="use the base that the series was written for, or write these lines for this base",
        )


def _one(edit: Edit, tree: _Tree) -> Iterable[tuple[str, str]]:
    """Carry out one edit if it fits; return what does not fit."""
    node = tree.get(edit.path)
    goal = edit.path if edit.verb == "new" else edit.to
    if goal and (tree.get(goal) or tree.blocked(goal)):
        return [(edit.where, f"{goal!r} is there already, or its folder is a file")]
    if edit.verb == "new":
        tree.put(edit.path, _Node(GIT_MODES[edit.mode], text=edit.text))
        return []
    if node is None or node.mode not in GIT_MODES.values():
        return [(edit.where, f"there is no file {edit.path!r} before this edit")]
    content = tree.content(node)
    if (found := hashlib.sha256(content).hexdigest()) != edit.was:
        return [
            (edit.where, f"{edit.path!r} has the sha256 {found}, the edit was made for {edit.was}")
        ]
    return _change(edit, tree, node, content)


def _change(edit: Edit, tree: _Tree, node: _Node, content: bytes) -> Iterable[tuple[str, str]]:
    if edit.verb == "mode":
        if node.mode == GIT_MODES[edit.mode]:
            return [(edit.where, f"{edit.path!r} has the mode {edit.mode} already")]
        tree.put(edit.path, _Node(GIT_MODES[edit.mode], node.oid, node.text))
    elif edit.verb == "insert":
        lines = re.findall(rb"[^\n]*\n|[^\n]+", content)
        if late := [h for h in edit.hunks if h.after > len(lines)]:
            return [(h.where, f"{edit.path!r} has only {len(lines)} lines") for h in late]
        if edit.hunks[-1].after == len(lines) and lines and not lines[-1].endswith(b"\n"):
            return [(edit.hunks[-1].where, f"the last line of {edit.path!r} has no newline")]
        tree.put(edit.path, _Node(node.mode, text=_inserted(lines, edit.hunks)))
    else:
        tree.remove(edit.path)
        if edit.verb == "rename":
            tree.put(edit.to, node)
    return []


def _inserted(lines: list[bytes], hunks: Iterable[Hunk]) -> bytes:
    added = {hunk.after: hunk.text for hunk in hunks}
    numbered = enumerate([b"", *lines])
    return b"".join(line + added.get(number, b"") for number, line in numbered)
