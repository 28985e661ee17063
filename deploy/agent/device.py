"""Ask the card's own tools, where they are; read their tables by the names of the columns.

hy-smi and rocm-smi print one table in several layouts. What a tool does not know it calls N/A, and
that is unknown, never idle. The pids it lists are the host's: inside a container they name nothing,
so they are shown as such and never acted upon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SMI = (
    "/usr/local/hyhal/bin/hy-smi",
    "/opt/hyhal/bin/hy-smi",
    "/opt/dtk/bin/rocm-smi",
    "hy-smi",
    "rocm-smi",
)
ROCMINFO = ("/opt/dtk/bin/rocminfo", "rocminfo")
_UNITS = re.compile(r"(?<=\d)(?:%|[CW])$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card. Percents from 0 to 100; None is unknown."""

    index: int
    memory: float | None
    busy: float | None
    mode: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that the driver knows by its pid on the host. `memory` is in MiB."""

    host_pid: int
    cards: tuple[int, ...]
    memory: float | None
    percent: float | None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "cards": list(self.cards)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One accelerator as rocminfo names it. `memory` is in KB; `isa` is its target id."""

    name: str
    marketing: str
    units: int | None
    wavefront: int | None
    memory: int | None
    isa: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a tool said: `path` is "" where there is none, `error` is why it gave no answer."""

    path: str = ""
    output: str = ""
    error: str = ""


def ask(candidates: Sequence[str], *arguments: str, timeout: float = 20.0) -> Answer:
    """Run the first of the tools that is there, with an end to its time."""
    import shutil
    import subprocess

    path = next((found for name in candidates if (found := shutil.which(name))), "")
    if not path:
        return Answer(error=f"none of {', '.join(candidates)} is there and executable")
    try:
        done = subprocess.run(
            (path, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        return Answer(path=path, error=str(err))
    output = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        last = output.strip().rsplit("\n", 1)[-1]
        return Answer(path=path, output=output, error=f"exit {done.returncode}: {last}")
    return Answer(path=path, output=output)


def cards(text: str) -> tuple[Card, ...]:
    """Read the table that hy-smi prints without arguments; no table is no cards."""
    header: list[str] = []
    found = []
    for line in _COLOUR.sub("", text).split("\n"):
        columns = line.split()
        if "VRAM%" in columns and columns[0] in ("HCU", "DCU", "GPU"):
            header = columns
        elif header and columns and columns[0].isdigit() and len(columns) == len(header):
            row = dict(zip(header, columns))
            found.append(
                Card(
                    index=int(columns[0]),
                    memory=_number(row["VRAM%"]),
                    busy=_number(row.get(f"{header[0]}%", "N/A")),
                    mode=row.get("Mode", ""),
                )
            )
    return tuple(found)


def holders(text: str) -> tuple[Holder, ...]:
    """Read what ``--showpids`` lists. The pids are those of the host."""
    blocks = re.split(r"^PID:", text, flags=re.MULTILINE)[1:]
    return tuple(_holder(block) for block in blocks)


def agents(text: str) -> tuple[Agent, ...]:
    """Read rocminfo: its accelerators, not its CPUs."""
    found = []
    for block in re.split(r"^Agent \d+\s*$", text, flags=re.MULTILINE)[1:]:
        names = re.findall(r"^\s*Name:\s*(\S.*?)\s*$", block, re.MULTILINE)
        if _value(block, "Device Type") not in ("HCU", "DCU", "GPU") or not names:
            continue
        targets = [name.partition("--")[2] for name in names if name.startswith("amdgcn")]
        found.append(
            Agent(
                name=names[0],
                marketing=_value(block, "Marketing Name"),
                units=_whole(_value(block, "Compute Unit")),
                wavefront=_whole(_value(block, "Wavefront Size")),
                memory=_whole(_value(block, "Size")),
                isa=targets[0] if targets else "",
            )
        )
    return tuple(found)


def look() -> dict[str, Any]:
    """Ask for the cards and who holds their memory; `error` says why there is no answer."""
    table = ask(SMI)
    seen = cards(table.output)
    listed = ask((table.path,), "--showpids") if seen else Answer()
    error = table.error or ("" if seen else "it lists no card")
    return {
        "tool": table.path,
        "error": "" if seen else error,
        "cards": [card.to_json() for card in seen],
        "host_processes": [holder.to_json() for holder in holders(listed.output)],
        "host_processes_error": listed.error,
    }


def _holder(block: str) -> Holder:
    pid = re.match(r"\s*(\d+)", block)
    indices = re.search(r"^\s*[HD]CU Index:(.*)$", block, re.MULTILINE)
    return Holder(
        host_pid=int(pid[1]) if pid else 0,
        cards=tuple(int(n) for n in re.findall(r"'(\d+)'", indices[1])) if indices else (),
        memory=_number(_value(block, "VRAM USED(MiB)")),
        percent=_number(_value(block, "VRAM USED(%)")),
    )


def _value(block: str, name: str) -> str:
    found = re.search(rf"^\s*{re.escape(name)}:[ \t]*(.*?)[ \t]*$", block, re.MULTILINE)
    return found[1] if found else ""


def _number(text: str) -> float | None:
    try:
        value = float(_UNITS.sub("", text))
    except ValueError:
        return None
    return value if abs(value) < 1e12 else None  # `inf` is how the tool says unknown


def _whole(text: str) -> int | None:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None
