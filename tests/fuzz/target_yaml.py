"""The YAML reader and the manifest on top of it: any bytes give a value or a BadValues."""

from __future__ import annotations

import re
from pathlib import Path

from deploy import document, manifest
from deploy.errors import BadValues
from deploy.layout import HERE


def seeds() -> dict[str, bytes]:
    paths = sorted(HERE.manifest("x").parent.glob("*.yaml"))
    found = {path.name: path.read_bytes() for path in paths if ".lock." not in path.name}
    small = [b"a: [b, *c, {d: e}]\n", b"x: &x {y: 1}\nz: {<<: *x}\n", b"- |\n  a\n- >-\n b\n"]
    return {**found, **{f"small{n}": text for n, text in enumerate(small)}}


def words() -> list[str]:
    """What a manifest says, and what YAML makes of it when it is not looked at closely."""
    text = HERE.manifest("example").read_text("utf-8")
    signs = ["&x ", "*x", "<<: ", "!!str ", "? ", "- |+\n", ">-\n", "---\n", "...\n", "%YAML 1.2\n"]
    signs += ['"\\u2028"', '"\\ud800"', "{a: [b]}", "\ufeff", "\u0085", "0644", "1e10", "no", "~"]
    return sorted({*signs, *re.findall(r"[a-z_]+:", text), *re.findall(r": ([^ {\[#\n]+)", text)})


def one(data: bytes, _: Path) -> None:
    try:
        root, faults = document.parse(data, "fuzz.yaml")
    except BadValues as err:
        _shown(err)
        return
    _places(root)
    try:
        faults.raise_any()
        found = manifest.parse(data.decode("utf-8"), "example")
    except (BadValues, UnicodeDecodeError) as err:
        if isinstance(err, BadValues):
            _shown(err)
        return
    # What was taken once is taken again, and means the same.
    assert manifest.parse(data.decode("utf-8"), "example").meaning() == found.meaning()


def _places(root: document.Node) -> None:
    """Every node stands somewhere. Aliases are shared, so each is visited once."""
    seen, todo = set(), [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        assert node.at.line >= 1
        assert node.at.column >= 1
        if isinstance(node, document.List):
            todo += node.items
        elif isinstance(node, document.Map):
            todo += [child for pair in node.entries.values() for child in pair]


def _shown(err: BadValues) -> None:
    assert all(char == "\n" or char.isprintable() for char in str(err)), repr(str(err))
