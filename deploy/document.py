"""YAML text to nodes that know where they stand; every scalar stays the text that was typed.

`read` is this module's face. It knows YAML and its traps, and nothing of what a manifest holds: no
scalar becomes a number, a truth value or a date here, so `3.10`, `no`, `0644` and `1e10` survive.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from deploy.agent.words import printable
from deploy.errors import BadValues
from deploy.regular import read_regular

# What a description typed by a person never needs, and what a hostile one is made of. They bound
# time as well as memory: the reader of YAML is pure Python.
SIZE_LIMIT = 256 * 1024  # bytes
DEPTH_LIMIT = 32
NODE_LIMIT = 20_000  # aliases count as what they stand for
KEY_LIMIT = 500  # characters; other YAML readers stop at 1024
SHOWN_LIMIT = 50  # faults in one message

# Tabs look like spaces, a lone CR is a line break to some readers only, and the rest cannot be seen
# or reorders what is seen.
_UNSEEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\uffff]"
)
# Only an escape can bring one in. No UTF-8 can hold it, so nothing could be made from it.
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a file; both count from 1, the column in characters."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Text:
    """A scalar as typed, quotes and escapes resolved, nothing else."""

    at: Place
    value: str


@dataclass(frozen=True, slots=True)
class List:
    at: Place
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Map:
    """A mapping in the order typed, merge keys applied. `entries`: key -> (key node, value)."""

    at: Place
    entries: dict[str, tuple[Text, Node]]


Node = Text | List | Map


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    line: int
    column: int
    message: str


@dataclass(slots=True)
class Faults:
    """Every fault of one file, found before any is raised."""

    file: str
    fix: str = "mend these lines"
    found: set[Fault] = field(default_factory=set)

    def add(self, at: Place, message: str) -> None:
        self.found.add(Fault(at.line, at.column, message))

    def raise_any(self) -> None:
        """Raise one BadValues that lists the faults in file order; return when there is none."""
        if not self.found:
            return
        faults = sorted(self.found)
        lines = [f"{self.file}:{f.line}:{f.column}: {f.message}" for f in faults[:SHOWN_LIMIT]]
        if len(faults) > SHOWN_LIMIT:
            lines.append(f"and {len(faults) - SHOWN_LIMIT} more")
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise BadValues(
            f"cannot use {self.file}: {count}",
            why="\n       ".join(lines),
            fix=self.fix,
        )


def read(path: Path, fix: str = "mend these lines") -> tuple[Node, Faults]:
    """Return the one document of a file, and the faults that do not hide its meaning.

    Raises BadValues when the file cannot be read, or is not one YAML document at all.
    """
    name = shown(path)
    return parse(_bytes(path, name), name, fix)


def parse(raw: bytes, file: str, fix: str = "mend these lines") -> tuple[Node, Faults]:
    """Like `read`, for bytes that are at hand; `file` is how messages call them."""
    faults = Faults(file, fix)
    text = _decoded(raw, faults)
    faults.raise_any()
    root = None
    try:
        root = _Composer(faults).compose(text)
    except _Stop:
        pass  # its fault is noted
    except yaml.MarkedYAMLError as err:
        _syntax_fault(err, faults)
    if root is None:
        faults.raise_any()
        raise AssertionError("a document without a root has a fault")
    return root, faults


def shown(path: Path) -> str:
    """Return `path` as a person would type it: relative when it lies below the current folder."""
    try:
        short = os.path.relpath(path)
    except OSError:  # the current folder is gone
        return printable(str(path))
    return printable(str(path) if short.startswith("..") else short)


def _bytes(path: Path, name: str) -> bytes:
    try:
        return read_regular(path, SIZE_LIMIT)
    except OSError as err:
        raise _unreadable(name, str(err.strerror)) from err


def _unreadable(name: str, why: str) -> BadValues:
    return BadValues(f"cannot read {name}", why=why, fix="name a file written by a person, in YAML")


def _decoded(raw: bytes, faults: Faults) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as err:
        before = raw[: err.start].decode("utf-8")
        message = f"byte 0x{raw[err.start]:02x} is not UTF-8; save the file as UTF-8"
        faults.add(_place(before, len(before)), message)
        return ""
    text = text.replace("\r\n", "\n")
    for match in _UNSEEN.finditer(text):
        faults.add(_place(text, match.start()), _unseen(match.group(), match.start()))
        if len(faults.found) > SHOWN_LIMIT:
            break
    return text


def _place(text: str, index: int) -> Place:
    start = text.rfind("\n", 0, index) + 1
    return Place(text.count("\n", 0, index) + 1, index - start + 1)


def _unseen(char: str, index: int) -> str:
    if char == "\t":
        return 'a tab; use spaces, or "\\t" inside double quotes'
    if char == "\ufeff" and index == 0:
        return "a byte order mark; save the file as UTF-8 without BOM"
    return (
        f'the control or invisible character U+{ord(char):04X}; write "\\u{ord(char):04x}" if meant'
    )


def _syntax_fault(err: yaml.MarkedYAMLError, faults: Faults) -> None:
    mark = err.problem_mark or err.context_mark
    at = _at(mark) if mark else Place(1, 1)
    since = ""
    if err.context and err.context_mark and err.context_mark.line + 1 != at.line:
        since = f" ({err.context} that began in line {err.context_mark.line + 1})"
    faults.add(at, printable(f"not YAML: {err.problem or err.context}{since}"))


def _at(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)


class _Stop(Exception):
    """A fault after which reading on would be costly or tell nothing."""


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not been seen. `weight` counts nodes, aliases expanded."""

    event: yaml.CollectionStartEvent
    children: list[tuple[Node, bool]] = field(default_factory=list)  # node, is it a plain `<<`
    weight: int = 1


class _Composer:
    """Events to nodes, with bounds. PyYAML's own composer lets the last duplicate key win."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.anchors: dict[str, tuple[Node, int] | None] = {}  # None: still open
        self.stack: list[_Open] = []
        self.total = 0
        self.root: Node | None = None

    def compose(self, text: str) -> Node | None:
        documents = 0
        for event in self._events(text):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._stop(_at(event.start_mark), "a second document; one file holds one")
            self._step(event)
        if self.root is None:
            self.faults.add(Place(1, 1), "the file is empty")
        return self.root

    def _events(self, text: str) -> Iterator[yaml.Event]:
        loader = yaml.SafeLoader(text)
        while True:
            try:
                if not loader.check_event():
                    return
                event = loader.get_event()  # type: ignore[no-untyped-call]
            except ValueError as err:  # PyYAML's own: \U00110000, a version of 5,000 digits
                self._stop(_at(loader.get_mark()), f"not YAML: a number too large ({err})")
            yield event

    def _step(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.ScalarEvent):
            self._refuse_tag(event)
            node = Text(_at(event.start_mark), event.value)
            if _SURROGATE.search(event.value):
                self.faults.add(node.at, "half a character (\\ud800 to \\udfff); write it whole")
            self._anchor(event, node, 1)
            self._place(node, 1, merge=event.style is None and event.value == "<<")
        elif isinstance(event, yaml.CollectionStartEvent):
            self._open(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._close()

    def _open(self, event: yaml.CollectionStartEvent) -> None:
        self._refuse_tag(event)
        if len(self.stack) >= DEPTH_LIMIT:
            self._stop(_at(event.start_mark), f"more than {DEPTH_LIMIT} levels deep")
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self.stack.append(_Open(event))
        self._count(1, event)

    def _close(self) -> None:
        done = self.stack.pop()
        at = _at(done.event.start_mark)
        node: Node
        if isinstance(done.event, yaml.SequenceStartEvent):
            node = List(at, tuple(child for child, _ in done.children))
        else:
            node = Map(at, _Entries(self.faults).of(done.children))
        self._anchor(done.event, node, done.weight)
        self._attach(node, done.weight, merge=False)

    def _alias(self, event: yaml.AliasEvent) -> None:
        at, name = _at(event.start_mark), str(event.anchor)
        if name not in self.anchors:
            self._stop(at, f"the alias *{printable(name)} has no anchor before it")
        target = self.anchors[name]
        if target is None:
            self._stop(at, f"the alias *{printable(name)} stands inside what it names")
        self._place(target[0], target[1], merge=False, event=event)

    def _anchor(self, event: yaml.NodeEvent, node: Node, weight: int) -> None:
        if event.anchor is not None:
            self.anchors[event.anchor] = (node, weight)

    def _place(
        self, node: Node, weight: int, *, merge: bool, event: yaml.Event | None = None
    ) -> None:
        self._count(weight, event)
        self._attach(node, weight, merge=merge)

    def _attach(self, node: Node, weight: int, *, merge: bool) -> None:
        if self.stack:
            self.stack[-1].children.append((node, merge))
            self.stack[-1].weight += weight
        else:
            self.root = node

    def _count(self, weight: int, event: yaml.Event | None) -> None:
        # Nodes are shared, so an alias costs nothing yet; whoever walks the tree pays in full.
        self.total += weight
        if self.total > NODE_LIMIT:
            at = _at(event.start_mark) if event else Place(1, 1)
            self._stop(at, f"more than {NODE_LIMIT:,} values, aliases counted as what they name")

    def _refuse_tag(self, event: yaml.NodeEvent) -> None:
        tag = getattr(event, "tag", None)
        if tag is not None:
            message = f"the tag {printable(tag)!r}; tags are not used here, every value is text"
            self.faults.add(_at(event.start_mark), message)

    def _stop(self, at: Place, message: str) -> NoReturn:
        self.faults.add(at, message)
        raise _Stop


@dataclass(slots=True)
class _Entries:
    """The children of a mapping, in turn key and value, to its entries."""

    faults: Faults
    own: dict[str, tuple[Text, Node]] = field(default_factory=dict)
    merge_at: Place | None = None
    merged: list[Map] = field(default_factory=list)

    def of(self, children: list[tuple[Node, bool]]) -> dict[str, tuple[Text, Node]]:
        for (key, merge), (value, _) in zip(children[::2], children[1::2], strict=True):
            if not isinstance(key, Text):
                self.faults.add(key.at, "a key must be text")
            elif len(key.value) > KEY_LIMIT:
                self.faults.add(key.at, f"a key of more than {KEY_LIMIT} characters")
            elif merge:
                self._merge(key, value)
            else:
                self._own(key, value)
        return self.own | dict(self._inherited())

    def _own(self, key: Text, value: Node) -> None:
        first = self.own.setdefault(key.value, (key, value))[0]
        if first is not key:
            self._twice(key, first.at)

    def _merge(self, key: Text, value: Node) -> None:
        if self.merge_at is not None:
            self._twice(key, self.merge_at)
        self.merge_at = key.at
        for part in value.items if isinstance(value, List) else (value,):
            if isinstance(part, Map):
                self.merged.append(part)
            else:
                self.faults.add(key.at, "<< takes a mapping, or a list of mappings")

    def _twice(self, key: Text, first: Place) -> None:
        message = f"the key {printable(key.value)!r} stands here and in line {first.line}; keep one"
        self.faults.add(key.at, message)

    def _inherited(self) -> Iterator[tuple[str, tuple[Text, Node]]]:
        # What is typed beside `<<` wins over what it brings; of several, the first wins.
        seen = set(self.own)
        for part in self.merged:
            for name, entry in part.entries.items():
                if name not in seen:
                    seen.add(name)
                    yield name, entry
