"""Judge what markers prove: whether the requests of this process took the wanted path.

The agent has read the log (deploy.agent.log); here it is decided. What by its nature cannot be seen
is said beside the verdict: a replayed graph prints nothing, nor does compiled code from a cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.errors import BadValues
from deploy.service.chunks import Chunk

Dim = int | None  # None: any


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One marker that must be seen with ``selected=True``. Phase is any, prefill or decode."""

    shape: tuple[Dim, ...]
    dtype: str = ""
    phase: str = "any"

    def __str__(self) -> str:
        dims = ", ".join("*" if dim is None else str(dim) for dim in self.shape)
        phase = "" if self.phase == "any" else self.phase
        return " ".join(word for word in (f"({dims})", self.dtype, phase) if word)

    def fits(self, row: Mapping[str, Any]) -> bool:
        """True for a marker of this shape and dtype, whatever it selected."""
        return self.has_shape(row["shape"]) and _dtype(self.dtype) in ("", _dtype(row["dtype"]))

    def has_shape(self, shape: Sequence[int]) -> bool:
        # A chunk plan knows the rows only: what follows them is the layer's affair.
        dims = self.shape[:-1] if self.shape[-1:] == (None,) else self.shape
        if len(shape) < len(dims) or (dims == self.shape and len(shape) != len(dims)):
            return False
        return all(want is None or want == have for want, have in zip(dims, shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """What the markers prove, what speaks against it, and what could not be seen."""

    proofs: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        return bool(self.proofs) and not self.faults


def wanted(shape: str, dtype: str, phase: str, plan: Sequence[Chunk] = ()) -> tuple[Wanted, ...]:
    """Turn one entry of the manifest into the markers it stands for.

    `shape` is as logged, ``*`` standing for any number, or ``chunks`` for every length of the plan.

    Raises:
        BadValues: it is neither.
    """
    if shape == "chunks":
        lengths = sorted({chunk.q_len for chunk in plan}, reverse=True)
        rows: list[tuple[Dim, ...]] = [(length, None) for length in lengths]
    else:
        rows = [_shape(shape)]
    return tuple(Wanted(shape=row, dtype=dtype, phase=phase) for row in rows)


def judge(
    scan: Mapping[str, Any], needed: Sequence[Wanted], pids: Sequence[int], *, eager: bool = False
) -> Dispatch:
    """Judge a scan by the wanted markers; `pids` are the processes of the service that was asked.

    Outside the window only a decode marker counts, and only where graphs were captured: a replay
    prints nothing, so its capture is all there can be. `eager` says that there are no graphs.
    """
    ours = [row for row in scan["markers"] if row["pid"] in pids]
    captured = "graphs captured" in scan["signs"] and not eager
    verdicts = [_one(want, ours, scan, captured=captured) for want in needed]
    return Dispatch(
        proofs=tuple(text for proven, text in verdicts if proven),
        faults=(
            *_unreadable(scan),
            *(text for proven, text in verdicts if not proven),
            *_maybe_fallbacks(needed, scan),
        ),
        blind=tuple(_blind(scan, captured=captured)),
    )


def judge_off(scan: Mapping[str, Any], pids: Sequence[int]) -> Dispatch:
    """Judge a run with the candidate's switch off: nothing may be selected, in any phase.

    The log is of this start alone, so whoever selected in it counts, a process that has gone too.
    And only a fallback shows that markers are printed at all: silence proves nothing.
    """
    rows = scan["markers"]
    faults = [
        f"the switch is off, yet {_shown(row)} was selected {row['before'] + row['after']} times"
        f" by {_named(row['pid'])}"
        for row in rows
        if row["selected"]
    ]
    unclear = sum(
        row["before"] + row["after"] for row in _unclear(scan) if row["selected"] is not False
    )
    if unclear:
        faults.append(f"{unclear} markers cannot be read whole: they may have been selected")
    fallback = sum(row["window"] for row in rows if row["pid"] in pids and not row["selected"])
    if not fallback:
        faults.append(
            "this service printed no marker inside the window: that nothing was selected shows"
            " only where the fallback prints its selected=False"
        )
    return Dispatch(
        proofs=() if faults else (f"no marker was selected; {fallback} took the fallback",),
        faults=(*_unreadable(scan), *faults),
        blind=tuple(_blind(scan, captured="graphs captured" in scan["signs"])),
    )


def counted(scan: Mapping[str, Any], pids: Sequence[int]) -> int:
    """Return how many marker lines the window holds: both sides of a comparison pay for them."""
    return sum(row["window"] for row in scan["markers"] if row["pid"] in pids)


def _one(
    want: Wanted, ours: Sequence[Mapping[str, Any]], scan: Mapping[str, Any], *, captured: bool
) -> tuple[bool, str]:
    rows = [row for row in ours if want.fits(row)]
    took = sum(row["window"] for row in rows if row["selected"])
    # The log is of this start alone: a fallback counts against it, whoever printed it.
    fallbacks = (row for row in scan["markers"] if want.fits(row) and not row["selected"])
    fell = sum(row["window"] for row in fallbacks)
    if fell:
        times = f"{fell} of {took + fell} times" if took else f"all {fell} times"
        return False, f"{want}: selected=False {times} inside the window"
    if took:
        return True, f"{want}: selected=True {took} times inside the window"
    if want.phase == "decode" and captured:
        seen = sum(row["before"] for row in rows if row["selected"])
        if seen:
            return True, f"{want}: selected=True {seen} times at capture; a replay prints nothing"
    return False, f"{want}: not proven; {_closest(want, rows, ours, scan)}"


def _closest(
    want: Wanted,
    rows: Sequence[Mapping[str, Any]],
    ours: Sequence[Mapping[str, Any]],
    scan: Mapping[str, Any],
) -> str:
    """Say what came nearest to a marker that was not seen: the first thing a person would ask."""
    if any(row["selected"] for row in rows):
        return "it was selected outside the window only (start, warm-up, or another round)"
    if rows:
        return "outside the window it took the fallback, inside nothing was printed"
    foreign = sorted({row["pid"] for row in scan["markers"] if want.fits(row)})
    if foreign:
        pids = ", ".join(map(_named, foreign))
        return f"only {pids} printed it, which is not this service"
    shapes = sorted({_shown(row) for row in ours if row["window"]})
    if shapes:
        return f"the window holds other markers only: {', '.join(shapes[:4])}"
    if ours:
        return "the window holds no marker of this service"
    return "the log holds no marker of this service; is the diag variable set?"


def _maybe_fallbacks(needed: Sequence[Wanted], scan: Mapping[str, Any]) -> Iterator[str]:
    """Name the markers inside the window that may be a fallback of what is wanted."""
    count = sum(
        row["window"]
        for row in _unclear(scan)
        if row["selected"] is not True
        and (row["shape"] is None or any(want.has_shape(row["shape"]) for want in needed))
    )
    if count:
        yield (
            f"{count} markers inside the window cannot be read whole,"
            " and may be fallbacks of what is wanted: prove it again"
        )


def _unclear(scan: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The markers that do not count, as far as they were told; an older record has none."""
    found: Sequence[Mapping[str, Any]] = scan.get("unclear", ())
    return found


def _named(pid: int) -> str:
    return f"pid {pid}" if pid else "no named process"


def _unreadable(scan: Mapping[str, Any]) -> Iterator[str]:
    yield from scan["lost"]
    if not scan["ready"]:
        yield "the server never said that it is ready"


def _blind(scan: Mapping[str, Any], *, captured: bool) -> Iterator[str]:
    if captured:
        yield "decode runs captured graphs: it prints at capture, not at replay"
    if "compiled code loaded" in scan["signs"]:
        yield (
            "compiled code was loaded from a cache: markers inside it print nothing;"
            " give each candidate its own VLLM_CACHE_ROOT"
        )
    if scan["damaged"]:
        yield f"{scan['damaged']} markers were torn apart by other output and not counted"
    if scan["uncounted"]:
        yield f"{scan['uncounted']} markers of rare shapes were not told apart"


def _shape(text: str) -> tuple[Dim, ...]:
    inner = re.fullmatch(r"\s*(?:torch\.Size\()?[(\[]?([\d*, x]*)[)\]]?\)?\s*", text)
    dims = re.findall(r"\d+|\*", inner[1]) if inner else []
    if not dims:
        raise BadValues(
            f"{text!r} is no shape of a marker",
            why="a shape is as logged, like (4096, 5120), with * for any number; or `chunks`",
            fix="correct dispatch.markers in the manifest",
        )
    return tuple(None if dim == "*" else int(dim) for dim in dims)


def _dtype(text: str) -> str:
    return text.removeprefix("torch.")


def _shown(row: Mapping[str, Any]) -> str:
    dims = ", ".join(map(str, row["shape"]))
    return f"({dims}) {_dtype(row['dtype'])} selected={row['selected']}"
