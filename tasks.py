"""What an operator can ask for: `./inv --list`, and `./inv --help TASK`.

A task is a few lines: look up, call, report. The deployment's own tasks stand in this file; those
of a namespace (serve.start) stand in deploy/tasks/NAMESPACE.py and are named in `_NAMESPACES`.
Import nothing heavy at the top: every call, `--list` included, pays for it.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from invoke import Collection, Context, Task

from deploy.console import say, show_json, task
from deploy.tasks import bench, hosts, profile, serve
from deploy.tasks.develop import bench_self, lint, test  # noqa: F401  gathered below
from deploy.tasks.image import build_image, render  # noqa: F401  gathered below
from deploy.tasks.look import completion, files, gc, show  # noqa: F401  gathered below
from deploy.tasks.report import check_submission, write_report  # noqa: F401  gathered below

if TYPE_CHECKING:
    from deploy.flow import Visit

_NAMESPACES: tuple[ModuleType, ...] = (serve, bench, profile, hosts)


@task(
    example="./inv reproduce -n demo",
    help={"to": "image: rebuild the image instead, and compare it up to the tree inside"},
)
def reproduce(_: Context, name: str = "", to: str = "", json: bool = False) -> int:
    """Rebuild a submission from its lock into a fresh root, deploy it, verify it, compare all."""
    from deploy import flow, report

    if to:
        from deploy.tasks.image import reproduce_image

        return reproduce_image(name, to, json=json)
    visit, links = flow.reproduce(name)
    if json:
        show_json(report.visits_json([visit], links))
    else:
        print(report.reproduction_text(visit, links))
    return visit.exit


@task(example="./inv lock -n demo")
def lock(_: Context, name: str = "", json: bool = False) -> int:
    """Resolve a manifest and pin every input and every expected digest in its lock file."""
    from deploy import flow, report

    pinned, changed = flow.lock(name)
    if json:
        show_json({"schema": "lock/1", "changed": changed, "expect": dict(pinned.expect)})
    else:
        print(report.lock_text(pinned, changed))
    return 0


@task(
    example="./inv plan -n demo",
    help={
        "worktree": "plan the files as they lie in the work tree, for the edit loop",
        "diff": "show a unified diff from the target's own bytes to the plan's",
    },
)
def plan(
    _: Context,
    name: str = "",
    to: str = "",
    diff: bool = False,
    worktree: bool = False,
    json: bool = False,
) -> int:
    """Show every changed path with its class, and the plan that follows. Changes nothing."""
    from deploy import flow, report

    if diff or to:
        visits, diffs = flow.diff(name, to, worktree=worktree)
        if json:
            show_json(report.diff_json(visits, diffs))
        else:
            print(report.diff_text(visits, diffs))
        return _worst(visits)
    found = flow.plan(name, worktree=worktree)
    if json:
        show_json(report.plan_json(found.plan, found.delta))
    else:
        print(report.plan_text(found.plan, found.delta))
    return 0


@task(
    example="./inv build-kernels -n NAME",
    help={
        "where": "local, or container:IMAGE to compile with the tools of the target's image",
        "worktree": "compile the files as they lie in the work tree, for the edit loop",
    },
)
def build_kernels(
    _: Context, name: str = "", where: str = "local", worktree: bool = False, json: bool = False
) -> int:
    """Compile the extensions of the head commit on local disk, and prove what came out."""
    from deploy import flow, report

    found, built = flow.build_kernels(name, where=where, worktree=worktree)
    if json:
        show_json(dict(built))
    else:
        print(report.kernels_text(found.name, built))
    return 0


@task(example="./inv bundle -n demo")
def bundle(_: Context, name: str = "", json: bool = False) -> int:
    """Write out/NAME-<12 hex>.pyz, which deploys and verifies alone; say what to type with it."""
    from deploy import flow, report

    found, made = flow.bundle(name)
    if json:
        show_json(report.bundle_json(made))
    else:
        print(report.bundle_text(made, found.manifest.base.python))
    return 0


@task(example="./inv check -n demo")
def check(_: Context, name: str = "", to: str = "", json: bool = False) -> int:
    """Say what a deploy would change on each target. Changes nothing; exit 10 when it would."""
    return _visit("check", name, to, json=json)


@task(
    example="./inv deploy -n demo --if-needed",
    help={
        "group": "every host of this group of hosts.yaml",
        "all": "every host of hosts.yaml",
        "if_needed": "verify first, and leave alone what is as planned",
        "worktree": "deploy the files as they lie in the work tree, past the lock: the edit loop",
        "wait": "seconds to wait while somebody else deploys",
        "stop_service": "first stop the service that was started there, by its record",
        "force_running": "deploy although a service runs from the site (it keeps the old code)",
        "replace_drift": "replace this file although somebody changed it (restore gives the changed"
        " one back); several by comma",
    },
)
def deploy(
    _: Context,
    name: str = "",
    to: str = "",
    group: str = "",
    all: bool = False,
    if_needed: bool = False,
    worktree: bool = False,
    wait: float = 0.0,
    stop_service: bool = False,
    force_running: bool = False,
    replace_drift: str = "",
    json: bool = False,
) -> int:
    """Make the locked plan true on each target, then verify it from another process."""
    from deploy import flow
    from deploy.agent.words import Verb
    from deploy.carriers import Request

    drifted = [path.strip() for path in replace_drift.split(",") if path.strip()]
    request = Request(
        verb=Verb.DEPLOY,
        operator=flow.operator(),
        wait=wait,
        force_running=force_running,
        options={"replace_drift": drifted} if drifted else {},
    )
    to = flow.chosen(to, group=group, everyone=all)
    if stop_service:
        from deploy import serving

        # One that could not be stopped still runs, so the deploy refuses there.
        for visit in serving.ask(name, to, Verb.STOP, {}, worktree=worktree):
            say(f"{visit.target}: {visit.error.what if visit.error else 'no service runs'}")
    return _show(flow.deploy(name, to, request, if_needed=if_needed, worktree=worktree), json=json)


@task(
    example="./inv verify -n demo --recompile",
    help={
        "recompile": "prove bytecode by compiling anew, not by the digests of the deploy",
        "all": "audit the whole package: every file is ours, the base's, a vendor's, or foreign",
        "evidence": "judge this file, which `python3 BUNDLE verify` wrote on a target, instead",
        "worktree": "verify the files as they lie in the work tree, past the lock: the edit loop",
    },
)
def verify(
    _: Context,
    name: str = "",
    to: str = "",
    recompile: bool = False,
    all: bool = False,
    evidence: str = "",
    worktree: bool = False,
    json: bool = False,
) -> int:
    """Read back every file, its bytecode and the import origin on each target; judge the gates."""
    if evidence:
        from pathlib import Path

        from deploy import flow
        from deploy.errors import BadValues

        asking = {"-t": to, "--recompile": recompile, "--all": all, "--worktree": worktree}
        if given := [flag for flag, value in asking.items() if value]:
            raise BadValues(
                "a file of evidence is judged, or a target is asked: not both",
                why=f"--evidence names a file; {' and '.join(given)} asks a target",
                fix="leave one of them out",
            )
        return _show([flow.judge_file(name, Path(evidence))], json=json)
    options = {"all": True} if all else {}
    call = {"recompile": recompile, "options": options}
    return _visit("verify", name, to, json=json, worktree=worktree, **call)


@task(
    example="./inv restore -n demo",
    help={
        "wait": "seconds to wait while somebody deploys",
        "worktree": "undo with a bundle of the work tree, where no locked one can be had",
    },
)
def restore(
    _: Context,
    name: str = "",
    to: str = "",
    wait: float = 0.0,
    worktree: bool = False,
    json: bool = False,
) -> int:
    """Give each target back what deploys replaced, drifted files too: bytes, modes, times."""
    return _visit("restore", name, to, json=json, worktree=worktree, wait=wait)


@task(example="./inv doctor -n NAME -t ssh:ALIAS")
def doctor(_: Context, name: str = "", to: str = "", json: bool = False) -> int:
    """Examine each target: python, torch, device, toolkit, disks, proxies, left-overs; mends."""
    from deploy import serving
    from deploy.agent.words import Verb

    return _show(serving.ask(name, to, Verb.DOCTOR, {}), json=json)


def _visit(
    verb: str, name: str, to: str, *, json: bool, worktree: bool = False, **options: Any
) -> int:
    """Run one verb of the agent on every target."""
    from deploy import flow
    from deploy.agent.words import Verb
    from deploy.carriers import Request

    request = Request(verb=Verb(verb), operator=flow.operator(), **options)
    return _show(flow.run(name, to, request, worktree=worktree), json=json)


def _show(visits: list[Visit], *, json: bool) -> int:
    """Report on every target; the most urgent exit code decides."""
    from deploy import report

    if json:
        show_json(report.visits_json(visits))
    else:
        print("\n".join(report.visit_text(visit) for visit in visits))
    return _worst(visits)


def _worst(visits: list[Visit]) -> int:
    from deploy.errors import worst

    return worst(visit.exit for visit in visits)


namespace = Collection(*(thing for thing in tuple(globals().values()) if isinstance(thing, Task)))
for _module in _NAMESPACES:
    namespace.add_collection(Collection.from_module(_module))
