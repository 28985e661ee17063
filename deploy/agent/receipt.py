"""What an earlier deploy left in the site: what it put there, and the way back.

The receipt and the kept originals lie in the site, so they live and die with it: a rebuilt
container has neither the changes nor a record of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .plan import State
from .tree import TreeReader
from .words import BundleError, NeedsPerson, digest

HOME = ".dcu-bundle"
RECEIPT = f"{HOME}/receipt.json"
KEPT = f"{HOME}/kept"
JOURNAL = f"{HOME}/journal"
SCHEMA = "receipt/1"
_SHAPE = {
    "serial": int,
    "plan": str,
    "name": str,
    "python": dict,
    "files": dict,
    "pycs": dict,
    "originals": dict,
    "folders": list,
    "removed": dict,
    "identities": dict,
    "incidental": dict,
}


class Receipt:
    """The record of the last deploy; an empty one where there was none.

    files:     path -> State that we put there (as JSON)
    pycs:      path -> {"sha256", "source", "module"}: bytecode that we made, and of which source
    originals: path -> {"kept": name or "", "state": State}; "" means that nothing was there, or,
               where the state is another, that this is an image: its base has that file
    folders:   folders that we made;  removed: folder -> [mode, uid, gid] that we removed
    seal:      sha256 of all the rest: an entry that was lost would never be given back
    """

    def __init__(self, raw: dict[str, Any] | None = None) -> None:
        raw = raw or {}
        self.exists = bool(raw)
        self.sha256 = ""  # of the record as it lies there: it names one deploy
        self.serial: int = raw.get("serial", 0)
        self.plan: str = raw.get("plan", "")
        self.name: str = raw.get("name", "")
        self.python: dict[str, str] = raw.get("python", {})
        self.files: dict[str, Any] = raw.get("files", {})
        self.pycs: dict[str, dict[str, str]] = raw.get("pycs", {})
        self.originals: dict[str, dict[str, Any]] = raw.get("originals", {})
        self.folders: list[str] = raw.get("folders", [])
        self.removed: dict[str, list[int]] = raw.get("removed", {})
        self.identities: dict[str, str] = raw.get("identities", {})
        self.incidental: dict[str, Any] = raw.get("incidental", {})

    def to_json(self) -> dict[str, Any]:
        record = {"schema": SCHEMA, **{name: getattr(self, name) for name in _SHAPE}}
        return {**record, "seal": digest(record)}

    def put(self, path: str) -> State | None:
        """Return what we put at `path`, if we did."""
        raw = self.files.get(path)
        return None if raw is None else State.parse(raw, f"receipt {path}")

    def original(self, path: str) -> State | None:
        raw = self.originals.get(path)
        return None if raw is None else State.parse(raw["state"], f"receipt {path}")

    def kept_names(self) -> set[str]:
        return {entry["kept"] for entry in self.originals.values() if entry["kept"]}


def read_receipt(tree: TreeReader) -> Receipt:
    """Return the site's receipt. Raises NeedsPerson when there is one that cannot be understood."""
    try:
        record = tree.read(RECEIPT)
        receipt = _receipt(json.loads(record))
        receipt.sha256 = hashlib.sha256(record).hexdigest()
        return receipt
    except (FileNotFoundError, NotADirectoryError):
        return Receipt()
    except (ValueError, OSError, RecursionError) as err:
        raise NeedsPerson(
            "the receipt of an earlier deploy cannot be read",
            why=f"{tree.visible(RECEIPT)}: {err}",
            fix="install the base anew and remove that folder (the originals are in its kept/), or"
            " rebuild the target; then deploy again",
        ) from err


def _receipt(raw: object) -> Receipt:
    """Return a record that may be acted on. Raises ValueError."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    for name, kind in _SHAPE.items():
        if not isinstance(raw.get(name), kind):
            raise ValueError(f"{name} is missing, or is no {kind.__name__}")
    if raw.pop("seal", "") != digest(raw):
        raise ValueError("its seal is not that of what it says: it was edited")
    receipt = Receipt(raw)
    try:
        for path in receipt.files:
            receipt.put(path)
        for path, entry in receipt.originals.items():
            receipt.original(path)
            if "/" in entry["kept"]:
                raise ValueError(f"{path} is kept outside of kept/")
    except (BundleError, KeyError, TypeError) as err:
        raise ValueError(f"it says of a file what cannot be: {err}") from err
    return receipt


def interrupted(tree: TreeReader) -> bool:
    """True when a deploy or restore was begun and is neither finished nor undone."""
    return tree.exists(JOURNAL)


def proven(
    tree: TreeReader, pyc: str, source: State, receipt: Receipt, python: Mapping[str, str]
) -> bool:
    """True when the receipt proves the pyc: we made these bytes of this source with this Python."""
    record = receipt.pycs.get(pyc)
    if record is None or receipt.python != dict(python) or record["source"] != source.sha256:
        return False
    return tree.state(pyc).sha256 == record["sha256"]
