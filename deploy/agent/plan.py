"""The plan as values: what must be true of every file below a site, and nothing of any one target.

`Plan.parse` is the only door in: whatever it lets through is safe to act on. The same type is
built by `deploy.plan` on the operator's machine and parsed by the agent: one way for the data.

The values are named tuples, not dataclasses: importing `dataclasses` would cost a verify a tenth of
its time. Build them with keywords.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .words import BundleError, Exit, digest

SCHEMA = "plan/1"
FILE_MODES = ("0644", "0755")
# What nobody may plan to write: the agent's own records, and bytecode, which is always derived.
RESERVED = (".dcu-bundle", "__pycache__")


class BadPlan(BundleError):
    exit = Exit.STALE


def _bad(why: str) -> BadPlan:
    return BadPlan(
        "the plan in this bundle is not usable",
        why=why,
        fix="make the bundle again with `./inv bundle`; if it came from elsewhere, do not run it",
    )


def checked_path(text: object) -> str:
    """Return `text` if it is a relative POSIX path that stays below its root and names a file.

    Containment through links on the target is the tree's business; this is the lexical half.
    """
    if not isinstance(text, str) or not text:
        raise _bad(f"a path must be a non-empty text, found {text!r}")
    parts = text.split("/")
    if "\0" in text or any(part in ("", ".", "..") for part in parts):
        raise _bad(f"the path {text!r} is absolute or leaves its folder")
    if any(part in RESERVED for part in parts):
        raise _bad(f"the path {text!r} lies in a folder that belongs to the agent or to Python")
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
        raise _bad(f"the path {text!r} has a name of more than 255 bytes")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise _bad(f"the path {text!r} is not UTF-8") from err
    return text


class State(NamedTuple):
    """What is, or must be, at one path: a file, a link, or nothing.

    `mode` is four octal digits; of an assumed state it is information only, since git keeps no more
    than the execute bit. `size` is in bytes.
    """

    type: str = "absent"
    mode: str = ""
    sha256: str = ""
    size: int = 0
    link: str = ""

    @property
    def absent(self) -> bool:
        return self.type == "absent"

    def same_content(self, other: State) -> bool:
        """True when type and bytes (or link text) agree; the mode is not compared."""
        mine = (self.type, self.sha256, self.link)
        return mine == (other.type, other.sha256, other.link)

    def to_json(self) -> dict[str, Any]:
        if self.type == "file":
            return {
                "type": "file",
                "mode": self.mode,
                "sha256": self.sha256,
                "size": self.size,
            }
        if self.type == "link":
            return {"type": "link", "link": self.link}
        return {"type": "absent"}

    def shown(self) -> dict[str, Any]:
        """Return a state as it was found, which may be of a type that no plan can want."""
        return self.to_json() if self.type in ("file", "link", "absent") else {"type": self.type}

    @classmethod
    def parse(cls, raw: object, where: str) -> State:
        value = _record(raw, where)
        kind = value.get("type")
        if kind == "absent":
            _only(value, {"type"}, where)
            return cls()
        if kind == "link":
            _only(value, {"type", "link"}, where)
            return cls(type="link", link=_text(value, "link", where))
        if kind != "file":
            raise _bad(f"{where}: type must be file, link or absent, found {kind!r}")
        _only(value, {"type", "mode", "sha256", "size"}, where)
        mode, sha, size = value.get("mode"), value.get("sha256"), value.get("size")
        if not (isinstance(mode, str) and len(mode) == 4 and set(mode) <= set("01234567")):
            raise _bad(f"{where}: mode must be four octal digits, found {mode!r}")
        if not is_sha256(sha):
            raise _bad(f"{where}: sha256 must be 64 hex digits, found {sha!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise _bad(f"{where}: size must be a count of bytes, found {size!r}")
        return cls(type="file", mode=mode, sha256=str(sha), size=size)


ABSENT = State()


class PlannedFile(NamedTuple):
    """One path below the site: what must be there, and what may be there before.

    `assume` holds every state the target may show before the first deploy: usually the base
    commit's, plus vendor variants that were accepted by name. Anything else refuses the plan.
    """

    path: str
    want: State
    assume: tuple[State, ...]
    role: str = "data"  # "module" (a .py, compiled), "data", or "extension" (a shared object)

    @property
    def compiled(self) -> bool:
        """True when the service's interpreter must hold a pyc of this file."""
        return self.role == "module" and self.want.type == "file"

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "role": self.role,
            "want": self.want.to_json(),
            "assume": [state.to_json() for state in self.assume],
        }


class Extension(NamedTuple):
    """One compiled module that must load, and the ops it must register (name -> schema or "")."""

    module: str
    namespace: str
    ops: Mapping[str, str] = MappingProxyType({})

    def to_json(self) -> dict[str, Any]:
        return {"module": self.module, "namespace": self.namespace, "ops": dict(self.ops)}


class Plan(NamedTuple):
    """What must be true on a target. `files` are sorted by path and unique.

    `python`, `site`, `env_script` and `launch_dir` are the manifest's absolute paths as seen from
    the target's root; a request may override them for one host, and the evidence then shows it.
    """

    name: str
    package: str
    python: str
    site: str
    env_script: str = ""
    launch_dir: str = ""
    requires: Mapping[str, str] = MappingProxyType({})
    files: tuple[PlannedFile, ...] = ()
    extensions: tuple[Extension, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "name": self.name,
            "package": self.package,
            "python": self.python,
            "site": self.site,
            "env_script": self.env_script,
            "launch_dir": self.launch_dir,
            "requires": dict(self.requires),
            "files": [entry.to_json() for entry in self.files],
            "extensions": [entry.to_json() for entry in self.extensions],
        }

    @property
    def digest(self) -> str:
        """The identity `plan`."""
        return digest(self.to_json())

    @property
    def payload(self) -> str:
        """The identity `payload`: the plan and the blobs it carries."""
        return digest({"plan": self.digest, "blobs": list(self.blobs())})

    @property
    def tree(self) -> str:
        """The identity `tree` that a target must show once the plan is true."""
        return tree_digest((entry.path, entry.want) for entry in self.files)

    def blobs(self) -> tuple[str, ...]:
        """The sha256 of every file content the plan needs, sorted, each once."""
        return tuple(sorted({e.want.sha256 for e in self.files if e.want.type == "file"}))

    @classmethod
    def parse(cls, raw: object) -> Plan:
        """Build a plan from untrusted JSON; raise BadPlan on the first thing that is not right."""
        value = _record(raw, "plan")
        if value.get("schema") != SCHEMA:
            raise _bad(f"schema is {value.get('schema')!r}, this agent speaks {SCHEMA}")
        files = tuple(_planned_file(item, i) for i, item in enumerate(_list(value, "files")))
        paths = [entry.path for entry in files]
        if paths != sorted(set(paths)):
            raise _bad("the files are not sorted, or one path stands there twice")
        _no_file_is_a_folder(files)
        requires = _record(value.get("requires", {}), "requires")
        return cls(
            name=_text(value, "name", "plan"),
            package=_text(value, "package", "plan"),
            python=_absolute(value, "python"),
            site=_absolute(value, "site"),
            env_script=_absolute(value, "env_script", optional=True),
            launch_dir=_absolute(value, "launch_dir", optional=True),
            requires={str(k): str(v) for k, v in requires.items()},
            files=files,
            extensions=tuple(_extension(item) for item in _list(value, "extensions")),
        )


def tree_digest(rows: Iterator[tuple[str, State]]) -> str:
    """Return the identity `tree`: path, type, mode, sha256 and link of every path we own."""
    table = sorted([p, s.type, s.mode, s.sha256, s.link] for p, s in rows)
    return digest(table)


def is_sha256(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")


def _planned_file(raw: object, index: int) -> PlannedFile:
    where = f"files[{index}]"
    value = _record(raw, where)
    _only(value, {"path", "role", "want", "assume"}, where)
    path = checked_path(value.get("path"))
    role = value.get("role")
    if role not in ("module", "data", "extension"):
        raise _bad(f"{where}: role must be module, data or extension, found {role!r}")
    want = State.parse(value.get("want"), f"{where} want")
    if want.type == "file" and want.mode not in FILE_MODES:
        raise _bad(f"{where}: mode must be one of {', '.join(FILE_MODES)}, found {want.mode!r}")
    if want.type == "link":
        _check_link(path, want.link)
    assume = tuple(State.parse(item, f"{where} assume") for item in _list(value, "assume"))
    if not assume:
        raise _bad(f"{where}: it does not say what may be there before")
    return PlannedFile(path=path, role=role, want=want, assume=assume)


def _check_link(path: str, link: str) -> None:
    depth = path.count("/")
    for part in link.split("/"):
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            break
    if depth < 0 or link.startswith("/") or not link or "\0" in link:
        raise _bad(f"the link {path!r} -> {link!r} leads out of the site")


def _no_file_is_a_folder(files: tuple[PlannedFile, ...]) -> None:
    present = {entry.path for entry in files if not entry.want.absent}
    for path in sorted(present):
        parent = path
        while "/" in parent:
            parent = parent.rsplit("/", 1)[0]
            if parent in present:
                raise _bad(f"{parent!r} is planned as a file and as the folder of {path!r}")


def _extension(raw: object) -> Extension:
    value = _record(raw, "extension")
    ops = _record(value.get("ops", {}), "extension ops")
    return Extension(
        module=_text(value, "module", "extension"),
        namespace=_text(value, "namespace", "extension"),
        ops={str(k): str(v) for k, v in ops.items()},
    )


def _record(raw: object, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise _bad(f"{where} must be an object, found {type(raw).__name__}")
    return raw


def _list(value: Mapping[str, Any], key: str) -> list[Any]:
    found = value.get(key, [])
    if not isinstance(found, list):
        raise _bad(f"{key} must be a list, found {type(found).__name__}")
    return found


def _only(value: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(value) - known):
        raise _bad(f"{where} has unknown keys: {', '.join(unknown)}")


def _text(value: Mapping[str, Any], key: str, where: str) -> str:
    found = value.get(key)
    if not isinstance(found, str) or not found:
        raise _bad(f"{where}: {key} must be a non-empty text, found {found!r}")
    return found


def _absolute(value: Mapping[str, Any], key: str, optional: bool = False) -> str:
    found = value.get(key, "")
    if optional and found == "":
        return ""
    if not isinstance(found, str) or not found.startswith("/") or "\0" in found:
        raise _bad(f"{key} must be an absolute path, found {found!r}")
    if ".." in found.split("/"):
        raise _bad(f"{key} must not contain '..', found {found!r}")
    return found
