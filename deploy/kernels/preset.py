"""Render CMakePresets.json from a file of kernels/, and put it into a source for one build.

A lone CMakeUserPresets.json was seen not to be read, and one in the source beside ours would be
read on top of it, so ours is always CMakePresets.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.errors import BadValues

FILE = "CMakePresets.json"
USER_FILE = "CMakeUserPresets.json"
# The newest version of the file that is written here, and the CMake that reads it.
VERSIONS = {1: "3.19", 2: "3.20", 3: "3.21", 4: "3.23", 5: "3.24", 6: "3.25", 7: "3.27", 8: "3.28"}


@dataclass(frozen=True, slots=True)
class Preset:
    """One rendered preset: `document` is the content of the file, `notes` go to the evidence."""

    name: str
    document: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        return json.dumps(self.document, indent=2, sort_keys=True) + "\n"

    @property
    def needs(self) -> str:
        """The oldest CMake that can read the file, like 3.21."""
        least = self.document.get("cmakeMinimumRequired", {})
        named = f"{least.get('major', 3)}.{least.get('minor', 0)}"
        by_version = VERSIONS.get(self.document.get("version", 0), named)
        return max(named, by_version, key=version_of)


def names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.json")))


def render(folder: Path, name: str, values: Mapping[str, str]) -> Preset:
    """Read kernels/NAME.json and put the values in; raise BadValues for any other name in @...@."""
    path = folder / f"{name}.json"
    if not path.is_file():
        raise BadValues(
            f"there is no preset {name!r}",
            why=f"{path} does not exist; there are: {', '.join(names(folder)) or 'none'}",
            fix="correct kernels.preset in the manifest, or write that file",
        )
    try:
        raw = json.loads(path.read_text("utf-8"))
        document = _filled(raw["preset"], values, path)
        notes = tuple(raw.get("notes", ()))
    except (ValueError, KeyError, TypeError) as err:
        raise BadValues(
            f"{path} is no preset of ours",
            why=f"{type(err).__name__}: {err}",
            fix="compare it with kernels/rocm-release.json",
        ) from err
    for row in document.get("buildPresets", ()):
        row["jobs"] = int(row["jobs"])
    return Preset(name, document, notes)


@contextmanager
def placed(preset: Preset, source: Path) -> Iterator[Path]:
    """Put the preset into `source` while a build runs, and give back the source's own file after.

    Raises:
        BadValues: the source already has a preset of that name, or a file that CMake cannot read.
    """
    path = source / FILE
    own = path.read_bytes() if path.exists() else None
    document = _merged(preset, path, own)
    _refuse_same_name(preset.name, source / USER_FILE)
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", "utf-8")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        if own is not None:
            path.write_bytes(own)


def _merged(preset: Preset, path: Path, own: bytes | None) -> Mapping[str, Any]:
    if own is None:
        return preset.document
    theirs = _read(path)
    _refuse_same_name(preset.name, path)
    merged = {**theirs, "version": max(theirs.get("version", 1), preset.document["version"])}
    for key in ("configurePresets", "buildPresets"):
        merged[key] = [*theirs.get(key, []), *preset.document.get(key, [])]
    return merged


def _refuse_same_name(name: str, path: Path) -> None:
    if not path.exists():
        return
    found = {
        row.get("name")
        for key in ("configurePresets", "buildPresets")
        for row in _read(path).get(key, [])
    }
    if name in found:
        raise BadValues(
            f"the source already has a preset named {name}",
            why=f"{path.name} of the head commit defines it; CMake refuses one name in two places",
            fix="rename it there, or set kernels.preset to another file of kernels/",
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict) or not isinstance(found.get("version"), int):
            raise ValueError("it is no object with a version")
        if found["version"] not in VERSIONS:
            raise ValueError(f"version {found['version']} of the file is not known")
    except ValueError as err:
        raise BadValues(
            f"the source's {path.name} cannot be read",
            why=str(err),
            fix=f"correct or remove {path.name} in the head commit",
        ) from err
    return found


def _filled(node: Any, values: Mapping[str, str], path: Path) -> Any:
    if isinstance(node, dict):
        return {key: _filled(child, values, path) for key, child in node.items()}
    if isinstance(node, list):
        return [_filled(child, values, path) for child in node]
    if isinstance(node, str):
        return re.sub(r"@([A-Z_]+)@", lambda m: _value(m[1], values, path), node)
    return node


def _value(name: str, values: Mapping[str, str], path: Path) -> str:
    if name not in values:
        raise BadValues(
            f"{path} uses @{name}@",
            why=f"a build has no such value; there are: {', '.join(sorted(values))}",
            fix="correct the name in that file",
        )
    # CMake expands $env{} and ${} in presets; a folder's name must stay what it is.
    return values[name].replace("$", "${dollar}")


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
