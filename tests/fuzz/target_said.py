"""What a target says, and a vendor's listing: any bytes can be shown, or are an error."""

from __future__ import annotations

import json
from pathlib import Path

from deploy import report
from deploy.agent.listing import parse as parse_listing
from deploy.agent.listing import text_of
from deploy.agent.words import BundleError
from deploy.errors import BadValues
from deploy.evidence import parse
from deploy.gates import Visit


def seeds() -> dict[str, bytes]:
    said = {
        "schema": "evidence/1", "verb": "verify", "outcome": "differs", "exit": 10, "plan": "",
        "tree": "", "met": "x", "files": [{"path": "a", "state": "changed", "why": "w"}],
        "origin": {"empty": {"state": "shadowed", "why": "y", "mend": "z", "file": None}},
        "traps": [{"kind": "k", "where": "w", "why": "y", "mend": "m", "harm": True}],
        "audit": {"owners": {"ours": ["a"]}, "faults": ["f"],
                  "files": [{"path": "p", "owner": "foreign", "why": "w"}]},
        "error": {"what": "w", "why": "y", "fix": "f"}, "conflicts": [], "changes": {"put": ["a"]},
    }  # fmt: skip
    line = "0" * 64 + " 1 0644 base a b\n" + "f" * 64 + ' 2 - vendor "c\\n"\n'
    return {"evidence": json.dumps(said).encode(), "listing": f"files/1\n{line}".encode()}


def one(data: bytes, _: Path) -> None:
    _evidence(data)
    text = data.decode("utf-8", "surrogateescape")
    try:
        entries = parse_listing(text)
    except BundleError as err:
        _shown(str(err))
        return
    assert parse_listing(text_of(entries.values())) == entries


def _evidence(data: bytes) -> None:
    try:
        found = parse(data)
    except BadValues:
        return
    visit = Visit(target="ssh:a", evidence=found, error=found.error)
    for shown in (report.visit_text(visit), report.fleet_text([visit])):
        _shown(shown)


def _shown(text: str) -> None:
    assert all(char == "\n" or char.isprintable() for char in text), repr(text)
