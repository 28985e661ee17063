"""Say of every file of the package on a target whose it is; change nothing.

    ours       the plan put it there, and it is as the plan wants it
    base       the base's own bytes: the wheel's, or the base commit's
    vendor     a vendor's own bytes, as the listing of its image pins them
    derived    bytecode of a module that is there, and what an installer notes down for itself;
               what the header of the former says is believed, unless its code was asked for, too
    foreign    anything else: other bytes than the listing has, or a file that nobody knows

What the base has is a listing (see `listing.py`). It comes with the bundle, or is made of the
RECORD that the installed wheel brought, which is held to the digest that the lock pins.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .listing import Entry, installed, normal, of_record, parse, text_of
from .plan import Plan, PlannedFile
from .pyc import Compiler, Job, cache_file, module_of
from .tree import LARGEST, SMALL, TreeReader, join, split
from .words import Refused, printable

OURS, BASE, VENDOR, DERIVED, FOREIGN = "ours", "base", "vendor", "derived", "foreign"
MISSING = "missing"
_PIECE = 1 << 20
_LARGE = 4 << 20  # such files are begun first, so that no core is left alone with one at the end
_MOST_CORES = 4
_INFO = ".dist-info"
_BATCH = 400  # modules whose sources are held in memory at a time
_UNCHECKED = 1  # flags of a pyc that is never compared with its source


class Found(NamedTuple):
    """One thing on the disk. `why` is set where it could not be read, or can be no file of ours."""

    mode: str  # "0644", or "link"
    size: int
    sha256: str = ""
    head: bytes = b""  # the first 16 bytes, of bytecode only
    why: str = ""


class Row(NamedTuple):
    path: str
    owner: str
    why: str = ""


class Walk:
    """Reads every file below some folders, and some single ones, in threads; `finish` waits."""

    def __init__(
        self, tree: TreeReader, folders: Sequence[str], single: Iterable[str] = ()
    ) -> None:
        self._tree, self._found = tree, dict[str, Found]()
        self._failed: list[Exception] = []
        jobs = list(self._jobs(folders, single))
        jobs.sort(key=lambda job: (-job[1] if job[1] > _LARGE else 0, job[0]))
        self._jobs_left = deque(jobs)
        cores = min(_MOST_CORES, len(os.sched_getaffinity(0)))
        # One thread in two takes from the large end: hashing much at a time, it leaves the
        # interpreter to those that open and close many small ones.
        ends = (self._jobs_left.popleft, self._jobs_left.pop)
        self._threads = [
            threading.Thread(target=self._read, args=(ends[number % 2],), daemon=True)
            for number in range(cores)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> dict[str, Found]:
        """Return path -> what is there. Raises what a thread met."""
        for thread in self._threads:
            thread.join()
        if self._failed:
            raise self._failed[0]
        return self._found

    def _jobs(self, folders: Sequence[str], single: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Yield path and size of every file; what is no file is noted at once."""
        inside = tuple(f"{folder}/" for folder in folders)
        for folder in folders:
            yield from self._below(folder)
        for path in single:
            if not path.startswith(inside) and (info := self._tree.stat(path)) is not None:
                yield from self._one(path, info)

    def _below(self, folder: str) -> Iterator[tuple[str, int]]:
        try:
            fd = self._tree.folder(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        with os.scandir(fd) as listed:
            inside = [(entry.name, entry.stat(follow_symlinks=False)) for entry in listed]
        for name, info in sorted(inside, key=lambda pair: pair[0]):
            path = join(folder, name)
            if stat.S_ISDIR(info.st_mode):
                yield from self._below(path)
            else:
                yield from self._one(path, info)

    def _one(self, path: str, info: os.stat_result) -> Iterator[tuple[str, int]]:
        if stat.S_ISREG(info.st_mode):
            yield path, info.st_size
        elif stat.S_ISLNK(info.st_mode):
            folder, name = split(path)
            target = os.fsencode(os.readlink(name, dir_fd=self._tree.folder(folder)))
            self._found[path] = Found("link", len(target), hashlib.sha256(target).hexdigest())
        else:
            self._found[path] = Found("", 0, why="neither a file nor a link")

    def _read(self, take: Callable[[], tuple[str, int]]) -> None:
        # Each thread opens the site anew: a tree's open folders are of one thread.
        tree = None
        try:
            tree = TreeReader(self._tree.root, self._tree.site)
            piece = bytearray(_PIECE)
            while self._jobs_left:
                try:
                    path, _ = take()
                except IndexError:  # another thread took the last one
                    break
                self._found[path] = _hashed(tree, path, piece)
        except Exception as err:  # noqa: BLE001  raised again by `finish`
            self._failed.append(err)
        finally:
            if tree is not None:
                tree.close()


class Audit:
    """The judgement of one package. It is read from the start on; `finish` gives the rows."""

    def __init__(self, tree: TreeReader, plan: Plan, base: Mapping[str, Any], text: str) -> None:
        self.tree, self.plan, self.faults = tree, plan, list[str]()
        self._modules = {entry.path for entry in plan.files}
        self._base, self._text = base, text
        self._walk = Walk(tree, [plan.package])
        self.entries: dict[str, Entry] = {}
        self.unproven = 0  # bytecode files beside the plan whose code nobody compared
        self._found: dict[str, Found] = {}

    def finish(self) -> list[Row]:
        """Return a row for every file, sorted by path; `faults` says what spoils the whole."""
        self.entries = self._listed(self._base, self._text)
        rest = Walk(self.tree, self._dist_infos(), self._beyond())
        self._found = {**self._walk.finish(), **rest.finish()}
        wants = {entry.path: entry for entry in self.plan.files}
        rows = [self._judge(path, found, wants.get(path)) for path, found in self._found.items()]
        rows += self._absent(wants)
        self.unproven = sum(self._beside_the_plan(row) for row in rows)
        return sorted(rows)

    def _beside_the_plan(self, row: Row) -> bool:
        """True for bytecode that verify itself does not look at."""
        if row.owner != DERIVED or not row.path.endswith(".pyc"):
            return False
        return module_of(row.path) not in self._modules

    def prove(self, rows: list[Row], tag: str, command: str, timeout: float) -> list[Row]:
        """Return the rows with every bytecode foreign that is not what its source compiles to.

        What the interpreter of this tag would not run, as the header tells it, is left alone.
        """
        asked = {row.path: job for row in rows if (job := self._job(row, tag)) is not None}
        verdicts: dict[str, str] = {}
        paths = list(asked)
        for at in range(0, len(paths), _BATCH):
            some = paths[at : at + _BATCH]
            _, results = Compiler(command, [asked[path]() for path in some], timeout).finish()
            verdicts.update(zip(some, (verdict for verdict, _ in results)))
        self.unproven -= len(asked)
        return [_convicted(row, verdicts.get(row.path, "same")) for row in rows]

    def _job(self, row: Row, tag: str) -> Callable[[], Job] | None:
        """Return what reads source and bytecode; None where this interpreter is not concerned."""
        source = module_of(row.path)
        level = row.path[: -len(".pyc")].rpartition(".opt-")[2] if ".opt-" in row.path else "0"
        named = cache_file(source, tag if level == "0" else f"{tag}.opt-{level}")
        info = self.tree.stat(source)
        if not self._beside_the_plan(row) or row.path != named or info is None:
            return None
        head = self._found[row.path].head
        stamp = struct.pack("<4xLL", int(info.st_mtime) & 0xFFFFFFFF, info.st_size & 0xFFFFFFFF)
        if head[4:8] == bytes(4) and head[4:16] != stamp:
            return None
        tree = self.tree
        return lambda: (f"body{level}", "", tree.read(source), tree.read(row.path))

    def _listed(self, base: Mapping[str, Any], text: str) -> dict[str, Entry]:
        record = str(base.get("record", ""))
        if record and not text:
            try:
                text = text_of(of_record(self.tree.read(record).decode("utf-8"), record))
            except (OSError, ValueError) as err:
                self.faults.append(f"{record} cannot be read: {err}")
                return {}
        found = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        if not base.get("sha256"):
            self.faults.append("the lock pins no listing of the base: run `./inv lock`")
        elif found != base["sha256"]:
            what = record or "the listing that came with the bundle"
            self.faults.append(f"{what} lists {found}, the lock pins {base['sha256']}")
        else:
            return parse(text)
        return {}

    def _dist_infos(self) -> list[str]:
        """The dist-info folders that the listing names, and any other of the same name."""
        known = {path.partition("/")[0] for path in self.entries}
        names = {_dist(folder) for folder in known if folder.endswith(_INFO)}
        if names:
            names.add(normal(self.plan.package))
        found = [name for name in self.tree.names("") if name.endswith(_INFO)]
        return [name for name in found if _dist(name) in names]

    def _beyond(self) -> list[str]:
        """What the listing names outside of the package: single modules, files of a dist-info."""
        return [path for path in self.entries if not path.startswith(f"{self.plan.package}/")]

    # --- whose it is

    def _judge(self, path: str, found: Found, entry: PlannedFile | None) -> Row:
        if found.why:
            return Row(path, FOREIGN, found.why)
        if entry is not None and _as_wanted(found, entry):
            return Row(path, OURS)
        if path.endswith(".pyc") and path not in self.entries:
            return Row(path, *self._bytecode(path, found))
        known = self.entries.get(path)
        if known is None:
            if installed(path):
                return Row(path, DERIVED)
            return Row(path, FOREIGN, "neither the base nor the plan has such a file")
        why = _other(found, known)
        return Row(path, FOREIGN, why) if why else Row(path, known.owner)

    def _bytecode(self, path: str, found: Found) -> tuple[str, str]:
        folder, name = split(path)
        if split(folder)[1] != "__pycache__":
            return FOREIGN, "bytecode without a source can be imported"
        if join(split(folder)[0], name.split(".")[0] + ".py") not in self._found:
            return FOREIGN, "bytecode of a module that is not there"
        if int.from_bytes(found.head[4:8], "little") == _UNCHECKED:
            return FOREIGN, "bytecode that Python never compares with its source"
        return DERIVED, ""

    def _absent(self, wants: Mapping[str, PlannedFile]) -> Iterator[Row]:
        for path in self.entries.keys() - self._found.keys():
            entry = wants.get(path)
            if entry is None or not entry.want.absent:
                yield Row(path, MISSING, "the base has it")
        gone = {p for p, e in wants.items() if e.want.absent} - self._found.keys()
        yield from (Row(path, OURS) for path in gone)


def _convicted(row: Row, verdict: str) -> Row:
    if verdict == "same":
        return row
    return Row(row.path, FOREIGN, f"bytecode that is not its source's: {verdict}")


def _dist(folder: str) -> str:
    return normal(folder[: -len(_INFO)].rpartition("-")[0])


def _hashed(tree: TreeReader, path: str, piece: bytearray) -> Found:
    try:
        fd = tree.open(path)
    except OSError as err:
        return Found("", 0, why=f"cannot be read: {err.strerror}")
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return Found("", 0, why="neither a file nor a link")
        if info.st_size > (SMALL if path.endswith((".py", ".pyc")) else LARGEST):
            return Found("", 0, why=f"a giant of {info.st_size} bytes, which nobody reads")
        sha, size, head, view = hashlib.sha256(), 0, b"", memoryview(piece)
        while count := os.readv(fd, (piece,)):
            if not size and path.endswith(".pyc"):
                head = bytes(view[:16])
            sha.update(view[:count])
            size += count
        return Found(f"{stat.S_IMODE(info.st_mode):04o}", size, sha.hexdigest(), head)
    except OSError as err:
        return Found("", 0, why=f"cannot be read: {err.strerror}")
    finally:
        os.close(fd)


def _as_wanted(found: Found, entry: PlannedFile) -> bool:
    want = entry.want
    if want.type == "link":
        target = hashlib.sha256(os.fsencode(want.link)).hexdigest()
        return found.mode == "link" and found.sha256 == target
    return want.type == "file" and (found.sha256, found.mode) == (want.sha256, want.mode)


def _other(found: Found, known: Entry) -> str:
    """Say in what a file is not the one that was listed; "" where it is."""
    if found.sha256 != known.sha256 or (found.mode == "link") != (known.mode == "link"):
        return f"sha256 {found.sha256[:12]}, the {known.owner} has {known.sha256[:12]}"
    if known.mode and found.mode != known.mode:
        return f"mode {found.mode}, the {known.owner} has {known.mode}"
    return ""


def survey(tree: TreeReader, plan: Plan) -> str:
    """Return the listing of the package as it lies there, and of its dist-info."""
    infos = [name for name in tree.names("") if name.endswith(_INFO)]
    infos = [name for name in infos if _dist(name) == normal(plan.package)]
    entries = []
    for path, found in Walk(tree, [plan.package, *infos]).finish().items():
        if found.why:
            raise Refused(
                "the package cannot be listed",
                why=f"{printable(tree.visible(path))}: {found.why}",
                fix="mend the cause, or take a fresh container of the image",
            )
        if not (path.endswith(".pyc") or installed(path)):
            entries.append(Entry(path, found.sha256, found.size, found.mode, "vendor"))
    return text_of(entries)


def summary(rows: Iterable[Row], faults: Iterable[str], unproven: int) -> dict[str, Any]:
    """Return what evidence holds of an audit: owner -> paths; foreign and missing with reasons."""
    owners: dict[str, list[str]] = {name: [] for name in (OURS, BASE, VENDOR, DERIVED)}
    bad = []
    for row in rows:
        if row.owner in owners:
            owners[row.owner].append(row.path)
        else:
            bad.append({"path": row.path, "owner": row.owner, "why": row.why})
    return {"owners": owners, "faults": list(faults), "files": bad, "unproven": unproven}


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return an audit's findings as lines for people; the last one counts all."""
    told = [f"{row['owner']}: {printable(row['path'])}: {row['why']}" for row in found["files"]]
    counts = {owner: len(paths) for owner, paths in found["owners"].items()}
    for row in found["files"]:
        counts[row["owner"]] = counts.get(row["owner"], 0) + 1
    if unproven := found.get("unproven"):
        told.append(
            f"not proven: the code of {unproven} bytecode file(s) beside the plan, judged by their"
            " headers (verify --all --recompile compares those of the service's interpreter)"
        )
    every = ", ".join(f"{count} {owner}" for owner, count in counts.items() if count)
    return [*map(printable, found["faults"]), *told, f"files of the package: {every or 'none'}"]
