"""manifest + lock -> plan -> bundle -> carrier -> agent -> evidence -> report. START READING HERE.

Each function is one thing that an operator can ask for; its lines are the stages. A lock is applied
by default, and nothing here re-resolves silently: what differs from the lock stops the call.
"""

from __future__ import annotations

import fcntl
import getpass
import io
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from deploy import bundle as bundles
from deploy import fleet, gates, inventory, listing, pinning, report, source, submission, wheel
from deploy.agent.words import Verb, canonical, digest
from deploy.bundle import Bundle
from deploy.carriers import Carrier, Request, in_turn
from deploy.carriers.container import parse_container, parse_image
from deploy.carriers.local import lay_root, parse_local
from deploy.commands import addressed
from deploy.console import say
from deploy.difference import LARGEST, side_of, told_side, unified
from deploy.document import shown
from deploy.errors import BadValues, BundleError, Differs, StaleLock
from deploy.evidence import Evidence, pasted, require_answer
from deploy.gates import Gate, Visit
from deploy.kernels import order
from deploy.layout import HERE, Layout
from deploy.lock import ABSENT, Lock, check_fresh, differences, read_lock, write_lock
from deploy.regular import read_regular
from deploy.submission import Submission
from deploy.values import PathClass

_EVIDENCE = 64 * 2**20  # bytes; what an agent may say over ssh, too
_NO_SERVICE = "no service was started from this target"
_NOT_COMPILED = "a kernel source changed, and the manifest has no `kernels:` to compile it with"


# --- what an operator can ask for -----------------------------------------------------------------


def plan(name: str, layout: Layout = HERE, *, worktree: bool = False) -> Submission:
    """Resolve a manifest and say what its plan would be; no lock is needed."""
    return submission.resolve(submission.load(name, layout), layout, worktree=worktree)


def lock(name: str, layout: Layout = HERE) -> tuple[Lock, bool]:
    """Resolve a manifest and pin everything; return the lock and whether the file changed."""
    found = plan(name, layout)
    for own in listing.unlike_base(found.plan, found.base):
        say(
            f"{found.name}: the vendor's own {own.path} ({own.sha256}) is not the base commit's;"
            " a deploy refuses it until overlay.accept names this file with this sha256"
        )
    if left_out := _left_out(found):
        say(left_out)
    packed = _pack(found)
    path = layout.lock(found.name)
    expect = {**_expect(found, packed), **pinning.expect(found, packed, _expected_before(path))}
    made = Lock(inputs=found.inputs, expect=expect)
    changed = write_lock(path, made)
    bundles.drop_older(layout.out, packed)
    return made, changed


def _expected_before(path: Path) -> Mapping[str, Any]:
    """What the lock that is there expects; nothing where it cannot be read."""
    try:
        return read_lock(path).expect
    except StaleLock:
        return {}


def diff(
    name: str, to: str, layout: Layout = HERE, *, worktree: bool = False
) -> tuple[list[Visit], dict[str, str]]:
    """Check each target, and return target -> the diff from its own bytes to the plan's."""
    found = plan(name, layout, worktree=worktree)
    request = Request(verb=Verb.CHECK, options={"contents": True})
    visits = _each(found, _pack(found), _targets(found, to), [request])
    return visits, {v.target: _diff(found, v.evidence) for v in visits if v.evidence is not None}


def _diff(found: Submission, evidence: Evidence) -> str:
    rows = evidence.raw.get("contents") or {}
    changes = evidence.raw.get("changes") or {}
    paths = {*rows, *changes.get("put", ())}
    wanted = {e.path: e.want for e in found.plan.files if e.path in paths and not e.want.absent}
    small = {w.sha256 for w in wanted.values() if w.type == "file" and w.size <= LARGEST}
    texts = {sha: io.BytesIO() for sha in sorted(small)}
    fill(found)((sha, bundles.Sink(text)) for sha, text in texts.items())
    new = {
        path: side_of(w, texts[w.sha256].getvalue() if w.sha256 in texts else None)
        for path, w in wanted.items()
    }
    return unified({path: told_side(row) for path, row in rows.items()}, new, ("target", "plan"))


def list_base(name: str, to: str, layout: Layout = HERE) -> tuple[Path, bool]:
    """Write manifests/NAME.files from a target that is as its vendor made it; say if it changed.

    The lock is not needed: this is what a lock of a vendor's image is made with.
    """
    found = plan(name, layout)
    targets = _targets(found, to)
    if len(targets) != 1:
        raise BadValues(
            "the files of one target are listed at a time",
            why=f"-t names {len(targets)}",
            fix="name the one that is as its vendor made it",
        )
    [target] = targets
    said = target.deliver(_pack(found), Request(verb=Verb.FILES, operator=operator()))
    if said.error is not None:
        raise said.error
    path = layout.files(found.name)
    return path, listing.write(path, str(said.raw["listing"]))


def build_kernels(
    name: str, layout: Layout = HERE, *, where: str = "local", worktree: bool = False
) -> tuple[Submission, Mapping[str, Any]]:
    """Compile the extensions of the head commit; return the submission with what was built."""
    from deploy.kernels import build, container

    manifest = submission.load(name, layout)
    repo, delta, _ = submission.changes(manifest, layout, worktree=worktree)
    request = order.request_of(manifest, repo, delta, layout)
    with container.runner(where, request) as runner:
        done = build.build(request, runner)
    return submission.resolve(manifest, layout, worktree=worktree), done.evidence


def bundle(name: str, layout: Layout = HERE) -> tuple[Submission, Bundle]:
    """Return the locked bundle, made anew unless the pinned one lies there already."""
    found, pinned = locked(name, layout)
    return found, _locked_bundle(found, pinned)


def run(
    name: str,
    to: str,
    request: Request | Callable[[Submission, Bundle], Request],
    layout: Layout = HERE,
    *,
    worktree: bool = False,
) -> list[Visit]:
    """Bring the locked bundle to each target, one verb; a target that fails stops no other.

    `worktree` brings that of the files as they lie in the work tree, as `deploy` does. A restore
    needs no source where the locked bundle lies there: what undoes must not depend on edits.
    """
    undo = isinstance(request, Request) and request.verb is Verb.RESTORE and not worktree
    found, made = (undo and _lying_there(name, layout)) or _chosen_bundle(
        name, layout, worktree=worktree
    )
    asked = request(found, made) if callable(request) else request
    return _each(found, made, _targets(found, to), [asked])


def deploy(
    name: str,
    to: str,
    request: Request,
    layout: Layout = HERE,
    *,
    if_needed: bool = False,
    worktree: bool = False,
) -> list[Visit]:
    """Deploy to each target, then have another process verify it.

    `if_needed` verifies first and leaves a target alone that is as planned. `worktree` deploys the
    files as they lie in the work tree, past the lock: the edit loop.
    """
    found, made = _chosen_bundle(name, layout, worktree=worktree)
    requests = [request, _as_verify(request)]
    return _each(found, made, _targets(found, to), requests, if_needed=if_needed)


def judge_file(name: str, path: Path, layout: Layout = HERE) -> Visit:
    """Judge evidence that was brought back by hand from a target that no carrier reaches.

    Raises:
        BadValues: the file holds no evidence of a verify.
        Differs: it answers another plan, other inputs or another agent than the locked ones.
    """
    try:
        text = read_regular(path, _EVIDENCE).decode("utf-8", "replace")
    except OSError as err:
        raise BadValues(
            f"cannot read {path}",
            why=err.strerror or str(err),
            fix="save there what `verify` printed on the target",
        ) from err
    found, pinned = locked(name, layout)
    evidence = pasted(text, str(path))
    if evidence.verb is not Verb.VERIFY:
        raise BadValues(
            f"{path} is the evidence of a {evidence.verb.value}",
            why="only a verify reads back what is on the target",
            fix="run the bundle there with `verify --root / > evidence.json`",
        )
    require_answer(evidence, found.plan, str(path))
    wanted = {"inputs": digest(found.inputs), "agent": str(pinned.expect.get("agent", ""))}
    for key, want in wanted.items():
        if (said := str(evidence.raw.get(key, ""))) != want:
            raise Differs(
                f"{path} is not from the locked bundle",
                why=f"its {key} is {said or 'nothing'}, the lock pins {want or 'nothing'}",
                fix="upload what `./inv bundle` names, compare its sha256, and verify again",
            )
    verdicts = _judge(found, evidence)
    met = str(evidence.raw.get("met", ""))
    return Visit(
        target=str(path), evidence=evidence, gates=verdicts, error=evidence.error, met=met,
        name=found.name,
    )  # fmt: skip


def chosen(to: str, *, group: str = "", everyone: bool = False, layout: Layout = HERE) -> str:
    """Return the target list of -t, --group and --all as one text.

    Raises:
        BadValues: more than one of them was given, or there is no such group.
    """
    if sum(map(bool, (to, group, everyone))) > 1:
        raise BadValues(
            "the targets were named in more than one way",
            why="-t, --group and --all each name all the targets",
            fix="give one of them",
        )
    if not (group or everyone):
        return to
    known = inventory.load(inventory.path_of(layout, os.environ))
    return ",".join(f"ssh:{alias}" for alias in known.chosen(group=group, everyone=everyone))


def reproduce(name: str, layout: Layout = HERE) -> tuple[Visit, list[dict[str, str]]]:
    """Re-derive a submission from its lock into a fresh root, and compare every identity.

    Raises:
        Differs: the first link that diverged, with both values.
    """
    found, made, pinned, links = rederive(name, layout)
    links += kernel_links(found)
    with _alone(found):
        root = _lay(found)
        say(f"{found.name}: laid a pristine root at {root}")
        request = Request(verb=Verb.DEPLOY)
        [visit] = _each(found, made, [parse_local(str(root))], [request, _as_verify(request)])
        if visit.error is not None:
            raise visit.error
        assert visit.evidence is not None
        links.append(_link("tree", str(pinned.expect.get("tree", "")), visit.evidence.tree))
        _write_evidence(found, visit, links)
    return visit, links


@contextmanager
def _alone(found: Submission) -> Iterator[None]:
    """Wait until no other reproduce lays, or uses, the root below ``out/NAME``."""
    found.out.mkdir(parents=True, exist_ok=True)
    turn = os.open(found.out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{found.name}: another reproduce is at work; waiting for it")
            fcntl.flock(turn, fcntl.LOCK_EX)
        yield
    finally:
        os.close(turn)


def rederive(
    name: str, layout: Layout = HERE
) -> tuple[Submission, Bundle, Lock, list[dict[str, str]]]:
    """Resolve and pack from the lock alone, and compare every link up to the bundle.

    Raises:
        Differs: the first link that diverged, with both values.
    """
    manifest = submission.load(name, layout)
    pinned = read_lock(layout.lock(manifest.name))
    check_fresh(pinned, manifest)
    found = submission.resolve(manifest, layout)
    say(f"{found.name}: resolved {found.delta.base[:12]}..{found.delta.head[:12]}")
    links = compare(_source_links(found, pinned))
    made = _pack(found)
    say(f"{found.name}: packed {made.path.name}")
    return found, made, pinned, links + compare(_bundle_links(made, pinned))


def kernel_links(found: Submission) -> list[dict[str, str]]:
    """Compile the extensions once more from nothing, and compare them with those that were taken.

    Raises:
        Differs: the bytes are others, and the manifest says `kernels.reproducible: required`.
    """
    kernels = found.manifest.kernels
    if kernels is None or not found.built:
        return []
    say(f"{found.name}: building the extensions once more")
    asked = (found.manifest, found.repo, found.delta, found.layout)
    rows = order.rebuilt(*asked, found.artefacts)
    if kernels.reproducible and (bad := [row for row in rows if row.difference]):
        raise Differs(
            f"a rebuild of {bad[0].path} has other bytes",
            why=f"{bad[0].difference}: {bad[0].first} was taken, {bad[0].again} came out now",
            fix="look for a path, a date or a random name that gets into the code",
        )
    return [
        {**_link(f"kernel {row.path}", row.first, row.again), "note": row.difference}
        for row in rows
    ]


def locked(name: str, layout: Layout = HERE) -> tuple[Submission, Lock]:
    """Resolve a manifest and hold it against its lock.

    Raises:
        StaleLock: there is no lock, it was edited, or today's inputs are not the locked ones.
    """
    manifest = submission.load(name, layout)
    pinned = read_lock(layout.lock(manifest.name))
    check_fresh(pinned, manifest)
    found = submission.resolve(manifest, layout)
    try:
        compare(_source_links(found, pinned))
    except Differs as err:
        fix = f"run `./inv lock -n {found.name}`"
        files = found.layout.files(found.name)
        if "inputs.base_files" in err.what and files.exists():
            fix = f"{fix}: {shown(files)}, a vendor's listing, came or changed after the lock"
        raise StaleLock(err.what, why=err.why, fix=fix) from err
    return found, pinned


# --- stages ---------------------------------------------------------------------------------------


def _expect(found: Submission, made: Bundle) -> dict[str, Any]:
    return {
        "plan": found.plan.digest,
        "payload": found.plan.payload,
        "tree": found.plan.tree,
        "bundle": made.sha256,
        "agent": made.agent,
    }


def _pack(found: Submission) -> Bundle:
    made = bundles.pack(
        found.plan, found.inputs, fill(found), found.layout.out,
        listing=found.base.text, scripts={one.name: one.data for one in found.scripts},
    )  # fmt: skip
    locked = _expected_before(found.layout.lock(found.name)).get("bundle", "")
    bundles.drop_older(found.layout.out, made, locked=str(locked))
    return made


def _lying_there(name: str, layout: Layout) -> tuple[Submission, Bundle] | None:
    """The locked bundle by its pinned digest, with what it says of itself; None if it is gone."""
    manifest = submission.load(name, layout)
    want = str(read_lock(layout.lock(manifest.name)).expect.get("bundle", ""))
    path = _locked_path(layout, manifest.name, want)
    if not path.exists():
        return None
    made = bundles.read(path, pinned=want)
    return submission.of_bundle(manifest, layout, made), made


def _locked_path(layout: Layout, name: str, sha256: str) -> Path:
    return layout.out / f"{name}-{sha256[:12]}.pyz"


def _chosen_bundle(name: str, layout: Layout, *, worktree: bool) -> tuple[Submission, Bundle]:
    if not worktree:
        return bundle(name, layout)
    found = plan(name, layout, worktree=True)
    return found, _pack(found)


def _locked_bundle(found: Submission, pinned: Lock) -> Bundle:
    """The pinned bundle if it lies there, else made anew; either way it has the pinned digest."""
    want = str(pinned.expect.get("bundle", ""))
    path = _locked_path(found.layout, found.name, want)
    if path.exists():
        return bundles.read(path, pinned=want)
    made = _pack(found)
    try:
        compare(_bundle_links(made, pinned))
    except Differs as err:
        raise StaleLock(err.what, why=err.why, fix=err.fix) from err
    return made


def _source_links(found: Submission, pinned: Lock) -> list[tuple[str, str, str]]:
    old = pinned.inputs
    return [
        ("base commit", str(old.get("base", "")), found.delta.base),
        ("head commit", str(old.get("head", "")), found.delta.head),
        ("blobs", digest(old.get("files")), digest(found.inputs["files"])),
        *_other_inputs(old, found.inputs),
        ("inputs", pinned.digest, digest(found.inputs)),
        ("plan", str(pinned.expect.get("plan", "")), found.plan.digest),
        ("payload", str(pinned.expect.get("payload", "")), found.plan.payload),
    ]


def _other_inputs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The inputs without a link of their own that differ: a digest would not say which."""
    linked = ("base", "head", "files")
    was, now = ({key: v for key, v in side.items() if key not in linked} for side in (old, new))
    found = differences(was, now, "inputs")
    return [(place, _shown(before), _shown(after)) for place, before, after in found]


def _shown(value: Any) -> str:
    return "" if value is ABSENT else canonical(value).decode()


def _bundle_links(made: Bundle, pinned: Lock) -> list[tuple[str, str, str]]:
    return [
        # Before the bundle, since a changed agent is the first suspect when only its bytes differ.
        ("agent", str(pinned.expect.get("agent", "")), made.agent),
        ("bundle", str(pinned.expect.get("bundle", "")), made.sha256),
    ]


def compare(links: Sequence[tuple[str, str, str]]) -> list[dict[str, str]]:
    """Return the links as rows; raise Differs at the first that diverged."""
    for link, was, now in links:
        if was != now:
            raise Differs(
                f"the first link that diverged from the lock: {link}",
                why=f"locked {was or 'nothing'}, found {now or 'nothing'}",
                fix=_suspect(link),
            )
    return [_link(*link) for link in links]


def _link(link: str, was: str, now: str) -> dict[str, str]:
    return {"link": link, "locked": was, "found": now}


def _suspect(link: str) -> str:
    if link.startswith("inputs.scripts"):
        return "a template below docker/ changed since the lock: run `./inv lock` if that is meant"
    if link.startswith("inputs.base_files"):
        return "did manifests/NAME.files come or change since? run `./inv lock` if that is meant"
    return _SUSPECTS.get(link, _ANY_SUSPECT)


_ANY_SUSPECT = (
    "read `git log` of manifest, series and lock; run `./inv lock` if the change is meant"
)
_SUSPECTS = {
    "agent": "this product's agent changed since the lock, the payload did not: run `./inv lock`",
    "base commit": "compare the wheel's sha256, or the repository, with the manifest's",
    "head commit": "compare overlay/ with the commit that was locked",
}


def _lay(found: Submission) -> Path:
    base, pinned = found.manifest.base, found.wheel
    if pinned is None:
        raise BadValues(
            f"{found.name} has no base that can be laid on this machine",
            why="its source is a repository; the target's own files are its base",
            fix=f"deploy to one that holds the base: `./inv deploy -n {found.name} -t ssh:ALIAS`"
            " or container:ID",
        )
    root = found.out / "root"
    found.out.mkdir(parents=True, exist_ok=True)
    launch = found.manifest.launch.dir if found.manifest.launch else ""
    lay_root(
        root,
        python=base.python,
        site=base.site,
        launch_dir=launch,
        fill=partial(wheel.unpack, pinned),
    )
    return root


def _targets(found: Submission, to: str) -> list[Carrier]:
    """Return the carriers of a comma list; the default is the root that reproduce left."""
    texts = [text.strip() for text in to.split(",") if text.strip()]
    return [_carrier(text) for text in texts or [_default_target(found)]]


def _default_target(found: Submission) -> str:
    root = found.out / "root"
    if not root.is_dir():
        kinds = "local:ROOT, ssh:ALIAS, container:ID or image:REF"
        lay = f"run `./inv reproduce -n {found.name}`, which lays that root, or "
        raise BadValues(
            f"there is no target for {found.name}",
            why=f"-t names none, and {root}, the default, is not there",
            fix=f"{lay if found.manifest.source.wheel else ''}name one with -t: {kinds}",
        )
    return f"local:{root}"


def _carrier(text: str) -> Carrier:
    kind, _, rest = text.partition(":")
    if kind not in _CARRIERS or not rest:
        raise BadValues(
            f"{text} is no target",
            why="a target is local:ROOT, ssh:ALIAS, container:ID or image:REF",
            fix="name one with -t; several are separated by commas",
        )
    return _CARRIERS[kind](rest)


def _ssh(alias: str) -> Carrier:
    from deploy.carriers.ssh import parse_ssh  # paramiko takes a while to load

    return parse_ssh(alias)


_CARRIERS: dict[str, Callable[[str], Carrier]] = {
    "local": parse_local,
    "ssh": _ssh,
    "container": parse_container,
    "image": parse_image,
}


def _each(
    found: Submission,
    made: Bundle,
    targets: Sequence[Carrier],
    requests: Sequence[Request],
    *,
    if_needed: bool = False,
) -> list[Visit]:
    """Do the requests on every target at once; one that fails stops no other."""

    def work(target: Carrier, tell: fleet.Tell) -> Visit:
        return _visit(found, made, target, requests, tell, if_needed=if_needed)

    results = fleet.each(targets, work, name=lambda target: target.name, outcome=_outcome)
    return [
        _failed(found, target, result) if isinstance(result, BundleError) else result
        for target, result in zip(targets, results, strict=True)
    ]


def _failed(
    found: Submission,
    target: Carrier,
    error: BundleError,
    said: Evidence | None = None,
    met: str = "",
) -> Visit:
    return Visit(
        target=target.name, evidence=said, error=addressed(error, found.name, target.name),
        met=met, worktree=found.worktree, name=found.name,
    )  # fmt: skip


def _outcome(visit: Visit) -> str:
    if visit.error is not None:
        return visit.error.what
    return report.outcome(visit)


def _as_verify(request: Request) -> Request:
    return Request(
        verb=Verb.VERIFY,
        site=request.site,
        python=request.python,
        env_script=request.env_script,
        launch_dir=request.launch_dir,
        operator=request.operator,
        recompile=True,
    )


def _visit(
    found: Submission,
    made: Bundle,
    target: Carrier,
    requests: Sequence[Request],
    tell: fleet.Tell,
    *,
    if_needed: bool = False,
) -> Visit:
    try:
        said = in_turn(target, made, requests, if_needed=if_needed, tell=tell)
        met, last = str(said[0].raw.get("met", "")), said[-1]
        if last.error is not None:
            return _failed(found, target, last.error, last, met)
        require_answer(last, found.plan, target.name)
    except BundleError as err:
        return _failed(found, target, err)
    verified = last.verb is Verb.VERIFY
    verdicts = _judge(found, last) if verified else ()
    visit = Visit(
        target=target.name, evidence=last, gates=verdicts, met=met, worktree=found.worktree,
        name=found.name,
    )  # fmt: skip
    # A restore's takes the place of the verify's, which is true of the target no more.
    if verified or last.verb is Verb.RESTORE:
        _write_evidence(found, visit)
    return visit


def _judge(found: Submission, evidence: Evidence) -> tuple[Gate, ...]:
    first = gates.source_complete(found.plan, evidence, found.delta, worktree=found.worktree)
    waived = dict(found.waived)
    if found.manifest.kernels is None and not found.delta.of(PathClass.KERNEL):
        for number in (2, 3, 4):
            waived.setdefault(number, gates.no_kernels(found.delta, found.manifest.kernel_sources))
    compiled = _of_kernels(found, evidence)
    until = _NO_SERVICE
    if not compiled and not waived.keys() >= {2, 3, 4}:
        until = _not_built(found) or _NOT_COMPILED
    return gates.in_order([first, *compiled], waived, until)


def _not_built(found: Submission) -> str:
    """What to say of kernels that the manifest asks for and nobody built; "" where none are."""
    if found.manifest.kernels is None or found.built:
        return ""
    return gates.not_built(found.name, found.delta, worktree=found.worktree)


def _left_out(found: Submission) -> str:
    """The same where the edit changed a kernel, and the manifest gives no reason to leave it."""
    changed = found.delta.of(PathClass.KERNEL)
    return _not_built(found) if changed and 2 not in found.waived else ""


def _of_kernels(found: Submission, evidence: Evidence) -> list[Gate]:
    """Gates 2 to 4, from the build that the plan's extensions were taken from."""
    if left_out := _left_out(found):
        return [gates.kernels_left_out(left_out)]
    kernels = found.manifest.kernels
    if kernels is None or not found.built:
        return []
    asked = (found.manifest, found.repo, found.delta, found.layout)
    audit = order.audited(*asked, found.built)
    return [
        gates.compile_target(found.built, kernels.arch, order.changed(found.delta), audit),
        gates.binary_installed(found.plan, found.built, evidence),
        gates.op_registered(found.plan, evidence),
    ]


def _write_evidence(
    found: Submission, visit: Visit, links: Sequence[Mapping[str, str]] = ()
) -> Path:
    """Write the agent's evidence with our verdicts added; beside its place, then renamed."""
    assert visit.evidence is not None
    document = {
        **visit.evidence.raw,
        "target": visit.target,
        "worktree": found.worktree,
        "source": report.delta_json(found.delta),
        "gates": [gate.to_json() for gate in visit.gates],
        "links": list(links),
    }
    path = evidence_path(found, visit.target)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(report.as_json(document) + "\n", encoding="utf-8")
    beside.replace(path)
    return path


def evidence_path(found: Submission, target: str) -> Path:
    """``out/NAME/evidence.json`` for the default root, ``evidence-TARGET.json`` for any other."""
    return found.out / f"evidence{suffix(found.out, target)}.json"


def suffix(out: Path, target: str) -> str:
    """What a file below ``out/NAME`` that is of one target has in its name."""
    if target == f"local:{(out / 'root').resolve()}":
        return ""
    return "-" + "".join(c if c.isalnum() or c in "-._" else "-" for c in target)


def operator() -> str:
    """Who is asking, for locks and receipts on a target."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user often has a number and no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def fill(found: Submission) -> bundles.Fill:
    """Copies overlay contents from git objects, all of them through one git process."""
    oids = {
        change.new.sha256: change.new.oid
        for change in found.delta.of(PathClass.OVERLAY)
        if change.new is not None
    }

    compiled = {artefact.sha256: artefact.file for artefact in found.artefacts}

    def fill(wanted: Iterator[tuple[str, bundles.Sink]]) -> None:
        # What was compiled is read beside the one git process; a sink hashes what it is given.
        def committed() -> Iterator[tuple[str, bundles.Sink]]:
            for sha, sink in wanted:
                if sha in compiled:
                    with compiled[sha].open("rb") as file:
                        shutil.copyfileobj(file, sink)
                else:
                    yield oids[sha], sink

        source.copy_blobs(found.repo, committed())

    return fill


__all__ = [
    "Visit",
    "build_kernels",
    "bundle",
    "compare",
    "deploy",
    "lock",
    "locked",
    "operator",
    "plan",
    "rederive",
    "reproduce",
    "run",
]
