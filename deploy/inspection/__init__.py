"""What an organiser can check of a submission without a card: its bundle, or the whole folder.

`inspect` is this package's face: one row a check, in the order in which a person would ask. It runs
no code of the submission and changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from deploy import bundle as bundles
from deploy import manifest as manifests
from deploy.agent.words import printable
from deploy.errors import BadValues
from deploy.inspection.bundle import BUNDLE, MANIFEST, manifest_of
from deploy.inspection.folder import folder_rows
from deploy.inspection.rows import FAILED, NOTE, OK, STUMBLES, Row, run, why
from deploy.layout import HERE, Layout


def inspect(path: Path) -> list[Row]:
    """Check a bundle, or a folder that holds exactly one.

    Raises:
        BadValues: there is nothing to check.
    """
    if path.is_dir():
        found = sorted(path.glob("*.pyz"))
        if len(found) != 1:
            raise BadValues(
                f"{path} is no submission",
                why=f"it holds {len(found)} bundles (*.pyz), one is needed",
                fix="name the folder that is handed in, or the bundle itself",
            )
        return _rows(found[0], path)
    if not path.is_file():
        raise BadValues(
            "there is no submission to check",
            why=f"{path} is no file and no folder",
            fix="give --file with a bundle (NAME-<12 hex>.pyz), or the folder that is handed in",
        )
    return _rows(path)


def chosen(name: str = "", here: Path = Path(), layout: Layout = HERE) -> Path:
    """What is checked where no file is named: this folder, or the newest bundle of a manifest.

    Raises:
        BadValues: neither holds a bundle.
    """
    if not name and any(here.glob("*.pyz")):
        return here
    name = manifests.choose(name, layout)
    made = layout.out.glob(f"{name}-{'[0-9a-f]' * 12}.pyz")
    newest = max(made, key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        raise BadValues(
            "there is no submission to check",
            why=f"there is no bundle of {name} below {layout.out}, and no --file was given",
            fix=f"run `./inv bundle -n {name}`, or give --file with a bundle or a folder",
        )
    return newest


def _rows(path: Path, folder: Path | None = None) -> list[Row]:
    what = "the bundle is whole"
    if not path.is_file():  # a pipe of that name would be waited for
        return [Row(FAILED, what, f"{printable(path.name)} is not a regular file")]
    try:
        made = bundles.read(path)
    except STUMBLES as err:
        return [Row(FAILED, what, why(err))]
    rows = [Row(OK, what, f"every member is as its digest says; {made.sha256}")]
    for what, check in BUNDLE:
        rows += run(what, check, made)
    manifest = None
    try:
        manifest = manifest_of(made)
    except STUMBLES as err:
        rows.append(Row(FAILED, "its manifest can be read", why(err)))
    for what, checked in MANIFEST if manifest is not None else ():
        rows += run(what, lambda m, c=checked: c(m, manifest), made)  # type: ignore[misc]
    return rows if folder is None else [*rows, *folder_rows(folder, made, manifest)]


__all__ = ["FAILED", "NOTE", "OK", "Row", "chosen", "inspect", "manifest_of"]
