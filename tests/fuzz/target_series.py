"""The reader of a series: any bytes give a series or a BadValues, and no path leaves its folder."""

from __future__ import annotations

from pathlib import Path

from deploy import series
from deploy.errors import BadValues
from deploy.layout import HERE


def seeds() -> dict[str, bytes]:
    return {name: (HERE.series(name) / "series").read_bytes() for name in ("demo", "tiny")}


def words() -> list[str]:
    lines = [
        "series 1\n",
        "    after 12  from files/a.txt\n",
        "from inserts/a.py",
        "mode 0755",
        "0644",
    ]
    lines += [f"{verb} " for verb in ("new", "insert", "delete", "rename", "mode", "to", "was")]
    return [*lines, f"was {'0' * 64}", '"\\u0000"', '"a b"', "../a", "a/.git/b", ".GIT", "#"]


def one(data: bytes, scratch: Path) -> None:
    folder = scratch / "series"
    if not folder.exists():
        for name in ("files", "inserts"):
            (folder / name).mkdir(parents=True)
            (folder / name / "a.txt").write_bytes(b"text\n")
            (folder / name / "a.py").write_bytes(b"A = 1\n")
    (folder / "series").write_bytes(data)
    try:
        found = series.read(folder)
    except BadValues as err:
        _shown(str(err))
        return
    assert series.read(folder) == found


def _shown(text: str) -> None:
    assert all(char == "\n" or char.isprintable() for char in text), repr(text)
