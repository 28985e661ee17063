"""Text in a narrow terminal: broken at blanks, never cut; where nobody looks, one line a row."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from deploy.layout import HERE
from deploy.report import folded, table

DIGEST = "0123456789abcdef" * 4
ROWS = [
    ("overlay", "add", "vllm/dcu/diag.py", "include vllm/**"),
    ("overlay", "delete", "vllm/model_executor/layers/quantization/utils/" + "m" * 20, "include x"),
    ("ignored", "add", "tests/dcu/README.md", "checks that lie beside the sources and stay there"),
    ("kernel", "", DIGEST, ""),
]


@pytest.mark.parametrize("width", [0, 40, 80, 200])
def test_a_table_says_every_word_whole_at_any_width(width: int) -> None:
    said = table(ROWS, width=width)

    assert said.split() == [word for row in ROWS for cell in row for word in cell.split()]


def test_a_table_breaks_no_wider_than_the_terminal_but_for_one_long_word() -> None:
    for line in table(ROWS, width=60).split("\n"):
        assert len(line) <= 60 or len(line.split()) == 1, line


def test_a_cell_goes_on_below_itself() -> None:
    said = table([("ok", "one two three four five six seven", "end"), ("x", "y", "z")], "", 30)

    assert said.split("\n") == [
        "ok  one two three four",
        "    five six seven         end",
        "x   y                      z",
    ]


def test_without_a_terminal_each_row_is_one_line() -> None:
    assert len(table(ROWS).split("\n")) == len(ROWS)
    assert folded("word " * 100) == "word " * 100


def test_without_a_terminal_one_long_cell_moves_no_other_row() -> None:
    long = "[" + ", ".join(["vllm/**"] * 50) + "]"
    image = f"sha256:{DIGEST}"
    said = table([("overlay.include", long, "demo.yaml:4"), ("id", image, "default")], "")

    assert said.split("\n") == [
        f"overlay.include  {long}  demo.yaml:4",
        f"id               {image}   default",
    ]


def test_a_long_line_goes_on_indented() -> None:
    said = folded("  gate 1  passed\n  gate 2  " + "word " * 10, 40)

    assert said.split("\n")[0] == "  gate 1  passed"
    assert all(len(line) <= 40 for line in said.split("\n"))
    assert said.split("\n")[2].startswith("      word")


def seen(width: int, *words: str) -> str:
    """What a person sees who types this in a terminal of that width."""
    above, below = pty.openpty()
    fcntl.ioctl(below, termios.TIOCSWINSZ, struct.pack("4H", 50, width, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    inv = Path(sys.executable).with_name("inv")
    with subprocess.Popen([inv, *words], cwd=HERE.top, env=env, stdin=below, stdout=below) as child:
        os.close(below)
        said = b""
        while True:
            try:
                piece = os.read(above, 1 << 16)
            except OSError:  # the other end is closed
                break
            said += piece
        assert child.wait(60) == 0
    os.close(above)
    return said.decode().replace("\r\n", "\n")


def test_a_terminal_is_asked_for_its_width_and_a_pipe_is_not() -> None:
    narrow, wide = seen(80, "show", "-n", "tiny"), seen(200, "show", "-n", "tiny")
    argv = [Path(sys.executable).with_name("inv"), "show", "-n", "tiny"]
    env = {**os.environ, "COLUMNS": "80"}
    piped = subprocess.run(
        argv, cwd=HERE.top, env=env, capture_output=True, text=True, check=True, timeout=60
    ).stdout

    assert all(len(line) <= 80 for line in narrow.split("\n"))
    assert narrow.split() == piped.split()
    assert wide == piped
    assert max(map(len, piped.split("\n"))) > 80
    assert re.search(r"^expect\.tree +[0-9a-f]{64} +tiny\.lock\.yaml$", piped, re.MULTILINE)


@pytest.mark.parametrize("width", [80, 200])
def test_a_profile_fits_the_terminal_with_its_bars_and_long_names(width: int) -> None:
    file = HERE.top / "tests" / "measure" / "fixtures" / "hipkernel.csv"

    lines = seen(width, "profile.summary", "-n", "demo", "--file", str(file)).split("\n")

    assert all(len(line) <= width for line in lines)
    assert any(line.rstrip().endswith("█" * 8) for line in lines)
    assert any("Cijk_Alik" in line and " ... " in line for line in lines)
