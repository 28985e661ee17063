"""The verbs about files: facts, check, deploy, verify, restore and status of one site."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .plan import ABSENT, Plan, State
from .receipt import Receipt, interrupted, read_receipt
from .words import Exit, FileState, Refused, Unfit, Verb, digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .apply import Bytecode
    from .audit import Audit
    from .judge import Judgement
    from .lock import Lock, Watch
    from .main import Call
    from .ops import OpsProbe
    from .tree import TreeReader
    from .verify import Row


def check(call: Call) -> None:
    from .judge import look, refuse_conflicts

    receipt = read_receipt(call.tree)
    judged = _judged(call, receipt, look(call.tree, call.plan, receipt))
    if call.request.options.get("contents"):
        from .contents import contents

        call.evidence["contents"] = contents(call.tree, judged)
    refuse_conflicts(judged.conflicts)
    call.evidence["outcome"] = "nothing to do" if judged.nothing else "would change"
    call.exit = Exit.OK if judged.nothing else Exit.DIFFERS


def _judged(call: Call, receipt: Receipt, found: Mapping[str, State]) -> Judgement:
    from .judge import judge, refuse_checkout, refuse_strangers, requirements

    replace = call.request.options.get("replace_drift") or ()
    refuse_strangers(call.plan, replace)
    refuse_checkout(call.tree, call.plan.package)
    call.evidence["requires"] = requirements(call.tree, call.plan.requires)
    python = call.python()
    _refuse_unsearched(call)
    judged = judge(call.tree, call.plan, receipt, python, found, replace=replace)
    _note(call, judged, receipt)
    return judged


def _refuse_unsearched(call: Call) -> None:
    """Raise Unfit where the service would load nothing of what is going to be deployed."""
    if call.unsearched:
        why, mend = call.unsearched
        raise Unfit("a deploy would be of no use here", why=why, fix=mend)


def _note(call: Call, judged: Judgement, receipt: Receipt) -> None:
    call.evidence["met"] = _met(call, judged, receipt)
    call.evidence["conflicts"] = [conflict.to_json() for conflict in judged.conflicts]
    acts = {
        "put": [entry.path for entry in judged.put],
        "drop": list(judged.drop),
        "give back": list(judged.give_back),
        "compile": list(judged.compile),
        "drop pyc": list(judged.drop_pyc),
        "replace drift": list(judged.drifted),
    }
    call.evidence["changes"] = {name: paths for name, paths in acts.items() if paths}


def _met(call: Call, judged: Judgement, receipt: Receipt) -> str:
    """Say in what state the target was met."""
    if interrupted(call.tree):
        return "interrupted"
    if not receipt.exists:
        return "first contact"
    if call.request.plan and receipt.plan != call.request.plan.digest:
        return "other plan"
    if call.request.verb is Verb.RESTORE:
        return "drifted" if judged.conflicts else "deployed"
    return "deployed" if judged.nothing and not judged.conflicts else "drifted"


def deploy(call: Call) -> None:
    from .apply import Bytecode
    from .lock import Lock, Watch

    request, tree = call.request, call.writer()
    watch = Watch(request.line)
    watch.arm()
    bytecode = Bytecode(
        tree, call.plan, call.blobs, python=call.python_path(), timeout=request.timeout
    )
    try:
        # Before the lock: contents that come over a slow line, or one that dies, must not hold it.
        call.blobs.fetch(tree, call.plan, bytecode.begin)
        lock = Lock(tree, request.wait)
        try:
            _recovered(call)
            _bring_about(call, bytecode, lock, watch)
        finally:
            lock.release()
    finally:
        bytecode.cancel()
    _report_files(call)


def _bring_about(call: Call, bytecode: Bytecode, lock: Lock, watch: Watch) -> None:
    from .apply import carry_out, draft_deploy
    from .judge import look, not_as_wanted, refuse_conflicts

    tree, plan = call.writer(), call.plan
    receipt = read_receipt(tree)
    found = look(tree, plan, receipt)
    bytecode.begin(not_as_wanted(plan, found))
    judged = _judged(call, receipt, found)
    refuse_conflicts(judged.conflicts)
    if judged.nothing and receipt.plan == plan.digest:
        call.evidence["outcome"] = "nothing to do"
        return
    _refuse_running(call, judged)
    who = _who(call)
    draft = draft_deploy(
        tree,
        plan,
        call.blobs,
        judged,
        receipt,
        bytecode=bytecode,
        python={key: call.evidence["python"][key] for key in ("tag", "version", "magic")},
        identities=_identities(call),
        incidental=who,
    )
    carry_out(draft, lock, watch, who, call.say)
    call.evidence["outcome"] = "deployed"


def _recovered(call: Call) -> None:
    from .journal import recover

    if done := recover(call.writer()):
        call.evidence["incidental"]["recovered"] = done
        call.say(f"an interrupted call was {done}")


def _identities(call: Call) -> dict[str, str]:
    plan = call.plan
    return {
        "plan": plan.digest,
        "payload": plan.payload,
        "inputs": call.request.inputs,
        "tree": plan.tree,
    }


def _who(call: Call) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "since": call.since(),
        "operator": call.request.operator,
        "plan": call.request.plan.digest if call.request.plan else "",
        "verb": call.request.verb.value,
    }


def _refuse_running(call: Call, judged: Judgement) -> None:
    if call.request.force_running or judged.nothing:
        return
    from .process import holders

    package = call.plan.package
    try:
        found = holders(call.tree.resolved(""), call.tree.resolved(package))
    except OSError:
        return  # no package yet, so nobody runs it
    if found:
        lines = "".join(f"\n    {holder}" for holder in found)
        raise Refused(
            "a process runs from this site",
            why=f"it would go on with the old code:{lines}",
            fix="stop it first; or --force-running, and start it again afterwards",
        )


def _report_files(call: Call) -> None:
    """Add what is on the disk now, read back."""
    from .verify import Row, file_state

    rows = []
    for entry in call.plan.files:
        found = call.tree.state(entry.path)
        rows.append(Row(entry.path, file_state(entry, found), found))
    table = sorted([r.path, r.found.type, r.found.mode, r.found.sha256, r.found.link] for r in rows)
    call.evidence["files"] = [row.to_json() for row in rows]
    call.evidence["tree"] = digest(table)


def verify(call: Call) -> None:
    from .verify import verify as read_back

    tree, plan = call.tree, call.plan
    receipt = read_receipt(tree)
    python = call.python()
    loading = _start_extensions(call)
    try:
        rows, identity = read_back(
            tree,
            plan,
            receipt,
            python,
            call.python_path(),
            strangers=call.strangers,
            recompile=call.request.recompile,
            timeout=call.request.timeout,
        )
    except BaseException:
        if loading is not None:
            loading.cancel()
        raise
    evidence = call.evidence
    evidence["files"] = [row.to_json() for row in rows]
    evidence["tree"] = identity
    evidence["incidental"]["receipt"] = receipt.sha256
    _add_shadowed(evidence, plan.package)
    half_done = interrupted(tree)
    bad = [row for row in evidence["files"] if row["state"] != FileState.OK.value]
    for row in bad:
        call.tell(f"{row['state']}: {row['path']} {row.get('why', '')}".rstrip())
    bad += _harmful(call)
    if loading is not None:
        bad += _add_extensions(call, loading)
    strange = _add_audit(call, call.audit) if call.audit is not None else []
    bad += strange
    if half_done:
        call.say("an interrupted deploy or restore waits to be finished: run deploy again")
    evidence["met"] = _met_verified(receipt, plan, _edited(rows) or bool(strange), half_done)
    evidence["outcome"] = "differs" if bad or half_done else "verified"
    call.exit = Exit.DIFFERS if bad or half_done else Exit.OK


def _harmful(call: Call) -> list[dict[str, Any]]:
    """Say what lies in wait for imports; return what does harm."""
    from .imports import worth_telling

    for trap in worth_telling(call.evidence["traps"]):
        call.tell(f"{trap['kind']}: {trap['where']}: {trap['why']} -> {trap['mend']}")
    return [trap for trap in call.evidence["traps"] if trap["harm"]]


def _add_audit(call: Call, audit: Audit) -> list[dict[str, Any]]:
    """Note whose every file is; return those that should not be there, or not like this."""
    from .audit import lines, summary

    rows = audit.finish()
    if call.request.recompile:
        tag = call.evidence["python"]["tag"]
        rows = audit.prove(rows, tag, call.python_path(), call.request.timeout)
    found = summary(rows, audit.faults, audit.unproven)
    call.evidence["audit"] = found
    for line in lines(found):
        call.tell(line)
    return [*found["files"], *({"fault": fault} for fault in found["faults"])]


def files(call: Call) -> None:
    """List the package as it lies there, for a base that nothing else describes."""
    from .audit import survey

    if read_receipt(call.tree).exists or interrupted(call.tree):
        raise Refused(
            "this target is not as its vendor made it",
            why="an overlay was deployed to it",
            fix="restore it first, or ask a fresh container of the image",
        )
    call.evidence["listing"] = survey(call.tree, call.plan)
    call.evidence["outcome"] = "answered"


def _start_extensions(call: Call) -> OpsProbe | None:
    """Let each extension be imported while the files are read back: torch takes its time."""
    if not call.plan.extensions:
        return None
    from .ops import OpsProbe

    return OpsProbe(
        call.tree,
        call.plan.extensions,
        python=call.python_path(),
        env_script=call.request.env_script,
        env=call.request.env,
    )


def _add_extensions(call: Call, loading: OpsProbe) -> list[dict[str, Any]]:
    """Note what each extension answered; return the answers of those that do not work."""
    answers = loading.finish()
    keep = [(answer.pop("device"), answer.pop("inode")) for answer in answers]
    names = [answer["module"] for answer in answers]
    call.evidence["extensions"] = answers
    call.evidence["incidental"]["extensions"] = dict(zip(names, keep))
    bad = [answer for answer in answers if answer["state"] != "ok"]
    for answer in bad:
        call.tell(f"{answer['state']}: {answer['module']} {answer['why']}")
    return bad


def _edited(rows: list[Row]) -> bool:
    # Right files that nobody loads were edited by nobody.
    return any(row.state not in (FileState.OK, FileState.SHADOWED) for row in rows)


def _met_verified(receipt: Receipt, plan: Plan, edited: bool, half_done: bool) -> str:
    if half_done:
        return "interrupted"
    if not receipt.exists:
        return "first contact"
    if receipt.plan != plan.digest:
        return "other plan"
    return "drifted" if edited else "deployed"


def _add_shadowed(evidence: dict[str, Any], package: str) -> None:
    """Turn an import that comes from elsewhere into a row: right files that nobody loads."""
    places = evidence["origin"].items()
    reasons = [f"from {k}: {v['why']}" for k, v in sorted(places) if v["state"] != "ok"]
    if not reasons:
        return
    path = f"{package}/__init__.py"
    rows = [row for row in evidence["files"] if row["path"] != path]
    row = next((row for row in evidence["files"] if row["path"] == path), {"path": path})
    if row.get("state", "ok") == FileState.OK.value:
        row = {**row, "state": FileState.SHADOWED.value, "why": "; ".join(reasons)}
    evidence["files"] = sorted([*rows, row], key=lambda item: str(item["path"]))


def restore(call: Call) -> None:
    from .apply import carry_out, draft_restore
    from .judge import judge, refuse_conflicts
    from .lock import Lock, Watch

    request, tree = call.request, call.writer()
    watch = Watch(request.line)
    watch.arm()
    lock = Lock(tree, request.wait)
    try:
        _recovered(call)
        receipt = read_receipt(tree)
        if not receipt.exists:
            call.evidence["outcome"] = "nothing to restore"
            return
        judged = judge(tree, None, receipt, {})
        _note(call, judged, receipt)
        refuse_conflicts(judged.conflicts, restoring=True)
        if request.plan:
            _refuse_running(call, judged)
        carry_out(draft_restore(tree, judged, receipt), lock, watch, _who(call), call.say)
        call.evidence["outcome"] = "restored"
    finally:
        lock.release()


def facts(call: Call) -> None:
    tree = call.tree
    room = os.statvfs(tree.site_fd)
    receipt = read_receipt(tree)
    if call.request.plan and call.request.python:
        call.python()
    call.evidence["receipt"] = receipt.identities
    call.evidence["versions"] = _versions(tree)
    call.evidence["incidental"].update(
        euid=os.geteuid(),
        free=room.f_bavail * room.f_frsize,
        boot=_first_line("/proc/sys/kernel/random/boot_id"),
        file_system=_file_system(os.fstat(tree.site_fd).st_dev),
        deployed=receipt.incidental,
    )
    call.evidence["outcome"] = "answered"


def _versions(tree: TreeReader) -> dict[str, str]:
    names = [n for n in tree.names("") if n.endswith(".dist-info")]
    return dict(sorted(n[: -len(".dist-info")].rpartition("-")[::2] for n in names))


def _file_system(device: int) -> str:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1]
    except OSError:
        pass
    return "unknown"


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except OSError:
        return ""


def status(call: Call) -> None:
    """Say what is deployed, without a plan."""
    receipt = read_receipt(call.tree)
    half_done = interrupted(call.tree)
    call.evidence["receipt"] = receipt.identities
    call.evidence["incidental"]["deployed"] = receipt.incidental
    if half_done:
        call.evidence["met"] = "interrupted"
    elif not receipt.exists:
        call.evidence["met"] = "first contact"
    else:
        from .judge import judge

        judged = judge(call.tree, None, receipt, {})
        _note(call, judged, receipt)
        del call.evidence["changes"]
        plan = call.request.plan
        other = plan is not None and plan.digest != receipt.plan
        call.evidence["met"] = (
            "drifted" if _moved(judged, receipt) else "other plan" if other else "deployed"
        )
    call.evidence["outcome"] = "answered"


def _moved(judged: Judgement, receipt: Receipt) -> bool:
    """True where a file is not what was put there: edited, or the base again."""
    ours = {path: receipt.put(path) or ABSENT for path in judged.found}
    return any(not found.same_content(ours[path]) for path, found in judged.found.items())
