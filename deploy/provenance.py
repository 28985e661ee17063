"""Where every resolved value comes from: a line of the manifest, a default, the lock, a host.

`rows` is this module's face. It reads files; it resolves nothing and asks no target.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploy import document, inventory
from deploy import manifest as manifests
from deploy.document import Map, Node
from deploy.errors import StaleLock
from deploy.layout import Layout
from deploy.lock import check_fresh, read_lock

__all__ = ["Row", "rows"]

# What of a request a host may say differently from the manifest: key of hosts.yaml -> of ours.
_OVERRIDES = {
    "site": "base.site",
    "python": "base.python",
    "env_script": "base.env_script",
    "launch_dir": "launch.dir",
}


class Row(NamedTuple):
    """One value. `origin` is a place, "default", or the lock or host that says it."""

    name: str
    value: str
    origin: str


def rows(name: str, layout: Layout, targets: Sequence[str] = ()) -> list[Row]:
    """Return every value of a manifest, what its lock pins, and what hosts override.

    Raises:
        BadValues: the manifest, or hosts.yaml, has faults.
    """
    path = layout.manifest(manifests.choose(name, layout))
    found = manifests.load(path)
    root, _ = document.read(path)
    shown = document.shown(path)
    told = [
        Row(".".join(keys), _text(value), _origin(root, keys, shown))
        for keys, value in _leaves(found, ())
    ]
    told += _of_lock(layout.lock(found.name), found)
    return told + [row for target in targets for row in _of_host(target, layout)]


def _leaves(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value with the keys that lead to it, defaults included."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _leaves(child, (*keys, str(key)))
    else:
        yield keys, value


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if value is None or value in ("", {}, ()):
        return "(none)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _origin(root: Node, keys: tuple[str, ...], file: str) -> str:
    """Follow the keys as far as they were typed."""
    node = root
    for key in keys:
        if not isinstance(node, Map):
            break  # typed in another form than it is kept in: as a list, or as one text
        if key not in node.entries:
            return "default"
        node = node.entries[key][1]
    return f"{file}:{node.at.line}"


def _of_lock(path: Path, found: manifests.Manifest) -> list[Row]:
    if not path.exists():
        return [
            Row("lock", "(none)", f"{path.name} is not there: run `./inv lock -n {found.name}`")
        ]
    try:
        pinned = read_lock(path)
        check_fresh(pinned, found)
        state = "fresh: made from this manifest"
    except StaleLock as err:
        return [Row("lock", "stale", err.why.strip())]
    told = {"inputs": {**pinned.inputs}, "expect": {**pinned.expect}}
    for key in ("manifest", "files"):
        told["inputs"].pop(key, None)
    told["inputs"]["files"] = f"{len(pinned.inputs.get('files', ()))} changed paths"
    return [
        Row("lock", state, path.name),
        *(Row(".".join(k), _text(v), path.name) for k, v in _leaves(told, ())),
    ]


def _of_host(target: str, layout: Layout) -> list[Row]:
    kind, _, alias = target.partition(":")
    if kind != "ssh":
        return []
    path = inventory.path_of(layout, os.environ)
    known = inventory.load(path)
    origin = f"{path.name}, host {alias}"
    if alias not in known.hosts:
        return [Row(target, alias, "~/.ssh/config (hosts.yaml does not know it)")]
    overrides = known.host(alias).overrides()
    return [
        Row(target, known.host(alias).ssh, origin),
        *(Row(f"{target} {_OVERRIDES[k]}", value, origin) for k, value in overrides.items()),
    ]
