"""Read dispatch markers from a server's log: where they stand, who printed them, in which phase.

A marker is ``DCU_KERNEL_DIAG selected=True shape=(4096, 5120) dtype=torch.bfloat16``. The log is
shared by several processes, holds progress bars that share a line with it (carriage returns),
colours, and starts of earlier days; it may be rotated away and it may be huge. So it is read as
bytes, in one pass of constant memory, from an offset that was noted before.

`mark` notes a place, `scan` is the reader. This module judges nothing.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .words import BundleError, Exit, printable

MARKER = b"DCU_KERNEL_DIAG"
READY = b"Application startup complete."
# Lines of the start that decide what markers can prove; searched as far as the ready line only.
SIGNS = {
    "compiled code loaded": b"Directly load AOT compilation from path",
    "graphs captured": b"Graph capturing finished",
    "extension failed": b"Failed to import from vllm._",
    "environment not sourced": b"libgalaxyhip.so",
    "engine died": b"Engine core initialization failed",
}
_CHUNK = 1 << 18  # fits a core's cache: several searches of one chunk read memory once
_SHARE = 1 << 26  # bytes from which on another process is worth its start
_MOST_SHARES = 4
_START = 1 << 24  # a start says less than this; the signs are not looked for beyond
_LONGEST = 1 << 16  # a line longer than this is cut; nothing of ours is
_NAMED = 1 << 12  # bytes at either end that tell one log from another
_NEAR = 200  # bytes between markers below which they may be a burst
_BURST = 4  # markers so near to each other are one: a block of lines is looked at, not one
_REACH = 1 << 12  # bytes within which a line is looked for again: some thirty lines
_GROUPS = 4096  # distinct markers that are told apart; beyond that they are only counted
_NEWLINE = ord("\n")
_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
# What a logger, or a print in a titled process, sets before a marker; and nothing else may. Who
# asks for something may write a marker into his prompt, and servers log prompts, in quotes.
_LEAD = re.compile(
    rb"(?:^\s*|\([A-Za-z][\w.:-]*(?: [a-z_]+=\w+)*? pid=(\d+)[^()'\"]{0,60}\)\s*)"
    rb"(?:(?:TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL)[ :]\s*(?:[\w.]+:\s*)?)?"
    rb"(?:(?:\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?\s+)?"
    rb"(?:\[[\w./: -]*\]:?\s+)*$"
)
# Each quoted part once, the group being its closing mark: searched for alone, what is never closed
# would be looked for anew at each of its marks.
_QUOTED = re.compile(rb"'(?:[^'\\]|\\.)*(?:(')|\\?\Z)|\"(?:[^\"\\]|\\.)*(?:(\")|\\?\Z)", re.DOTALL)
_OWN_PID = re.compile(rb"(?:\s+[a-z_]+=\S+)*?\s+pid=(\d+)")
_FIELDS = re.compile(
    rb"^\s*selected=(True|False|1|0)\s+shape=(?:torch\.Size\()?"
    rb"[\[(]([\d, x]*)[\])]\)?\s+dtype=([\w.]+)(?![\w.(])"
)
_SELECTED = re.compile(rb"selected=(True|False|1|0)(?=\s)")
_SHAPE = re.compile(rb"shape=(?:torch\.Size\()?[\[(]([\d, x]*)[\])]")


class NoLog(BundleError):
    exit = Exit.DIFFERS


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a log: which file (device and inode, not the name) and how many bytes into it.

    `before` names the bytes that lie before it: a log that is cut to nothing and grows again is
    the same file, and another log.
    """

    device: int
    inode: int
    offset: int
    before: str = ""

    @classmethod
    def parse(cls, raw: Any) -> Place | None:
        """Return the place that `to_json` wrote; None for none."""
        if not raw:
            return None
        device, inode, offset = (int(raw[name]) for name in ("device", "inode", "offset"))
        return cls(device, inode, offset, str(raw.get("before") or ""))

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "inode": self.inode,
            "offset": self.offset,
            "before": self.before,
        }


@dataclass(frozen=True, slots=True, order=True)
class Marker:
    """What one marker says, and of whom. `pid` is 0 where nothing names the process."""

    pid: int
    shape: tuple[int, ...]
    dtype: str
    selected: bool


@dataclass(slots=True)
class Count:
    """How often a marker was seen before the server was ready, after it, and in the window."""

    before: int = 0
    after: int = 0
    window: int = 0

    def to_json(self) -> dict[str, int]:
        return {"before": self.before, "after": self.after, "window": self.window}


# What can be told of a marker that does not count: its shape and what it selected, or None.
Unclear = tuple[tuple[int, ...] | None, bool | None]


@dataclass(slots=True)
class Scan:
    """What a log window holds. `lost` says which part of it could not be read, and why.

    `unclear` holds the markers that do not count, as far as they can be told.
    """

    markers: dict[Marker, Count] = field(default_factory=dict)
    unclear: dict[Unclear, Count] = field(default_factory=dict)
    damaged: int = 0  # markers that another writer's text has torn apart
    uncounted: int = 0  # markers beyond the number of groups that are told apart
    ready: bool = False  # a server said that it is ready to answer
    signs: set[str] = field(default_factory=set)
    bytes: int = 0
    lost: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "markers": [
                {
                    "pid": marker.pid,
                    "shape": list(marker.shape),
                    "dtype": marker.dtype,
                    "selected": marker.selected,
                    **count.to_json(),
                }
                for marker, count in sorted(self.markers.items())
            ],
            "unclear": [
                {"shape": shape and list(shape), "selected": selected, **count.to_json()}
                for (shape, selected), count in self.unclear.items()
            ],
            "damaged": self.damaged,
            "uncounted": self.uncounted,
            "ready": self.ready,
            "signs": sorted(self.signs),
            "bytes": self.bytes,
            "lost": list(self.lost),
        }


def mark(path: str) -> Place:
    """Return the end of the log as it is now; a log that does not exist yet starts at 0."""
    try:
        with opened(path) as file:
            found = os.fstat(file.fileno())
            before = _before(file, found.st_size)
    except FileNotFoundError:
        return Place(0, 0, 0)
    return Place(found.st_dev, found.st_ino, found.st_size, before)


def require_log(path: str, *folders: str) -> None:
    """Raise NoLog where what lies there is no file, or leads out of the folders it may lie in.

    Whoever opens a pipe waits for ever, and a link could show any file of the machine.
    """
    real, tops = os.path.realpath(path), [os.path.realpath(folder) for folder in folders]
    inside = any(real.startswith(top.rstrip("/") + "/") for top in tops)
    if os.path.lexists(path) and not inside:
        raise _no_log(path, f"it leads to {printable(real)}, out of {printable(tops[0])}")
    try:
        opened(path).close()
    except FileNotFoundError:
        pass


def opened(path: str) -> io.FileIO:
    """Open a log for reading without ever waiting for it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        if err.errno in (errno.ELOOP, errno.ENXIO):  # a link to itself, a socket
            raise _no_log(path, str(err.strerror)) from err
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_log(path, "it is not a regular file")
    return io.FileIO(fd)


def _no_log(path: str, why: str) -> NoLog:
    return NoLog(
        f"the log {printable(path)} is not read",
        why=why,
        fix="put the server's own log back there, or start it again: each start makes its own",
    )


def _before(file: io.FileIO, offset: int) -> str:
    """Name the bytes before an offset, by the first and the last few of them."""
    first = os.pread(file.fileno(), min(_NAMED, offset), 0)
    last = os.pread(file.fileno(), min(_NAMED, offset), max(0, offset - _NAMED))
    return hashlib.sha256(first + last).hexdigest()


def _written_anew(path: str, place: Place) -> bool:
    """True when other bytes lie before a place now than when it was noted."""
    with opened(path) as file:
        return bool(place.before) and _before(file, place.offset) != place.before


def scan(
    path: str, start: Place | None = None, window: Place | None = None, end: Place | None = None
) -> Scan:
    """Read the log from `start` to `end`; markers from `window` on are counted as in the window.

    Without `start` it is read whole; without `end` to its end as it is now. Where the log was
    rotated meanwhile, the pieces are followed by inode; one that has gone is reported in `lost`.
    """
    reader = _Reader()
    for piece in _pieces(path, start, end, reader.result):
        reader.read(piece, _edge(piece, window))
    if window is not None and not reader.in_window and reader.result.bytes:
        reader.result.lost.append("the measured window begins in a piece of the log that has gone")
    return reader.result


@dataclass(frozen=True, slots=True)
class _Piece:
    path: str
    inode: int
    begin: int
    end: int


def _edge(piece: _Piece, window: Place | None) -> int | None:
    """Return where in this piece the window begins; None where it begins in another or nowhere."""
    if window is None or (window.inode and window.inode != piece.inode):
        return None
    if window.inode and _written_anew(piece.path, window):
        return None  # its bytes are not those that the window began behind
    return window.offset


@dataclass(frozen=True, slots=True)
class _Payload:
    """What stands behind a marker's name: shape, dtype, selected; or what is left of it.

    `unclear` is None where nothing speaks of a marker.
    """

    fields: tuple[tuple[int, ...], str, bool] | None
    pid: int
    unclear: Unclear | None


class _Reader:
    """The one pass. It keeps a buffer of whole lines and the unfinished one, nothing else."""

    def __init__(self) -> None:
        self.result = Scan()
        self.in_window = False
        self._continued = False  # the buffer begins inside a line
        self._buffer = bytearray(_CHUNK + _LONGEST)
        self._parsed: dict[bytes, _Payload] = {}
        self._counts: dict[tuple[int, bytes], Count] = {}

    def read(self, piece: _Piece, edge: int | None) -> None:
        """Read one piece; markers at or after the offset `edge` are in the window.

        Once the server was ready, the rest of a long log is shared out: order matters no more.
        """
        if not self.result.ready:
            head, piece = _cut(piece, piece.begin + _START)
            self._read(head, edge)
        shares = _shares(piece) if self.result.ready else [piece]
        others = [self._read_apart(share, edge) for share in shares[1:]]
        self._read(shares[0], edge)
        for other in others:
            self._add(*other)

    def _read_apart(self, share: _Piece, edge: int | None) -> tuple[int, int]:
        """Read a share in a process of its own; return its pid and where its answer comes out."""
        source, sink = os.pipe()
        pid = os.fork()
        if pid:
            os.close(sink)
            return pid, source
        status = 1
        try:
            os.close(source)
            self.result = Scan(ready=True)
            self._counts.clear()
            self._read(share, edge)
            answer = {**self.result.to_json(), "in_window": self.in_window}
            with os.fdopen(sink, "w", encoding="utf-8") as file:
                json.dump(answer, file)
            status = 0
        finally:
            os._exit(status)  # what the parent meant to do at its exit is not ours to do

    def _add(self, pid: int, source: int) -> None:
        """Take over what another process has read."""
        with os.fdopen(source, encoding="utf-8") as file:
            said = file.read()
        _, status = os.waitpid(pid, 0)
        if status or not said:
            self.result.lost.append("a share of the log could not be read")
            return
        found = json.loads(said)
        self.in_window = self.in_window or found["in_window"]
        self.result.bytes += found["bytes"]
        self.result.damaged += found["damaged"]
        self.result.uncounted += found["uncounted"]
        for row in found["unclear"]:
            shape = None if row["shape"] is None else tuple(row["shape"])
            _more(self._unclear_of((shape, row["selected"])), row)
        for row in found["markers"]:
            marker = Marker(row["pid"], tuple(row["shape"]), row["dtype"], row["selected"])
            count = self._counts_of(marker)
            if count is None:
                self.result.uncounted += row["before"] + row["after"]
            else:
                _more(count, row)

    def _read(self, piece: _Piece, edge: int | None) -> None:
        self.in_window = self.in_window or (edge is not None and edge <= piece.begin)
        for position, size in self._runs(piece):
            if edge is not None and not self.in_window and position + size > edge:
                self._take(0, edge - position)
                self._enter_window()
                self._take(edge - position, size)
            else:
                self._take(0, size)
        if edge is not None and edge <= piece.end:
            self._enter_window()

    def _enter_window(self) -> None:
        self.in_window = True
        self._counts.clear()

    def _runs(self, piece: _Piece) -> Iterator[tuple[int, int]]:
        """Fill the buffer with runs of whole lines; yield each run's offset in the file and size.

        A line that does not fit is passed on in parts: its marker, if it has one, is near its end.
        """
        buffer, view = self._buffer, memoryview(self._buffer)
        left, position, rest = piece.end - piece.begin, piece.begin, 0
        self._continued = False
        with opened(piece.path) as file:
            file.seek(piece.begin)
            while left > 0:
                got = file.readinto(view[rest : rest + min(_CHUNK, left)])
                if not got:
                    break
                left, filled = left - got, rest + got
                cut = buffer.rfind(b"\n", rest, filled) + 1
                cut = cut or (filled if filled > _LONGEST else 0)
                if cut:
                    yield position, cut
                    self._continued = buffer[cut - 1] != _NEWLINE
                position, rest = position + cut, filled - cut
                view[:rest] = bytes(view[cut:filled])
        if rest:
            yield position, rest

    def _take(self, begin: int, end: int) -> None:
        self.result.bytes += end - begin
        if self.result.ready:
            return self._markers(begin, end)
        ready = self._buffer.find(READY, begin, end)
        stop = end if ready < 0 else ready
        if self.result.bytes < _START:
            found = (
                name for name, text in SIGNS.items() if self._buffer.find(text, begin, stop) >= 0
            )
            self.result.signs.update(found)
        self._markers(begin, stop)
        if ready >= 0:
            self.result.ready = True
            self._counts.clear()
            self._markers(stop, end)
        return None

    def _markers(self, begin: int, end: int) -> None:
        """Count the markers of a part of the buffer; its first and last line may be cut."""
        buffer = self._buffer
        at = buffer.rfind(MARKER, begin, end)
        if at < 0:
            return
        inside = begin > 0 or self._continued
        first = buffer.find(b"\n", begin, end) + 1 if inside else 0
        last = buffer.rfind(b"\n", begin, end) + 1
        if last <= first:
            self._sweep(buffer, begin, end)
            return
        if inside:
            self._sweep(buffer, begin, first)
        if at >= last:
            self._sweep(buffer, last, end)
            at = buffer.rfind(MARKER, first, last)
        for line, times in _marked(buffer, at, first, last).items():
            self._sweep(line, 0, len(line), times)

    def _sweep(self, data: bytes | bytearray, begin: int, end: int, times: int = 1) -> None:
        at = data.find(MARKER, begin, end)
        while at >= 0:
            after = at + len(MARKER)
            stop = data.find(b"\n", after, end)
            following = data.find(MARKER, after, end if stop < 0 else stop)
            if following < 0:
                self._one(data, at, end if stop < 0 else stop, times)
                at = data.find(MARKER, stop, end) if stop >= 0 else -1
            else:
                self._one(data, at, following, times)
                at = following

    def _one(self, data: bytes | bytearray, at: int, stop: int, times: int) -> None:
        text = bytes(data[at + len(MARKER) : stop])
        payload = self._parsed.get(text)
        if payload is None:
            if len(self._parsed) >= _GROUPS:
                self._parsed.clear()
            payload = self._parsed[text] = _payload(text)
        if payload.unclear is None:
            return
        writer, clear = self._writer(data, at)
        if writer is None:
            return
        if payload.fields is None or not clear:
            self.result.damaged += times
            self._count(self._unclear_of(payload.unclear), times)
            return
        pid = writer or payload.pid
        count = self._counts.get((pid, text))
        if count is None:
            count = self._counts_of(Marker(pid, *payload.fields))
            if count is None:
                self.result.uncounted += times
                self._count(self._unclear_of((None, payload.fields[2])), times)
                return
            if len(self._counts) < _GROUPS:
                self._counts[pid, text] = count
        self._count(count, times)

    def _writer(self, data: bytes | bytearray, at: int) -> tuple[int | None, bool]:
        """Return who wrote the marker at a place, and whether that is clear.

        0 where no prefix names the process, None where it is a text that somebody quotes. Two
        processes may write into one line: the prefix right before a marker is its writer's.
        """
        line = data.rfind(b"\n", 0, at) + 1
        text = bytes(data[line:at])
        cut = text.rfind(b"\r") + 1
        whole = line > 0 or cut > 0 or not (self._continued and data is self._buffer)
        lead = _COLOUR.sub(b"", text[cut:])
        found = _LEAD.search(lead)
        begin = lead[: found.start()] if found else lead
        quoted = (bool(begin) and not whole) or _in_quotes(begin)
        if found:
            return int(found[1] or 0), whole and not quoted
        return (None if quoted else 0), False

    def _count(self, count: Count, times: int) -> None:
        count.window += self.in_window * times
        if self.result.ready:
            count.after += times
        else:
            count.before += times

    def _counts_of(self, marker: Marker) -> Count | None:
        if marker not in self.result.markers and len(self.result.markers) >= _GROUPS:
            return None
        return self.result.markers.setdefault(marker, Count())

    def _unclear_of(self, told: Unclear) -> Count:
        if told not in self.result.unclear and len(self.result.unclear) >= _GROUPS:
            told = None, told[1]
        return self.result.unclear.setdefault(told, Count())


def _more(count: Count, row: Mapping[str, int]) -> None:
    count.before += row["before"]
    count.after += row["after"]
    count.window += row["window"]


def _in_quotes(text: bytes) -> bool:
    """True when what follows a text stands in quotes that the text has opened."""
    return any(found.lastindex is None for found in _QUOTED.finditer(text))


def _marked(data: bytearray, at: int, first: int, stop: int) -> dict[bytes, int]:
    """Return the distinct lines with a marker, and how often each occurs; `at` is the last one.

    Markers come in bursts, and a model repeats its layers: a block of lines that follows itself is
    compared at the speed of memory and counted once. It goes from the end to the begin: a search
    backwards skips what cannot match, at three times the speed of one forwards.
    """
    found: dict[bytes, int] = {}
    lead = near = 0
    stretch = _REACH
    while at >= first:
        begin, end = at - lead, data.find(b"\n", at, stop) + 1
        # Markers are alike: mostly this line begins as far before its marker as the last one did.
        fits = begin > first and data[begin - 1] == _NEWLINE
        line = bytes(data[begin:end]) if fits else b""
        if line not in found:
            begin = data.rfind(b"\n", first, at) + 1 or first
            lead, line = at - begin, bytes(data[begin:end])
        at = data.rfind(MARKER, first, begin)
        near = near + 1 if at >= begin - _NEAR else 0
        if near < _BURST:
            found[line] = found.get(line, 0) + 1
            stretch = _REACH
            continue
        begin, block, times = _block(data, first, begin, end)
        if times > 1:
            stretch = _REACH
        else:  # nothing repeats here: count lines, the more of them the longer that is so
            begin = data.rfind(b"\n", first, max(first, end - stretch)) + 1 or first
            block, stretch = bytes(data[begin:end]), min(2 * stretch, _CHUNK)
        for line, count in Counter(io.BytesIO(block)).items():
            if MARKER in line:
                found[line] = found.get(line, 0) + count * times
        at = data.rfind(MARKER, first, begin)
    return found


def _block(data: bytearray, first: int, begin: int, end: int) -> tuple[int, bytes, int]:
    """Return the block that ends with a line: where its first copy begins, and how many follow."""
    line = bytes(data[begin:end])
    again = data.rfind(line, max(first, begin - _REACH), begin)
    if again < 0:
        return begin, line, 1
    block = bytes(data[again + len(line) : end])
    times = _repeats(data, block, first, end - len(block))
    begin = end - len(block) * times
    if times > 1 and begin > first and data[begin - 1] != _NEWLINE:  # the rest of a longer line
        return begin + len(block), block, times - 1
    return begin, block, times


def _repeats(data: bytearray, block: bytes, first: int, stop: int) -> int:
    """Return how many copies of a block follow each other, with the last that begins at `stop`."""
    times, step = 1, 1
    while data.endswith(block, first, stop):
        stop -= len(block)
        times += step
        block, step = block + block, step * 2
    while step > 1:
        step //= 2
        block = block[: len(block) // 2]
        if data.endswith(block, first, stop):
            stop -= len(block)
            times += step
    return times


def _cut(piece: _Piece, offset: int) -> tuple[_Piece, _Piece]:
    """Cut a piece behind the first line that ends at or after an offset."""
    with opened(piece.path) as file:
        while offset < piece.end:
            file.seek(offset)
            found = file.read(min(_LONGEST, piece.end - offset)).find(b"\n")
            offset += found + 1 if found >= 0 else _LONGEST
            if found >= 0:
                break
    offset = min(offset, piece.end)
    return replace(piece, end=offset), replace(piece, begin=offset)


def _shares(piece: _Piece) -> list[_Piece]:
    """Return the piece, or where it is long and cores are free, one part of it for each."""
    import threading

    size = piece.end - piece.begin
    cores = min(len(os.sched_getaffinity(0)), _MOST_SHARES, size // _SHARE)
    # A process with threads must not fork: what another thread holds stays held in the child.
    if cores < 2 or threading.active_count() > 1:
        return [piece]
    shares = []
    for left in range(cores, 1, -1):
        share, piece = _cut(piece, piece.begin + (piece.end - piece.begin) // left)
        shares.append(share)
    return [*shares, piece]


def _payload(text: bytes) -> _Payload:
    """Read what follows a marker's name on its line; a progress bar may follow it in turn."""
    text = _COLOUR.sub(b"", text.partition(b"\r")[0])
    found = _FIELDS.match(text)
    if not found:
        # The name alone, as in the warning of an unknown variable, is no marker.
        return _Payload(None, 0, _rest(text) if b"selected" in text else None)
    shape = _dims(found[2])
    fields = (shape, found[3].decode("ascii"), found[1] in (b"True", b"1"))
    own = _OWN_PID.match(text, found.end())
    return _Payload(fields, int(own[1]) if own else 0, (shape, fields[2]))


def _rest(text: bytes) -> Unclear:
    """Return what is left of a marker that was torn apart."""
    selected, shape = _SELECTED.search(text), _SHAPE.search(text)
    chosen = selected[1] in (b"True", b"1") if selected else None
    return (_dims(shape[1]) if shape else None, chosen)


def _dims(text: bytes) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(rb"\d+", text))


def _pieces(path: str, start: Place | None, end: Place | None, result: Scan) -> Sequence[_Piece]:
    """Return the pieces of the log in the order they were written."""
    files = _generations(path)
    if not files:
        here = os.path.lexists(path)
        result.lost.append(f"{path} is {'no file that can be read' if here else 'not there'}")
        return ()
    first = 0
    begin = 0
    if start is not None and start.inode:
        known = [i for i, (_, found) in enumerate(files) if _same(found, start)]
        if not known:
            result.lost.append("the file in which this start began has been rotated away")
        else:
            first, begin = known[-1], start.offset
    elif start is not None:
        first = len(files) - 1  # there was no log when the place was noted
    if begin > files[first][1].st_size:
        result.lost.append(f"{files[first][0]} was cut to less than the noted offset")
        begin = 0
    elif begin and start is not None and _written_anew(files[first][0], start):
        result.lost.append(f"{files[first][0]} was cut and written anew since the start")
        begin = 0
    pieces = []
    for index in range(first, len(files)):
        name, found = files[index]
        last = end is not None and _same(found, end)
        stop = min(end.offset, found.st_size) if last and end is not None else found.st_size
        pieces.append(_Piece(name, found.st_ino, begin if index == first else 0, stop))
        if last:
            break
    return pieces


def _generations(path: str) -> list[tuple[str, os.stat_result]]:
    """The log and its rotated ancestors (NAME.1, NAME.2, NAME-date), the oldest first."""
    folder, name = os.path.split(path)
    found = []
    try:
        names = os.listdir(folder or ".")
    except FileNotFoundError:
        return []
    for other in names:
        if other == name or re.fullmatch(re.escape(name) + r"[.-][\d.-]+", other):
            full = os.path.join(folder, other)
            try:
                seen = os.stat(full)
            except OSError:  # gone meanwhile, or a link to itself
                continue
            if stat.S_ISREG(seen.st_mode):
                found.append((full, seen))
    return sorted(found, key=lambda item: (item[0] == path, item[1].st_mtime_ns, item[0]))


def _same(found: os.stat_result, place: Place) -> bool:
    return (found.st_dev, found.st_ino) == (place.device, place.inode)
