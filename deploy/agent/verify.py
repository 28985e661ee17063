"""Read back what is on a target and say of every file of the plan whether it is as it must be.

Runs in a process that did not deploy. Bytecode is proven in one of two ways, and the row says in
which: "receipt" (source, pyc and interpreter are those of the deploy, by digest) or "compiled" (a
fresh compile of the source that is there gave the same code).
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .plan import Plan, PlannedFile, State
from .pyc import Bytecode, Compiler, cache_file
from .receipt import Receipt, proven
from .tree import SMALL, TreeReader, join, split
from .words import FileState, digest, printable

_PYC_STATES = {
    "stale": FileState.STALE_PYC,
    "wrong body": FileState.WRONG_PYC_BODY,
}


class Row(NamedTuple):
    """One file's verdict. `why` is for people; `proof` says what a good pyc rests on."""

    path: str
    state: FileState
    found: State
    why: str = ""
    proof: str = ""

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"path": self.path, "state": self.state.value}
        row["found"] = self.found.shown()
        if self.why:
            row["why"] = self.why
        if self.proof:
            row["proof"] = self.proof
        return row


def verify(
    tree: TreeReader,
    plan: Plan,
    receipt: Receipt,
    python: Mapping[str, str],
    command: str,
    *,
    strangers: Mapping[str, str] = MappingProxyType({}),
    recompile: bool = False,
    timeout: float = 300,
) -> tuple[list[Row], str]:
    """Return a row for every file of the plan, in its order, and the identity `tree` found.

    `python` says what the service's interpreter is, `command` how to start it; `strangers` names
    the modules for which it finds something else than the file, and why.
    """
    rows: list[Row] = []
    doubt: list[tuple[int, str]] = []
    names: dict[str, list[str]] = {}
    pycs = Bytecode(tree)
    tree.expect(entry.path for entry in plan.files)
    for entry in plan.files:
        row, pyc = _look(tree, entry, receipt, python, recompile=recompile, pycs=pycs)
        row = _overshadowed(tree, entry, row, python["tag"], names)
        if row.state is FileState.OK and entry.path in strangers:
            row = row._replace(state=FileState.SHADOWED, why=printable(strangers[entry.path]))
        if pyc and row.state is FileState.OK:
            doubt.append((len(rows), pyc))
        rows.append(row)
    _settle_doubt(tree, rows, doubt, command, timeout)
    table = sorted([r.path, r.found.type, r.found.mode, r.found.sha256, r.found.link] for r in rows)
    return rows, digest(table)


def _look(
    tree: TreeReader,
    entry: PlannedFile,
    receipt: Receipt,
    python: Mapping[str, str],
    *,
    recompile: bool,
    pycs: Bytecode,
) -> tuple[Row, str]:
    """Return the verdict, and the pyc that still has to be compared with a fresh compile."""
    found = tree.state(entry.path)
    state = file_state(entry, found)
    row = Row(entry.path, state, found)
    if not entry.path.endswith(".py") or state not in (FileState.OK, FileState.WRONG_MODE):
        return row, ""
    present = pycs.of(entry.path)
    wanted = cache_file(entry.path, python["tag"]) if entry.compiled else ""
    others = [path for path in present if path != wanted]
    if others and entry.want.absent:
        why = f"its bytecode can still be imported or revived: {_list(others)}"
        return row._replace(state=FileState.LEFT_OVER, why=why), ""
    if state is not FileState.OK or entry.want.absent:
        return row, ""
    if others:
        why = f"bytecode that the deploy did not make: {_list(others)}"
        return row._replace(state=FileState.STALE_PYC, why=why), ""
    if not wanted:
        return row, ""
    if not _small_file(tree, wanted):
        return _no_bytecode(row, wanted, there=wanted in present), ""
    if not recompile and proven(tree, wanted, found, receipt, python):
        return row._replace(proof="receipt"), ""
    return row, wanted


def _overshadowed(
    tree: TreeReader, entry: PlannedFile, row: Row, tag: str, names: dict[str, list[str]]
) -> Row:
    """Return the verdict, which is "shadowed" where an import of this module finds its neighbour.

    In one folder a package comes before an extension module, and that before a source file.
    """
    if not entry.compiled or row.state is not FileState.OK:
        return row
    folder, name = split(entry.path)
    stem = name[: -len(".py")]
    if folder not in names:
        names[folder] = tree.names(folder)
    firsts = [other for other in names[folder] if _extends(other, stem, tag)]
    if stem in names[folder] and _is_package(tree, join(folder, stem), tag):
        firsts.insert(0, f"{stem}/")
    if not firsts:
        return row
    why = f"{printable(join(folder, firsts[0]))} is imported in its place"
    return row._replace(state=FileState.SHADOWED, why=why)


def _is_package(tree: TreeReader, folder: str, tag: str) -> bool:
    inside = tree.names(folder)
    known = ("__init__.py", "__init__.pyc")
    return any(name in known or _extends(name, "__init__", tag) for name in inside)


def _extends(name: str, stem: str, tag: str) -> bool:
    """True when `name` is an extension module `stem` that the interpreter of this tag can load."""
    if not (name.startswith(stem + ".") and name.endswith(".so")):
        return False
    rest = name[len(stem) :]
    return rest in (".so", ".abi3.so") or (rest.startswith(f".{tag}-") and "." not in rest[1:-3])


def _no_bytecode(row: Row, wanted: str, *, there: bool) -> Row:
    if there:
        why = f"{wanted} is no file, or a giant: nothing that a deploy makes"
        return row._replace(state=FileState.STALE_PYC, why=why)
    return row._replace(state=FileState.NOT_COMPILED, why=f"there is no {wanted}")


def _small_file(tree: TreeReader, path: str) -> bool:
    found = tree.stat(path)
    return found is not None and stat.S_ISREG(found.st_mode) and found.st_size <= SMALL


def file_state(entry: PlannedFile, state: State) -> FileState:
    """Return what verify says of the file itself; its bytecode is judged apart."""
    want = entry.want
    if state.same_content(want):
        wrong = want.type == "file" and state.mode != want.mode
        return FileState.WRONG_MODE if wrong else FileState.OK
    if want.absent:
        return FileState.LEFT_OVER
    if any(state.same_content(other) for other in entry.assume):
        return FileState.STILL_BASE if not state.absent else FileState.MISSING
    return FileState.MISSING if state.absent else FileState.CHANGED


def _settle_doubt(
    tree: TreeReader, rows: list[Row], doubt: list[tuple[int, str]], command: str, timeout: float
) -> None:
    jobs = []
    for index, pyc in doubt:
        path = rows[index].path
        jobs.append(("check", tree.visible(path), tree.read(path), tree.read(pyc)))
    if not jobs:
        return
    _, results = Compiler(command, jobs, timeout).finish()
    for (index, pyc), (verdict, _) in zip(doubt, results, strict=True):
        if verdict == "same":
            rows[index] = rows[index]._replace(proof="compiled")
        else:
            state = _PYC_STATES.get(verdict, FileState.NOT_COMPILED)
            why = f"{printable(pyc)}: {printable(verdict)}"
            rows[index] = rows[index]._replace(state=state, why=why)


def _list(paths: list[str]) -> str:
    return ", ".join(printable(path) for path in paths)
