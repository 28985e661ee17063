"""A base image that is a pinned wheel's tree on nothing: for comparing ids anywhere, not to run.

It needs neither an engine nor a registry, so a lock made from it is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy import wheel as wheels
from deploy.wheel import Wheel

from .base import Seen
from .beside import beside
from .config import DEFAULT_PATH, Added, Base, Descriptor, config_document, sha256
from .layer import SLICE, Entry, Layer, confirm, write_layer

# A wheel has no clock that may be used, and engines take 1970 for "never": the first year of a zip.
EPOCH = 315_532_800
# Marks the base in an engine, and all that stands on it; its value is the wheel's sha256.
LABEL = "dcu-bundle.base"
_NOTE = Added(note="the tree of a wheel")
_ENCODER = "plain/1"


class EntryFiles:
    """Looks into a layer that was not written yet: its entries are all there is."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = {"/" + entry.path: entry for entry in entries}
        self._folders: dict[str, set[str]] = {"/": set()}
        for path in self._entries:
            below = path
            while below != "/":
                folder, _, name = below.rpartition("/")
                below = folder or "/"
                self._folders.setdefault(below, set()).add(name)

    def look(self, path: str) -> Seen:
        entry = self._entries.get(path)
        if entry is None:
            return Seen(kind="folder", mode=0o755) if path in self._folders else Seen()
        return Seen(kind="file", mode=entry.mode, size=entry.length, sha256=_hash(entry))

    def names(self, folder: str) -> tuple[str, ...]:
        return tuple(sorted(self._folders.get(folder, ())))

    def other(self, folder: str, known: Collection[str]) -> str:
        return next((name for name in self.names(folder) if name not in known), "")


@dataclass(frozen=True, slots=True)
class Plain:
    """The base: what it is, what it holds, and the layer's entries."""

    base: Base
    files: EntryFiles
    entries: tuple[Entry, ...]

    def write(self, path: Path) -> Layer:
        """Write the layer's tar to `path`."""
        with path.open("wb") as out:
            layer = write_layer(self.entries, out, epoch=EPOCH)
        with path.open("rb") as again:
            confirm(self.entries, again)
        return Layer(diff_id=layer.diff_id, size=layer.size, entries=layer.entries, path=path)

    @property
    def config(self) -> bytes:
        """The base's own config, for an engine that does not hold it yet."""
        below = Base(diff_ids=(), architecture=self.base.architecture, config=self.base.config)
        return config_document(below, self.base.diff_ids[0], _NOTE, epoch=EPOCH)


@contextmanager
def plain(wheel: Wheel, site: str, cache: Path, platform: str = "linux/amd64") -> Iterator[Plain]:
    """The base whose `site` holds exactly the wheel; its digest is kept in `cache` by the wheel's.

    Raises:
        StaleLock: the wheel holds what must not be there.
    """
    with wheels.files(wheel) as found:
        entries = tuple(
            Entry(path=f"{site}/{path}".lstrip("/"), mode=mode, size=size, source=source)
            for path, mode, size, source in found
        )
        digest, size = _layer(wheel, site, cache, entries)
        base = Base(
            diff_ids=(digest,),
            architecture=platform.split("/")[1],
            config={"Env": [DEFAULT_PATH], "Labels": {LABEL: wheel.sha256}},
            layers=(Descriptor(digest=digest, size=size),),
        )
        yield Plain(base, EntryFiles(entries), entries)


def _layer(wheel: Wheel, site: str, cache: Path, entries: Sequence[Entry]) -> tuple[str, int]:
    key = sha256(json.dumps([_ENCODER, wheel.sha256, site]).encode())
    file = cache / f"plain-{key}.json"
    try:
        digest, size = json.loads(file.read_text())
        return str(digest), int(size)
    except (OSError, ValueError, TypeError):
        pass
    with open(os.devnull, "wb") as nowhere:
        layer = write_layer(entries, nowhere, epoch=EPOCH)
    with beside(file) as new:
        new.write_text(json.dumps([layer.diff_id, layer.size]))
    return layer.diff_id, layer.size


def _hash(entry: Entry) -> str:
    found = hashlib.sha256(entry.data)
    if entry.source is not None:
        with entry.source() as source:
            while piece := source.read(SLICE):
                found.update(piece)
    return found.hexdigest()
