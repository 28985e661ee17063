"""The types a field of a described file can have: how it is read, and how its schema says it.

A `Kind` turns a node into a value or notes a fault at the node's place; it never raises. Scalars
arrive as text and are parsed here by strict rules; nothing depends on what a YAML reader guesses.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

from deploy.agent.words import printable
from deploy.document import Faults, List, Map, Node, Text


class _Bad:
    """What a kind returns for a node it noted a fault on."""

    def __repr__(self) -> str:
        return "BAD"


BAD: Final = _Bad()
REQUIRED: Final = dataclasses.MISSING
Json = dict[str, Any]


class Kind(Protocol):
    """One type of field. `read` returns BAD after it has noted a fault."""

    def read(self, node: Node, faults: Faults) -> Any: ...

    def schema(self) -> Json: ...


@dataclass(frozen=True, slots=True)
class Scalar:
    """Text of one form. `parse` raises ValueError with what is wrong beyond the pattern."""

    what: str  # as an error calls it: "a port (1 to 65535)"
    pattern: str  # the whole text must match
    parse: Callable[[str], Any] = str
    hint: Callable[[str], str] = lambda _: ""  # a remedy for a text that is nearly right

    def read(self, node: Node, faults: Faults) -> Any:
        if not isinstance(node, Text):
            faults.add(node.at, f"expected {self.what}, found {_what(node)}")
            return BAD
        try:
            return self.value(node.value)
        except ValueError as err:
            faults.add(node.at, str(err))
            return BAD

    def value(self, text: str) -> Any:
        """Return the parsed text. Raises ValueError with a message for a person."""
        if re.fullmatch(self.pattern, text) is None:
            raise ValueError(f"expected {self.what}, found {shown(text)}{self._remedy(text)}")
        try:
            return self.parse(text)
        except ValueError as err:
            raise ValueError(f"expected {self.what}, found {shown(text)}: {err}") from None

    def schema(self) -> Json:
        # Editors resolve plain scalars before they look here, so a number is let through: what was
        # typed is judged by this module alone. A pattern binds strings only.
        kinds = ["string", "number", "boolean", "null"]
        return {"type": kinds, "pattern": f"^(?:{self.pattern})$", "description": self.what}

    def _remedy(self, text: str) -> str:
        found = self.hint(text)
        return f"; {found}" if found else ""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words; `words` maps each to its value."""

    words: Mapping[str, Any]

    def read(self, node: Node, faults: Faults) -> Any:
        expected = f"expected one of {', '.join(self.words)}"
        if not isinstance(node, Text):
            faults.add(node.at, f"{expected}, found {_what(node)}")
            return BAD
        if node.value not in self.words:
            meant = did_you_mean(node.value, self.words)
            faults.add(node.at, f"{expected}, found {shown(node.value)}{meant}")
            return BAD
        return self.words[node.value]

    def schema(self) -> Json:
        values: list[Any] = list(self.words)
        if set(self.words.values()) == {True, False}:
            values += [True, False]
        return {"enum": values}


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list to a tuple, in the order typed. One bare value is not taken for a list of one."""

    item: Kind
    least: int = 0
    unique: bool = True

    def read(self, node: Node, faults: Faults) -> Any:
        if not isinstance(node, List):
            faults.add(node.at, f"expected a list, found {_what(node)}")
            return BAD
        if len(node.items) < self.least:
            faults.add(node.at, f"expected a list of at least {self.least}")
        values = [self.item.read(child, faults) for child in node.items]
        for i, value in enumerate(values):
            if self.unique and value is not BAD and value in values[:i]:
                faults.add(node.items[i].at, "stands in this list twice")
        return BAD if any(value is BAD for value in values) else tuple(values)

    def schema(self) -> Json:
        found: Json = {"type": "array", "items": self.item.schema()}
        if self.least:
            found["minItems"] = self.least
        return found | ({"uniqueItems": True} if self.unique else {})


@dataclass(frozen=True, slots=True)
class MapOf:
    """A mapping whose keys the user chooses; read-only and sorted by key, so order never counts."""

    key: Scalar
    value: Kind
    least: int = 0

    def read(self, node: Node, faults: Faults) -> Any:
        if not isinstance(node, Map):
            faults.add(node.at, f"expected a mapping, found {_what(node)}")
            return BAD
        if len(node.entries) < self.least:
            faults.add(node.at, f"expected at least {self.least} entries")
        pairs = [
            (self.key.read(name, faults), self.value.read(child, faults))
            for name, child in node.entries.values()
        ]
        if any(name is BAD or value is BAD for name, value in pairs):
            return BAD
        return frozen_map(pairs)

    def schema(self) -> Json:
        return {
            "type": "object",
            "propertyNames": {"pattern": f"^(?:{self.key.pattern})$"},
            "additionalProperties": self.value.schema(),
        } | ({"minProperties": self.least} if self.least else {})


@dataclass(frozen=True, slots=True)
class Either:
    """A list form or a mapping form; `unify` makes both one value."""

    as_list: ListOf
    as_map: MapOf
    from_list: Callable[[Any], Any]
    from_map: Callable[[Any], Any]

    def read(self, node: Node, faults: Faults) -> Any:
        if isinstance(node, Text):
            faults.add(node.at, f"expected a list or a mapping, found {_what(node)}")
            return BAD
        if isinstance(node, List):
            found, unify = self.as_list.read(node, faults), self.from_list
        else:
            found, unify = self.as_map.read(node, faults), self.from_map
        return BAD if found is BAD else unify(found)

    def schema(self) -> Json:
        return {"anyOf": [self.as_list.schema(), self.as_map.schema()]}


@dataclass(frozen=True, slots=True)
class Record:
    """A mapping with known keys, to a frozen dataclass whose fields were made by `key`.

    A class may have `rules(found) -> iterable of (key, message)`: what fields must be to each
    other. `found` maps the keys that were typed to their values, BAD where one has a fault.
    """

    cls: type[Any]

    def read(self, node: Node, faults: Faults) -> Any:
        if not isinstance(node, Map):
            faults.add(node.at, f"expected {self._sketch()}, found {_what(node)}")
            return BAD
        before = len(faults.found)
        known = {f.name: f for f in dataclasses.fields(self.cls) if "kind" in f.metadata}
        found: dict[str, Any] = {}
        for name, (typed, child) in node.entries.items():
            if name in known:
                found[name] = known[name].metadata["kind"].read(child, faults)
            else:
                meant = did_you_mean(name, set(known) - set(node.entries) or known)
                faults.add(typed.at, f"unknown key {shown(name)}{meant or self._list(known)}")
        for name, spec in known.items():
            if name not in found and _is_required(spec):
                faults.add(node.at, f"the key {name!r} is missing: {spec.metadata['doc']}")
        for name, message in self._rules(found):
            faults.add(node.entries[name][0].at if name in node.entries else node.at, message)
        bad = len(faults.found) > before or any(value is BAD for value in found.values())
        return BAD if bad else self.cls(**found)

    def schema(self) -> Json:
        known = [f for f in dataclasses.fields(self.cls) if "kind" in f.metadata]
        properties = {}
        for spec in known:
            inner = dict(spec.metadata["kind"].schema())
            form = inner.get("description", "")
            inner["description"] = spec.metadata["doc"] + (f" ({form})" if form else "")
            properties[spec.name] = inner
        found: Json = {
            "type": "object",
            "description": (self.cls.__doc__ or "").split("\n")[0],
            "properties": properties,
            "additionalProperties": False,
        }
        if required := [f.name for f in known if _is_required(f)]:
            found["required"] = required
        return found | getattr(self.cls, "SCHEMA_EXTRA", {})

    def _rules(self, found: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
        rules = getattr(self.cls, "rules", None)
        return tuple(rules(found)) if rules else ()

    def _sketch(self) -> str:
        names = [f.name for f in dataclasses.fields(self.cls) if _is_required(f)]
        return f"a mapping with {', '.join(names)}" if names else "a mapping"

    def _list(self, known: Iterable[str]) -> str:
        return f"; known are {', '.join(known)}"


def key(kind: Kind, doc: str, default: Any = REQUIRED) -> Any:
    """Declare a field of a Record: its kind, what it is for, and its value when not typed."""
    about = {"kind": kind, "doc": doc, "default": default}
    if default is EMPTY:  # not hashable before Python 3.12, so taken for a mutable default
        return dataclasses.field(default_factory=lambda: EMPTY, metadata=about)
    return dataclasses.field(default=default, metadata=about)


def frozen_map(pairs: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    return MappingProxyType(dict(sorted(pairs)))


EMPTY: Final[Mapping[str, Any]] = frozen_map(())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for a word that resembles a known one, else nothing."""
    import difflib

    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def plain(value: Any) -> Any:
    """Return a value of these kinds as JSON would hold it; fields at their default are left out.

    So a new field with a default, or a default spelled out, changes the meaning of nothing.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(_told(value))
    if isinstance(value, Mapping):
        return {name: plain(child) for name, child in sorted(value.items())}
    if isinstance(value, tuple):
        return [plain(child) for child in value]
    return value


def _told(value: Any) -> Iterator[tuple[str, Any]]:
    for spec in dataclasses.fields(value):
        found = getattr(value, spec.name)
        if found != spec.metadata.get("default", REQUIRED):
            yield spec.name, plain(found)


def _is_required(spec: dataclasses.Field[Any]) -> bool:
    return spec.metadata.get("default") is REQUIRED


def _what(node: Node) -> str:
    if isinstance(node, Text):
        return shown(node.value)
    return "a list" if isinstance(node, List) else "a mapping"


def shown(text: str) -> str:
    if not text:
        return "nothing"
    short = text if len(text) <= 80 else f"{text[:77]}..."
    return f"'{printable(short)}'"


# --- the scalars --------------------------------------------------------------------------------

# Printable text without line breaks. The reader of the document already refused what cannot be
# seen; an escape in double quotes could still bring it in.
_SEEN = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]"
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TIMES = {"s": 1, "m": 60, "h": 3600}


def _integer(text: str, least: int, most: int) -> int:
    if not least <= int(text) <= most:
        raise ValueError(f"it must lie between {least} and {most}")
    return int(text)


def whole(what: str, least: int, most: int) -> Scalar:
    """A whole number, decimal, without sign, leading zero or separator."""
    return Scalar(
        f"{what} ({least} to {most})", "0|[1-9][0-9]{0,17}", lambda t: _integer(t, least, most)
    )


def _relative(text: str) -> str:
    parts = text.split("/")
    if text.startswith("/"):
        raise ValueError("it must not begin with '/'")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError("no part of it may be empty, '.' or '..'")
    if any(len(part.encode()) > 255 for part in parts):
        raise ValueError("a name in it has more than 255 bytes")
    return text


def _absolute(text: str) -> str:
    if text != "/":
        _relative(text[1:])
    return text


def _glob(text: str) -> str:
    if text.startswith("!"):
        raise ValueError("globs cannot be negated; use `ignore` with a reason")
    if any("**" in part and part != "**" for part in text.split("/")):
        raise ValueError("'**' must stand alone between slashes")
    return _relative(text)


def _mode_hint(text: str) -> str:
    if text in ("644", "755"):
        return f"write 0{text}"
    if text in ("0o644", "0o755", "420", "493"):
        return "write 0644 or 0755, four octal digits"
    return ""


def _hex_hint(text: str) -> str:
    if re.fullmatch("[0-9A-Fa-f]{40}|[0-9A-Fa-f]{64}", text) and text != text.lower():
        return "write it in lower case"
    if re.fullmatch("[0-9a-f]{64}", text):
        return "64 digits are an id of a SHA-256 repository, which is not supported"
    if re.fullmatch("[0-9a-f]{4,39}", text):
        return f"this one has {len(text)}; `git rev-parse {text}` gives the whole id"
    if re.fullmatch("[A-Za-z][A-Za-z0-9._/-]*", text):
        return "a branch or tag moves; `git rev-parse` gives the id"
    return ""


def _arch_hint(text: str) -> str:
    if re.fullmatch(r"gfx[0-9a-f]+(:[a-z]+[+-])+", text):
        return f"write {text.partition(':')[0]}: a list with features filters to nothing"
    if re.search("[,; ]", text):
        return "exactly one; more than one would put code for another card into the binary"
    return ""


TEXT = Scalar("text on one line", f"{_SEEN}+")
ANY_TEXT = Scalar("text on one line, or nothing", f"{_SEEN}*")
SWITCH = Choice(_WORDS)
MODE = Scalar("a file mode, 0644 or 0755", "0644|0755", hint=_mode_hint)
COMMIT = Scalar("a commit id of 40 lower-case hex digits", "[0-9a-f]{40}", hint=_hex_hint)
SHA256 = Scalar(
    "a sha256 of 64 lower-case hex digits",
    "[0-9a-f]{64}",
    hint=lambda t: "write it in lower case" if re.fullmatch("[0-9A-Fa-f]{64}", t) else "",
)
PORT = whole("a port", 1, 65535)
COUNT = whole("a count", 1, 1_000_000_000)
BYTES = whole("a count of bytes", 0, 10**17)
ABSOLUTE = Scalar("an absolute path", f"/{_SEEN}*", _absolute)
RELATIVE = Scalar("a relative path below its folder", f"{_SEEN}+", _relative)
FOLDER = Scalar("a path", f"{_SEEN}+")
GLOB = Scalar("a glob of relative paths (*, ?, **)", f"{_SEEN}+", _glob)
VERSION = Scalar(
    "a version like 0.18.1", r"[0-9]+(\.[0-9]+)*((a|b|rc|\.post|\.dev)[0-9]+)*(\+[A-Za-z0-9.]+)?"
)
NAME = Scalar("a name of a-z, 0-9, '.', '_', '-'", "[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
DIST = Scalar("a distribution's name", "[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
IDENTIFIER = Scalar("a Python name", "[A-Za-z_][A-Za-z0-9_]*")
MODULE = Scalar("a dotted Python name", r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
ENV_NAME = Scalar("an environment variable's name", "[A-Za-z_][A-Za-z0-9_]*")
ARCH = Scalar("one bare arch like gfx936", "gfx[0-9]+[0-9a-f]*", hint=_arch_hint)
IMAGE = Scalar("an image reference", "[A-Za-z0-9][A-Za-z0-9._/:@-]*")
PLATFORM = Scalar("a platform like linux/amd64", "[a-z0-9]+/[a-z0-9]+(/[a-z0-9]+)?")
TAG = Scalar("a tag of letters, digits, '_', '.'", "[A-Za-z0-9_.]+")
SIZE = Scalar(
    "a size in bytes, or with K, M, G, T for powers of 1024",
    "[1-9][0-9]{0,15}[KMGT]?",
    lambda t: int(t.rstrip("KMGT")) * _SIZES[t.lstrip("0123456789")],
)
DURATION = Scalar(
    "a duration like 90s, 15m or 2h",
    "[1-9][0-9]{0,7}[smh]",
    lambda t: int(t[:-1]) * _TIMES[t[-1]],
    hint=lambda t: f"say the unit: {t}s" if t.isdigit() else "",
)
