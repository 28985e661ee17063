"""hosts.yaml -> the machines that can be deployed to, by alias; every fault at its place at once.

An entry says how to reach a machine and where it departs from the manifest. It never reaches a
plan: what a host overrides travels in the request and shows in the evidence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from deploy import fields
from deploy.document import Map, Node, read
from deploy.errors import BadValues
from deploy.fields import ListOf, MapOf, Record, Scalar, key
from deploy.layout import Layout

FILE = "hosts.yaml"
ALIAS = Scalar("a host's alias", "[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# How a jump host is written in ProxyJump: an alias, or user@host:port.
HOP = Scalar("a jump host as ProxyJump names it", r"[A-Za-z0-9\[][A-Za-z0-9._@:%\[\]-]{0,250}")
SSH = Scalar("an ssh alias or [user@]host[:port]", r"[A-Za-z0-9_\[][A-Za-z0-9._@:%\[\]-]{0,250}")
FINGERPRINT = Scalar(
    "a fingerprint as `ssh-keygen -lf` prints it (SHA256: and 43 characters)",
    "SHA256:[A-Za-z0-9+/]{43}",
    hint=lambda t: "it has no '=' at its end" if t.endswith("=") else "",
)
DATE = Scalar("a date like 2026-01-31", "[0-9]{4}-[01][0-9]-[0-3][0-9]")
HOME = Scalar("an absolute path, or one that begins with ~/", r"(?:/|~/)[^\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One host key that a machine may show."""

    fingerprint: str = key(FINGERPRINT, "the key's fingerprint")
    since: str = key(DATE, "when it was pinned", "")
    reason: str = key(fields.TEXT, "why, for instance: rebuilt after the night's stop", "")


_KEYS = ListOf(Record(Key))


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine. Empty texts mean "as the manifest says"."""

    ssh: str = key(SSH, "how to reach it: an alias of ~/.ssh/config, or user@host:port", "")
    keys: tuple[Key, ...] = key(_KEYS, "its host keys; without any, known_hosts decides", ())
    site: str = key(fields.ABSOLUTE, "its site, where it is not the manifest's", "")
    python: str = key(fields.ABSOLUTE, "its service's interpreter", "")
    env_script: str = key(fields.ABSOLUTE, "its environment script", "")
    launch_dir: str = key(fields.ABSOLUTE, "its launch folder", "")
    root: str = key(fields.ABSOLUTE, "the folder that holds the target's tree", "/")
    state_dir: str = key(HOME, "a folder that outlives a rebuild, for contents already sent", "")
    sudo: bool = key(fields.SWITCH, "run the agent by `sudo -n`", default=False)

    def overrides(self) -> dict[str, str]:
        """What this host says differently from the manifest, for the request."""
        names = ("site", "python", "env_script", "launch_dir")
        return {name: value for name in names if (value := getattr(self, name))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """The host keys of a jump host."""

    keys: tuple[Key, ...] = key(_KEYS, "its host keys; without any, known_hosts decides", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The user's machines. Keep the file out of git: it names private addresses."""

    hosts: Mapping[str, Host] = key(MapOf(ALIAS, Record(Host)), "alias -> machine", fields.EMPTY)
    groups: Mapping[str, tuple[str, ...]] = key(
        MapOf(ALIAS, ListOf(ALIAS, least=1)), "group -> aliases", fields.EMPTY
    )
    jumps: Mapping[str, Jump] = key(
        MapOf(HOP, Record(Jump)), "jump host, as ProxyJump names it -> its keys", fields.EMPTY
    )

    @staticmethod
    def rules(found: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
        hosts, groups = found.get("hosts", {}), found.get("groups", {})
        if isinstance(hosts, Mapping) and isinstance(groups, Mapping):
            for name, members in groups.items():
                for alias in members:
                    if alias not in hosts:
                        meant = fields.did_you_mean(alias, hosts)
                        yield "groups", f"group {name!r} names {alias!r}, which is no host{meant}"

    def host(self, alias: str) -> Host:
        """Return the machine; one that is not listed is taken for an alias of ~/.ssh/config."""
        found = self.hosts.get(alias, Host())
        return found if found.ssh else replace(found, ssh=alias)

    def chosen(self, *, group: str = "", everyone: bool = False) -> tuple[str, ...]:
        """Return the aliases of a group, or of all hosts.

        Raises:
            BadValues: there is no such group, or no host at all.
        """
        if everyone and self.hosts:
            return tuple(self.hosts)
        if group in self.groups:
            return self.groups[group]
        meant = fields.did_you_mean(group, self.groups)
        none = "there are no hosts to choose"
        raise BadValues(
            none if everyone else f"there is no group {group!r}{meant}",
            why=f"{FILE} knows the groups: {', '.join(self.groups) or 'none'}; "
            f"the hosts: {', '.join(self.hosts) or 'none'}",
            fix=self._choose(),
        )

    def _choose(self) -> str:
        if self.hosts:
            groups = f"give --group with one of {', '.join(self.groups)}" if self.groups else ""
            hosts = f"name hosts: -t {','.join(f'ssh:{alias}' for alias in self.hosts)}"
            return f"{groups}{', or ' if groups else ''}{hosts}"
        # -n: a file that is there holds pinned keys, or what somebody began.
        return f"name your machines in {FILE}; `cp -n hosts.example.yaml {FILE}` begins one"

    def pins(self) -> dict[str, dict[str, str]]:
        """Return host or jump host -> fingerprint -> when and why it was pinned."""
        keys = {name: entry.keys for name, entry in self.hosts.items()}
        keys |= {name: entry.keys for name, entry in self.jumps.items()}
        return {name: {k.fingerprint: _told(k) for k in own} for name, own in keys.items()}


def load(path: Path) -> Inventory:
    """Read hosts.yaml; a file that is not there is an empty inventory.

    Raises:
        BadValues: every fault of the file, with line and column.
    """
    if not path.exists():
        return Inventory()
    node, faults = read(path, fix=f"mend {path.name}; hosts.example.yaml explains every key")
    found = Record(Inventory).read(node, faults)
    faults.raise_any()
    inventory: Inventory = found
    return inventory


def path_of(layout: Layout, environ: Mapping[str, str]) -> Path:
    """Return the inventory's path: $DCU_HOSTS, or hosts.yaml of this checkout."""
    return Path(environ.get("DCU_HOSTS") or layout.top / FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """The inventory after a key was pinned, and in words what was done for that."""

    inventory: Inventory
    done: str


def section_of(
    known: Inventory, name: str, *, aliases: Collection[str] = (), jumps: Collection[str] = ()
) -> str:
    """Return where the keys of a machine belong: below "hosts" or below "jumps".

    `aliases` and `jumps` are what the ssh configuration knows besides: patterns of Host lines, and
    jump hosts.

    Raises:
        BadValues: nobody knows this name, so a key of it would never be asked for.
    """
    if name in known.hosts:
        return "hosts"
    if name in known.jumps or name in jumps:
        return "jumps"
    if _is_alias(name) and any(fnmatchcase(name, pattern) for pattern in aliases):
        return "hosts"
    named = {
        f"hosts of {FILE}": known.hosts,
        "aliases of the ssh configuration": aliases,
        "jump hosts": {*known.jumps, *jumps},
    }
    told = "; ".join(f"{kind}: {', '.join(sorted(some)) or 'none'}" for kind, some in named.items())
    meant = fields.did_you_mean(name, {*known.hosts, *known.jumps, *aliases, *jumps})
    raise BadValues(
        f"no machine is called {name!r}{meant}",
        why=f"a key is pinned for a name that is used; known are {told}",
        fix=f"give one of these with -a; or first name the machine in {FILE}, and give that NAME:"
        f"\n       hosts:\n         NAME:\n           ssh: {name or 'ADDRESS'}",
    )


def trust(path: Path, name: str, new: Key, section: str = "") -> Trusted:
    """Pin one more key of a host or jump host, by adding lines to hosts.yaml; comments stay.

    `section` is what `section_of` says of the name. A key that is pinned already is left as it is.

    Raises:
        BadValues: the fingerprint or the date is none, or the file is written in a way that lines
            cannot be added to; the lines to type are then in the message.
    """
    _refuse_wrong(new)
    before = load(path)
    known = {k.fingerprint: k for k in _keys_of(before, name)}
    if new.fingerprint in known:
        return Trusted(inventory=before, done=_already(known[new.fingerprint], new, path))
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    section = section or ("hosts" if name not in before.jumps and _is_alias(name) else "jumps")
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(_with_key(text, path, section, name, new), encoding="utf-8")
        after = _load_or_none(beside)
        pinned = {k.fingerprint for k in _keys_of(after, name)} if after else set()
        if after is None or pinned != {*known, new.fingerprint}:
            raise _by_hand(path, section, name, new)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    joins = section == "hosts" and name not in before.hosts
    added = f"; added host {name} to {path.name}: --all now includes it" if joins else ""
    return Trusted(inventory=after, done=f"pinned {new.fingerprint}{added}")


def _already(old: Key, new: Key, path: Path) -> str:
    done = f"already pinned {new.fingerprint}; nothing was written"
    if new.reason in ("", old.reason):
        return done
    return f"{done}: its reason stays {old.reason or 'none'!r} (edit it in {path.name})"


def _refuse_wrong(new: Key) -> None:
    typed = [(FINGERPRINT, new.fingerprint), (DATE, new.since), (fields.TEXT, new.reason)]
    for kind, value in typed:
        try:
            if value or kind is FINGERPRINT:
                kind.value(value)
        except ValueError as err:
            raise BadValues(
                "cannot pin this key",
                why=str(err),
                fix="copy the fingerprint that `ssh-keygen -lf` printed on the target itself",
            ) from err


def _keys_of(inventory: Inventory, name: str) -> tuple[Key, ...]:
    entry = inventory.hosts.get(name) or inventory.jumps.get(name)
    return entry.keys if entry else ()


def _is_alias(name: str) -> bool:
    return re.fullmatch(ALIAS.pattern, name) is not None


def _load_or_none(path: Path) -> Inventory | None:
    try:
        return load(path)
    except BadValues:
        return None


def _with_key(text: str, path: Path, section: str, name: str, new: Key) -> str:
    """Return the file's text with the lines of one more key put in where they belong."""
    lines = text.splitlines()
    root = read(path)[0] if text.strip() else None
    at, added = len(lines), _nested((section, name, "keys"), new, 0)
    here: Node | None = root
    for depth, step in enumerate((section, name, "keys")):
        if not isinstance(here, Map) or step not in here.entries:
            break
        # Below `step`; what is new goes before its first child, at the child's indentation.
        here = here.entries[step][1]
        rest = (section, name, "keys")[depth + 1 :]
        at, added = here.at.line - 1, _nested(rest, new, here.at.column - 1)
    return "\n".join([*lines[:at], *added, *lines[at:]]) + "\n"


def _nested(steps: Sequence[str], new: Key, indent: int) -> list[str]:
    """The lines of a key below `steps`, the first of them indented by `indent`."""
    names = [step if _is_alias(step) else _quoted(step) for step in steps]
    told = {label: value for label in ("since", "reason") if (value := getattr(new, label))}
    margin = " " * (indent + 2 * len(steps))
    return [
        *(f"{' ' * (indent + 2 * depth)}{name}:" for depth, name in enumerate(names)),
        f"{margin}- fingerprint: {_quoted(new.fingerprint)}",
        *(f"{margin}  {label}: {_quoted(value)}" for label, value in told.items()),
    ]


def _quoted(text: str) -> str:
    # A JSON string is a YAML string, whatever stands in it.
    return json.dumps(text, ensure_ascii=False)


def _by_hand(path: Path, section: str, name: str, new: Key) -> BadValues:
    lines = "\n       ".join(_nested((section, name, "keys"), new, 0))
    return BadValues(
        f"cannot add a key to {path.name} by itself",
        why="it is not written one key a line there, so lines cannot be put in safely",
        fix=f"type it in yourself:\n       {lines}",
    )


def _told(key: Key) -> str:
    when = f"pinned {key.since}" if key.since else "pinned"
    return f"{when}, {key.reason}" if key.reason else when
