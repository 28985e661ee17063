"""Decide what has to change on one target; change nothing.

`judge` is this module's face: it looks at every path first and only then says what to do, so a
file that is neither assumed nor promised refuses the whole plan before a byte moves.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .plan import ABSENT, Plan, PlannedFile, State
from .pyc import Bytecode, cache_file, module_of
from .receipt import Receipt, proven
from .tree import LARGEST, TreeReader, chain, join
from .words import Refused, Unfit, printable

_FOLDER = State(type="folder")
_TOLD = 3  # names of strangers that an error gives


class Conflict(NamedTuple):
    """A file that is neither what the plan assumes nor what it promises."""

    path: str
    assumed: tuple[State, ...]
    promised: State
    found: State
    holds: tuple[str, ...] = ()  # what a folder in a file's place holds that would be lost

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "assumed": [state.shown() for state in self.assumed],
            "promised": self.promised.shown(),
            "found": self.found.shown(),
        }


class Judgement(NamedTuple):
    """What a deploy (or, with an empty plan, a restore) would do; all tuples are sorted by path."""

    found: Mapping[str, State]
    put: tuple[PlannedFile, ...]  # to be written from a blob, or linked
    drop: tuple[str, ...]  # to be removed
    give_back: tuple[str, ...]  # to be given back from the kept originals
    compile: tuple[str, ...]  # modules whose pyc must be made anew
    drop_pyc: tuple[str, ...]  # bytecode to be removed
    conflicts: tuple[Conflict, ...]
    drifted: tuple[str, ...] = ()  # those of `put` and `drop` that only the caller's word allows
    turning: tuple[str, ...] = ()  # files that become folders, and folders that become files

    @property
    def nothing(self) -> bool:
        return not (self.put or self.drop or self.give_back or self.compile or self.drop_pyc)


def look(tree: TreeReader, plan: Plan | None, receipt: Receipt) -> dict[str, State]:
    """Return what is at every path of the plan, and of the deploy before it."""
    paths = sorted({*_paths(plan), *_leaving(plan, receipt)})
    tree.expect(paths)
    return {path: tree.state(path) for path in paths}


def not_as_wanted(plan: Plan, found: Mapping[str, State]) -> list[str]:
    """Return the modules that will have to be written, and so compiled, whatever else is found."""
    return [e.path for e in plan.files if e.compiled and not _is(found[e.path], e.want)]


def judge(
    tree: TreeReader,
    plan: Plan | None,
    receipt: Receipt,
    python: Mapping[str, str],
    found: Mapping[str, State] | None = None,
    *,
    replace: Collection[str] = (),
) -> Judgement:
    """Return what has to change. `plan` None asks for the way back to the originals.

    `python` is the service's interpreter: {"tag", "version", "magic"}; a restore needs none.
    `found` is what `look` has seen already; `replace` names files that may be replaced although
    they are neither what the plan assumes nor what it promises.
    """
    files = plan.files if plan else ()
    leaving = _leaving(plan, receipt)
    found = look(tree, plan, receipt) if found is None else found
    put, drop, conflicts = _planned_work(files, found, receipt, replace)
    give_back, drop_too, conflicts_too = _leaving_work(leaving, found, receipt)
    written = {entry.path for entry in put}
    pycs = Bytecode(tree)
    make, gone = _bytecode_work(tree, files, pycs, written=written, receipt=receipt, python=python)
    for module in _modules_left(plan, receipt):
        gone += pycs.of(module)
    conflicts_too += _immovable(tree, gone)
    going = {*drop, *drop_too, *gone}
    turning, blocked = _turning(tree, [*written, *give_back], going)
    conflicts_too += blocked
    return Judgement(
        found,
        tuple(put),
        tuple(sorted(drop + drop_too)),
        tuple(give_back),
        tuple(sorted(make)),
        tuple(sorted(gone)),
        tuple(sorted(conflicts + conflicts_too, key=lambda conflict: conflict.path)),
        _drifted(files, found, receipt, replace),
        turning,
    )


def _turning(
    tree: TreeReader, coming: Collection[str], going: set[str]
) -> tuple[tuple[str, ...], list[Conflict]]:
    """Return which files become folders or folders files, and what is in the way of others."""
    turning, blocked = set(), []
    emptied = losing_all(tree, going, coming)
    for path in coming:
        if tree.is_own_folder(path):
            turning.add(path)
            if path not in emptied:
                holds = tuple(_strangers(tree, path, going))
                blocked.append(Conflict(path, (ABSENT,), ABSENT, State(type="folder"), holds))
    for folder in sorted({above for path in coming for above in chain(path)}):
        if folder in going:
            turning.add(folder)
        elif tree.exists(folder) and not tree.is_folder(folder):
            blocked.append(Conflict(folder, (_FOLDER,), _FOLDER, tree.state(folder)))
    return tuple(sorted(turning)), blocked


def losing_all(tree: TreeReader, going: Collection[str], coming: Iterable[str]) -> set[str]:
    """Return the folders of which every file goes and into which none comes."""
    kept = {above for path in coming for above in chain(path)}
    left = {above for path in going for above in chain(path)} - kept
    gone = set(going)
    for folder in sorted(left, key=lambda p: (-p.count("/"), p)):
        if gone.issuperset(join(folder, name) for name in tree.names(folder)):
            gone.add(folder)
    return gone - set(going)


def _strangers(tree: TreeReader, folder: str, going: set[str]) -> Iterator[str]:
    for name in tree.names(folder):
        path = join(folder, name)
        if tree.is_own_folder(path) and tree.names(path):
            yield from _strangers(tree, path, going)
        elif path not in going:
            yield path


def _immovable(tree: TreeReader, bytecode: Iterable[str]) -> list[Conflict]:
    """Return what stands where bytecode belongs and can neither be kept nor removed by a rename."""
    states = ((path, tree.stat(path)) for path in bytecode)
    stuck = [path for path, found in states if found and _stuck(found)]
    return [Conflict(path, (ABSENT,), ABSENT, tree.state(path)) for path in stuck]


def _stuck(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) or found.st_size > LARGEST


def _modules_left(plan: Plan | None, receipt: Receipt) -> set[str]:
    """Return the modules that an earlier plan wrote or compiled, and this one leaves."""
    compiled = {module_of(path) for path in receipt.originals if path.endswith(".pyc")}
    compiled |= {module_of(path) for path in receipt.pycs}
    written = {path for path in receipt.originals if path.endswith(".py")}
    return (written | compiled) - _paths(plan)


def _drifted(
    files: Iterable[PlannedFile],
    found: Mapping[str, State],
    receipt: Receipt,
    replace: Collection[str],
) -> tuple[str, ...]:
    """Return the named files that nothing but their name allows to replace."""
    named = [entry for entry in files if entry.path in replace]
    return tuple(e.path for e in named if not _allowed(e, found[e.path], receipt))


def refuse_strangers(plan: Plan, replace: Iterable[str]) -> None:
    """Raise Refused for a name that is no file of the plan: a slip of the pen."""
    if strange := sorted(set(replace) - _paths(plan)):
        raise Refused(
            "--replace-drift names what this plan does not write",
            why=", ".join(map(printable, strange)),
            fix="name files as the refusal lists them, relative to the site",
        )


def _planned_work(
    files: Iterable[PlannedFile],
    found: Mapping[str, State],
    receipt: Receipt,
    replace: Collection[str],
) -> tuple[list[PlannedFile], list[str], list[Conflict]]:
    put, drop, conflicts = [], [], []
    for entry in files:
        state = found[entry.path]
        if _is(state, entry.want):
            continue
        named = entry.path in replace and state.type in ("file", "link", "absent")
        if not (named or _allowed(entry, state, receipt)):
            conflicts.append(Conflict(entry.path, entry.assume, entry.want, state))
        elif entry.want.absent:
            drop.append(entry.path)
        else:
            put.append(entry)
    return put, drop, conflicts


def _leaving_work(
    leaving: Iterable[str], found: Mapping[str, State], receipt: Receipt
) -> tuple[list[str], list[str], list[Conflict]]:
    """Judge the way back of paths that an earlier plan touched and this one does not."""
    give_back, drop, conflicts = [], [], []
    for path in leaving:
        original, ours = receipt.original(path) or ABSENT, receipt.put(path) or ABSENT
        if found[path] == original:
            continue  # somebody put it back already
        if not found[path].same_content(ours):
            conflicts.append(Conflict(path, (ours,), original, found[path]))
        elif original.absent:
            drop.append(path)
        else:
            give_back.append(path)
    return give_back, drop, conflicts


def _is(state: State, want: State) -> bool:
    return state.same_content(want) and (want.type != "file" or state.mode == want.mode)


def _allowed(entry: PlannedFile, state: State, receipt: Receipt) -> bool:
    """True where the plan may write: what it assumes or promises, or what we put there ourselves.

    What we put there counts only over an original that this plan assumes, too: else a restore would
    lead back to a base that the plan knows nothing of.
    """
    expected = (*entry.assume, entry.want)
    if any(state.same_content(other) for other in expected):
        return True
    ours, original = receipt.put(entry.path), receipt.original(entry.path)
    if ours is None or original is None or not state.same_content(ours):
        return False
    if receipt.originals[entry.path].get("drifted"):
        return True
    return any(original.same_content(other) for other in expected)


def _paths(plan: Plan | None) -> set[str]:
    return {entry.path for entry in plan.files} if plan else set()


def _leaving(plan: Plan | None, receipt: Receipt) -> list[str]:
    """Return what an earlier plan touched and this one does not; bytecode follows its module."""
    rest = set(receipt.originals) - _paths(plan)
    return sorted(path for path in rest if not path.endswith(".pyc"))


def _bytecode_work(
    tree: TreeReader,
    files: Iterable[PlannedFile],
    pycs: Bytecode,
    *,
    written: set[str],
    receipt: Receipt,
    python: Mapping[str, str],
) -> tuple[list[str], list[str]]:
    """Return the modules to compile, and the bytecode to remove."""
    make: list[str] = []
    gone: list[str] = []
    for entry in files:
        if not entry.path.endswith(".py"):
            continue
        present = pycs.of(entry.path)
        wanted = ""
        if entry.compiled:
            wanted = cache_file(entry.path, python["tag"])
            if entry.path in written or not proven(tree, wanted, entry.want, receipt, python):
                make.append(entry.path)
                wanted = ""
        gone += [path for path in present if path != wanted]
    return make, gone


def refuse_conflicts(conflicts: Iterable[Conflict], *, restoring: bool = False) -> None:
    """Raise Refused naming every conflict with its three digests."""
    listed = list(conflicts)
    if not listed:
        return
    lines = "".join(f"\n    {_line(conflict)}" for conflict in listed)
    fix = (
        "look at these files; accept a vendor's by name in the manifest, install the others of the"
        " base anew, or `deploy --replace-drift FILE` (its bytes are kept, and a restore gives them"
        " back: they are not the base's)"
    )
    if restoring:  # which writes none of a plan's files, and so has nothing to replace them with
        fix = (
            "look at these files; put back what was deployed, or `deploy --replace-drift FILE`"
            " (its bytes are kept) and restore then, which gives those bytes back"
        )
    are = "file is" if len(listed) == 1 else "files are"
    raise Refused(
        f"{len(listed)} {are} neither what the plan assumes nor what it promises",
        why=f"somebody else changed them, or the target has another base:{lines}",
        fix=fix,
    )


def _line(conflict: Conflict) -> str:
    assumed = " or ".join(short(state) for state in conflict.assumed)
    promised, found = short(conflict.promised), short(conflict.found)
    if conflict.holds:
        first = ", ".join(map(printable, conflict.holds[:_TOLD]))
        more = f" and {len(conflict.holds) - _TOLD} more" if len(conflict.holds) > _TOLD else ""
        found += f" with {first}{more}, which nobody planned: move it away"
    return f"{printable(conflict.path)}: assumed {assumed}, promised {promised}, found {found}"


def short(state: State) -> str:
    """Return a state in a few characters, for people."""
    if state.type == "file":
        return state.sha256[:12]
    return f"link {printable(state.link)}" if state.type == "link" else state.type


def refuse_checkout(tree: TreeReader, package: str) -> None:
    """Raise Refused when the package is a link into a git checkout.

    A deploy would write into somebody's sources, and equal bytes there prove no deploy at all.
    """
    try:
        place = tree.resolved(package)
    except OSError:
        return  # no package yet
    if place == os.path.join(tree.resolved(""), package):
        return
    folder = place
    while folder not in (tree.root, "/"):
        if os.path.lexists(os.path.join(folder, ".git")):
            raise Refused(
                f"the site's {package} is a link into a source checkout",
                why=f"{printable(tree.visible(package))} leads to {printable(place)}: source and"
                " target are the same files, nothing was deployed",
                fix="install the package into the site, and deploy to that",
            )
        folder = os.path.dirname(folder)


def requirements(tree: TreeReader, requires: Mapping[str, str]) -> dict[str, str]:
    """Return the versions found in the site; raise Unfit naming every one that is not as asked."""
    folders: dict[str, list[str]] = {}
    for name in tree.names(""):
        if name.endswith(".dist-info"):
            dist = _normal(name[: -len(".dist-info")].rpartition("-")[0])
            folders.setdefault(dist, []).append(name)
    faults, versions = [], {}
    for name, wanted in sorted(requires.items()):
        places = folders.get(_normal(name), [])
        found = [version_of(tree, place) for place in places]
        versions[name] = ", ".join(found)
        if len(places) > 1:
            faults.append(f"{name} stands there {len(places)} times: {', '.join(places)}")
        elif not found:
            faults.append(f"{name} {wanted} is not installed in it")
        elif not _fits(found[0], wanted):
            faults.append(f"{name} is {found[0]}, the plan was made for {wanted}")
    if faults:
        raise Unfit(
            f"the site {tree.visible('')} is not the plan's base",
            why="; ".join(faults),
            fix="deploy to a target made from the base image, or plan against this base",
        )
    return versions


def version_of(tree: TreeReader, dist_info: str) -> str:
    try:
        text = tree.read(f"{dist_info}/METADATA").decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return "unknown (no METADATA)"
    for line in text.splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        if key.strip().lower() == "version":
            return value.strip()
    return "unknown (no Version)"


def _fits(found: str, wanted: str) -> bool:
    # The local version may follow: 0.18.1+das.dtk2604 is 0.18.1.
    return found == wanted or ("+" not in wanted and found.partition("+")[0] == wanted)


def _normal(name: str) -> str:
    # As PyPI compares names: case and runs of - _ . do not matter.
    parts = name.lower().replace("_", "-").replace(".", "-").split("-")
    return "-".join(part for part in parts if part)
