"""Evidence, gates and plans -> text for a terminal, or JSON. Pure: it prints nothing."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deploy.agent.audit import lines as audit_lines
from deploy.agent.imports import worth_telling
from deploy.agent.plan import Plan
from deploy.agent.words import Verb, printable
from deploy.commands import is_target, pasteable
from deploy.document import shown
from deploy.evidence import Evidence
from deploy.gates import NOT_PROVEN, UNLOCKED, Gate, Verdict, Visit
from deploy.values import Blob, Change, Delta

if TYPE_CHECKING:
    from deploy.bundle import Bundle
    from deploy.caches import Unit
    from deploy.lock import Lock

_MARKS = {
    Verdict.PASSED: "passed",
    Verdict.FAILED: "FAILED",
    Verdict.NOT_REACHED: "not reached",
    Verdict.NOT_APPLICABLE: "not applicable",
}

_NARROWEST = 20  # columns of a cell that is broken into lines
_WIDEST = 72  # columns that a cell makes others wait for where none is broken: "sha256:<64 hex>"


def as_json(value: Any) -> str:
    """The JSON that `--json` prints: sorted, indented, one final newline left to the printer."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False)


def terminal() -> int:
    """The columns of the terminal that shows our text; 0 when it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else 0


def table(rows: Sequence[Sequence[str]], indent: str = "  ", width: int | None = None) -> str:
    """Columns as wide as their widest cell; nothing is ever cut, since people paste from it.

    Where no terminal shows it, a cell wider than most moves what is behind it in its own row only.
    A terminal of `width` columns (that of stdout) that is narrower gets narrower columns: a cell
    goes on below itself at a blank, and what cannot be broken stands on a line of its own.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    width = terminal() if width is None else width
    room = width - len(indent)
    widths = _narrowed(widths, room) if width else [min(w, _WIDEST) for w in widths]
    starts = [len(indent) + sum(widths[:i]) + 2 * i for i in range(len(widths))]
    return "\n".join(line for row in cells for line in _laid(row, starts, indent, width))


def _narrowed(widths: list[int], room: int) -> list[int]:
    """Take from the widest columns what is too much, down to a width that can be read still."""
    most = max(widths)
    while most > _NARROWEST and sum(min(w, most) + 2 for w in widths) - 2 > room:
        most -= 1
    return [min(w, most) for w in widths]


def _laid(row: Sequence[str], starts: Sequence[int], indent: str, width: int) -> Iterator[str]:
    """Yield one row's lines: a cell at its start, behind a longer one, or on the next line."""
    line = indent
    for cell, start, end in zip(row, starts, [*(s - 2 for s in starts[1:]), width]):
        if not cell.strip():
            continue
        free = line == indent or len(line) + 2 <= start
        placed = line.ljust(start) if free else f"{line}  "
        if not width or len(placed) + len(cell) <= width:
            line = placed + cell
            continue
        longest = max(map(len, cell.split()), default=0)
        fits = start + longest <= width
        at, room = (start, end - start) if fits else (len(indent) + 4, width - len(indent) - 4)
        if len(placed) > at:
            yield line.rstrip()
            placed = " " * at
        first, *more = _wrapped(cell, max(room, longest))
        line = placed + first
        for part in more:
            yield line
            line = " " * at + part
    yield line.rstrip()


def folded(text: str, width: int | None = None) -> str:
    """Break lines at blanks where a terminal would break them anywhere; the rest is indented."""
    width = terminal() if width is None else width
    return "\n".join(part for line in text.split("\n") for part in _folded(line, width))


def _folded(line: str, width: int) -> list[str]:
    if not width or len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    first, *more = _wrapped(line.strip(), max(width - len(indent) - 4, _NARROWEST)) or [""]
    return [indent + first, *(f"{indent}    {part}" for part in more)]


def _wrapped(text: str, width: int) -> list[str]:
    """Break at blanks only: a path or a digest that is too long stays whole."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def plan_text(plan: Plan, delta: Delta) -> str:
    """Every path of the diff with its class, and what the plan will make of it."""
    rows = [(c.cls.value, _act(c), c.path, c.reason) for c in delta.changes]
    span = f"{delta.base[:12]}..{delta.head[:12]}"
    return "\n".join(
        [
            f"{plan.name}: {span}, {len(delta.changes)} changed paths",
            table(rows),
            "",
            table([("plan", plan.digest), ("payload", plan.payload), ("tree", plan.tree)]),
        ]
    )


def plan_json(plan: Plan, delta: Delta) -> dict[str, Any]:
    """The same as `plan/1` with the identities and the whole classed diff beside it."""
    return {
        **plan.to_json(),
        "digest": plan.digest,
        "payload": plan.payload,
        "tree": plan.tree,
        "source": delta_json(delta),
    }


def delta_json(delta: Delta) -> dict[str, Any]:
    return {
        "base": delta.base,
        "head": delta.head,
        "dirty": list(delta.dirty),
        "notes": list(delta.notes),
        "paths": [
            {"path": c.path, "class": c.cls.value, "act": _act(c), "reason": c.reason}
            for c in delta.changes
        ],
    }


def _act(change: Change) -> str:
    if change.old is None:
        return "add"
    if change.new is None:
        return "delete"
    return "modify" if _content(change.old) != _content(change.new) else "mode"


def _content(blob: Blob) -> tuple[str, bool]:
    return blob.oid, blob.mode == "120000"


def gates_text(gates: Iterable[Gate]) -> str:
    """A line a gate, its proofs below it, and what the whole does not prove."""
    lines: list[str] = []
    before = ""
    for gate in gates:
        reason = "as above" if gate.reason == before else printable(gate.reason)
        reason, before = f"  ({reason})" if gate.reason else "", gate.reason
        lines.append(f"  gate {gate.number}  {gate.name:<24} {_MARKS[gate.verdict]}{reason}")
        lines += [f"            - {printable(proof)}" for proof in gate.proofs]
        lines += [f"            ! {printable(fault)}" for fault in gate.faults]
    lines.append("  not proven: " + "; ".join(NOT_PROVEN))
    return "\n".join(lines)


def judged_text(visit: Visit) -> str:
    """The gates of one target alone, where the rest was said in another way."""
    return folded(pasteable(gates_text(visit.gates), visit.name, visit.target))


def files_text(evidence: Evidence) -> str:
    """The files that are not as they should be; one line when all are."""
    if not evidence.faults:
        return f"  {len(evidence.files)} files: all as planned"
    rows = [
        (str(row.get("state", "")), row["path"], str(row.get("why") or row.get("detail") or ""))
        for row in evidence.faults
    ]
    return table(rows)


def links_text(links: Sequence[Mapping[str, str]]) -> str:
    """The identity chain of a reproduction: name, what was locked, what came out."""
    return table([_link_row(link) for link in links])


def _link_row(link: Mapping[str, str]) -> tuple[str, str, str, str]:
    if link["locked"] == link["found"]:
        return link["link"], "same", link["found"], ""
    note = f" ({link['note']})" if link.get("note") else ""
    return link["link"], "DIFFERS", link["found"], f"locked: {link['locked']}{note}"


def lock_text(lock: Lock, changed: bool) -> str:
    return f"lock {'written' if changed else 'unchanged'}\n{table(_expected(lock.expect))}"


def _expected(expect: Mapping[str, Any], group: str = "") -> list[tuple[str, str]]:
    """A row a digest; those of a group follow one another under its name."""
    rows: list[tuple[str, str]] = []
    for key, value in sorted(expect.items()):
        if isinstance(value, Mapping):
            rows += _expected(value, f"{group}{key} ")
        else:
            rows.append((group + key, str(value)))
    return rows


def kernels_text(name: str, built: Mapping[str, Any]) -> str:
    """What a kernel build made, from what, and whether anything was compiled for it."""
    rows = []
    for row in built["artefacts"]:
        facts = row["elf"]
        code = f"{len(facts['bundles'])} bundles for {', '.join(facts['archs'])}"
        rows.append((row["path"], row["sha256"], f"{row['size']} bytes", code))
    cached = built["incidental"]["ccache"]["this_build"]
    done = [
        f"{len(built['log']['compiled'])} compiled, {len(built['log']['hipified'])} converted",
        "ccache " + ", ".join(f"{count} {what}" for what, count in cached.items()),
    ]
    head = f"kernels of {name}: {'built' if built['rebuilt'] else 'nothing to do'}"
    told = [f"warning: {line}" for line in built["warnings"]] + list(built["notes"])
    return "\n".join([head, table(rows), *(f"  {line}" for line in [*done, *told])])


def bundle_text(made: Bundle, python: str) -> str:
    """Where the bundle is, and what to type with it in a web terminal."""
    name = made.path.name
    return "\n".join(
        [
            f"{made.path}  ({made.path.stat().st_size:,} bytes, sha256 {made.sha256})",
            "Without SSH: upload it, then in the container's terminal",
            f"  {python} -I -S {name} check  --root / > check.json",
            f"  {python} -I -S {name} deploy --root / > deploy.json",
            f"  {python} -I -S {name} verify --root / > evidence.json",
            "What they found is on the screen. Bring evidence.json back, to have it judged:",
            f"  ./inv verify -n {made.plan.name} --evidence evidence.json",
        ]
    )


def bundle_json(made: Bundle) -> dict[str, Any]:
    return {
        "schema": "bundle/1",
        "path": str(made.path),
        "bundle": made.sha256,
        "plan": made.plan.digest,
        "payload": made.plan.payload,
        "agent": made.agent,
    }


def visit_text(visit: Visit) -> str:
    """One target: how it ended, what is not as planned, the gates if they were judged."""
    lines = [_header(visit)]
    if visit.error is not None:
        lines.append("  " + "\n  ".join(printable(line) for line in str(visit.error).split("\n")))
    if visit.evidence is not None and visit.evidence.files:
        lines.append(files_text(visit.evidence))
    if visit.evidence is not None:
        if visit.error is None:
            lines += change_lines(visit.evidence)
        lines += import_lines(visit.evidence.raw)
        lines += service_lines(visit.evidence.raw)
    if visit.gates:
        lines.append(gates_text(visit.gates))
    return folded(pasteable(_safe("\n".join(lines)), visit.name, visit.target))


def change_lines(evidence: Evidence) -> list[str]:
    """What a check would change, or a restore changed: a line a path; nothing for other verbs."""
    if evidence.verb not in (Verb.CHECK, Verb.RESTORE):
        return []
    changes = evidence.raw.get("changes") or {}
    rows = [(act, path) for act, paths in sorted(changes.items()) for path in paths]
    return [table(rows)] if rows else []


def _safe(text: str) -> str:
    """Whatever a target said, a terminal shows it and does nothing else with it."""
    return "\n".join(map(printable, text.split("\n")))


def _header(visit: Visit) -> str:
    """What was asked of which target, and how it ended."""
    what = f"{visit.name} {'on' if is_target(visit.target) else 'in'} " if visit.name else ""
    return f"{printable(f'{what}{visit.target}')}: {_headline(visit)}"


def _headline(visit: Visit) -> str:
    if visit.evidence is None:
        return "no evidence"
    met = visit.met or visit.evidence.raw.get("met")
    seen = f", met: {met}" if met else ""
    of = f", of {UNLOCKED}" if visit.worktree else ""
    return printable(f"{visit.evidence.verb.value}: {outcome(visit)}{seen}{of}")


def outcome(visit: Visit) -> str:
    """How it ended in the agent's word, which knows no gate; one that failed is said with it."""
    said = visit.evidence.outcome if visit.evidence is not None else ""
    failed = [gate.number for gate in visit.gates if gate.verdict is Verdict.FAILED]
    return f"{said}, but gate {failed[0]} FAILED" if failed and said == "verified" else said


def fleet_text(visits: Sequence[Visit]) -> str:
    """One line a target: in what state it is, and what that rests on; below it, what to mend."""
    rows = table([("target", "state", "what was found"), *(_fleet_row(v) for v in visits)], "")
    return "\n\n".join([rows, *(_mend(v) for v in visits if v.error is not None)])


def _mend(visit: Visit) -> str:
    return folded(pasteable(_safe(f"{visit.target}: {visit.error}"), visit.name, visit.target))


def _fleet_row(visit: Visit) -> tuple[str, str, str]:
    evidence = visit.evidence
    if evidence is None:
        return visit.target, "no answer", visit.error.what if visit.error else ""
    conflicts = [str(row["path"]) for row in evidence.raw.get("conflicts") or ()]
    changes = evidence.raw.get("changes") or {}
    if conflicts:
        found = f"edited by hand: {', '.join(conflicts)}"
    elif visit.error is not None:
        found = visit.error.what
    elif changes:
        found = ", ".join(f"{len(paths)} to {act}" for act, paths in sorted(changes.items()))
    else:
        found = "as planned"
    if before := evidence.raw.get("before"):
        found = f"had plan {str(before.get('plan', ''))[:12]}; {found}"
    return visit.target, visit.met or evidence.outcome, found


def service_lines(raw: Mapping[str, Any]) -> list[str]:
    """What an agent saw of a service: its processes, listeners, card, answers; or of a doctor."""
    lines = [
        f"  {row['level']:7} {row['about']}: {printable(row['text'])}"
        + (f" -> {printable(row['mend'])}" if row["mend"] else "")
        for row in raw.get("doctor") or ()
    ]
    seen = raw.get("service") or {}
    if raw.get("verb") == Verb.SERVICE.value and "seen" in seen:
        lines += _looked_lines(seen)
    if seen.get("processes"):
        lines.append(table([_process_row(row) for row in seen["processes"]]))
    for row in seen.get("listeners") or ():
        pids = ", ".join(map(str, row["pids"])) or "a process not to be seen"
        lines.append(f"  listens on {row['address']}:{row['port']}: {pids}")
    for card in (seen.get("cards") or {}).get("cards") or ():
        known = {key: "unknown" if card[key] is None else f"{card[key]:g} %" for key in card}
        lines.append(f"  card {card['index']}: memory {known['memory']}, busy {known['busy']}")
    lines += [
        f"  {row['probe']}: {printable(row['error'] or 'passed')}"
        for row in seen.get("answers") or ()
    ]
    if run := seen.get("run"):
        state = run.get("state", "recorded")
        lines.append(f"  run {printable(run.get('folder', ''))}: pid {run['pid']}, {state}")
    for row in seen.get("faults") or ():
        lines.append(f"  {'warning' if row['warning'] else 'fault'}: {printable(row['text'])}")
        if row.get("what") == "no server" and seen.get("log"):
            lines += [f"    {printable(line)}" for line in seen["log"]["tail"]]
    return lines


def _looked_lines(seen: Mapping[str, Any]) -> list[str]:
    """What a look at the service took in: without it, "clean" could mean that nobody looked."""
    hidden = f", {seen['hidden']} of them closed to this user" if seen["hidden"] else ""
    busy = len(seen["processes"])
    found = f"{busy} of interest" if busy else "none serves, measures, profiles or holds a card"
    taken = len(seen["listeners"]) or seen["bound"]
    port = f"port {seen['port']} is {'taken' if taken else 'free'}" if seen["port"] else "no port"
    devices = ", ".join(seen.get("device_files") or ()) or "none on this machine"
    cards = seen.get("cards") or {}
    told = cards.get("error") or f"{len(cards.get('cards') or ())} cards answer"
    return [
        f"  looked at {seen['seen']} processes{hidden}: {found}; {port}",
        f"  device files: {devices}; cards: {printable(told)}",
    ]


def _process_row(row: Mapping[str, Any]) -> list[str]:
    marks = [
        row["role"],
        *(["orphan"] if row["orphan"] else []),
        *(["zombie"] * (row["state"] == "Z")),
    ]
    where = f"in {row['container']}" if row["container"] else ""
    command = printable(" ".join(row["argv"]) or row["comm"])
    memory = f"{row['memory'] >> 20} MiB"
    return [str(row["pid"]), ", ".join(marks), memory, row["started"], where, command]


def diff_text(visits: Sequence[Visit], diffs: Mapping[str, str]) -> str:
    """Each target's headline, and below it the diff from its bytes to the plan's."""
    parts = []
    for visit in visits:
        parts.append(_header(visit))
        if visit.error is not None:
            parts += ["  " + printable(line) for line in str(visit.error).split("\n")]
        parts += diffs.get(visit.target, "").splitlines()
    return "\n".join(parts)


def diff_json(visits: Sequence[Visit], diffs: Mapping[str, str]) -> dict[str, Any]:
    return {
        "schema": "diff/1",
        "targets": [
            {
                "target": visit.target,
                "exit": int(visit.exit),
                "diff": diffs.get(visit.target, ""),
                "error": visit.error.to_json() if visit.error else None,
            }
            for visit in visits
        ],
    }


_MAY_GO = "may go (--yes)"


def caches_text(
    units: Sequence[Unit], gone: Sequence[Unit], engine: Sequence[Mapping[str, Any]]
) -> str:
    """A line a unit: what it is, how large, how old, and what became or would become of it."""
    fate = {unit.path: "removed" for unit in gone}
    rows = [
        (
            unit.kind,
            f"{unit.bytes / 1e6:.1f} MB",
            f"{unit.age:.1f} days",
            f"kept: {unit.kept}" if unit.kept else fate.get(unit.path, _MAY_GO),
            shown(unit.path),
        )
        for unit in units
    ]
    for row in engine:
        became = f"kept: {row['kept']}" if row["kept"] else "removed" if row["removed"] else _MAY_GO
        rows.append((row["kind"], "", "", became, row["id"]))
    free = sum(unit.bytes for unit in units if not unit.kept)
    said = f"{free / 1e6:.1f} MB {'removed' if gone else 'may go'}"
    return "\n".join(filter(None, [table(rows, ""), said]))


def caches_json(
    units: Sequence[Unit], gone: Sequence[Unit], engine: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    removed = {unit.path for unit in gone}
    return {
        "schema": "gc/1",
        "units": [
            {
                "kind": unit.kind,
                "path": str(unit.path),
                "bytes": unit.bytes,
                "days": round(unit.age, 2),
                "kept": unit.kept,
                "removed": unit.path in removed,
            }
            for unit in units
        ],
        "engine": [dict(row) for row in engine],
    }


def import_lines(raw: Mapping[str, Any]) -> list[str]:
    """What decides where imports come from, and what an audit of the package found."""
    found = [
        f"  import from {where}: {place.get('why', '')} -> {place['mend']}"
        for where, place in sorted((raw.get("origin") or {}).items())
        if place.get("mend")
    ]
    for trap in worth_telling(raw.get("traps") or ()):
        mark = "fault" if trap["harm"] else "note"
        found.append(f"  {mark}: {trap['kind']}: {trap['where']}: {trap['why']} -> {trap['mend']}")
    if audit := raw.get("audit"):
        found += [f"  {line}" for line in audit_lines(audit)]
    return [printable(line) for line in found]


def visits_json(visits: Sequence[Visit], links: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
    return {
        "schema": "visits/1",
        "links": list(links),
        "targets": [
            {
                "target": visit.target,
                "exit": int(visit.exit),
                "met": visit.met,
                "worktree": visit.worktree,
                "evidence": dict(visit.evidence.raw) if visit.evidence else None,
                "gates": [gate.to_json() for gate in visit.gates],
                "error": visit.error.to_json() if visit.error else None,
            }
            for visit in visits
        ],
    }


def reproduction_text(visit: Visit, links: Sequence[Mapping[str, str]]) -> str:
    other = sum(link["locked"] != link["found"] for link in links)
    same = "every link is the locked one" if links else "nothing was compared"
    same = f"{other} of {len(links)} links are not the locked ones" if other else same
    return "\n".join([f"identities: {same}", links_text(links), "", visit_text(visit)])
