"""The agent's two doors: `run` for a request that came over any line, `main` for a bundle.

Evidence goes to `out` as one JSON text, a line a step to `err`. Whatever may differ between two
equal targets stands below "incidental".
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from .blobs import Blobs, ZipBlobs
from .journal import read_journal, recover
from .judge import Judgement, judge, refuse_conflicts, requirements
from .plan import Plan
from .probe import Probe, origins
from .receipt import Receipt, read_receipt
from .tree import TreeReader, TreeWriter
from .words import BundleError, Exit, FileState, Refused, Unfit, Verb, digest, printable

SCHEMA = "evidence/1"
_OUTCOMES = {
    Exit.UNFIT: "unfit",
    Exit.STALE: "damaged",
    Exit.REFUSED: "refused",
    Exit.ROLLED_BACK: "rolled back",
    Exit.NEEDS_PERSON: "needs a person",
    Exit.DIFFERS: "differs",
    Exit.INTERRUPTED: "interrupted",
}


class Request:
    """What one call asks for; parsed once, here.

    Keys: verb, plan (plan/1, or none for restore/status/facts), inputs (digest), root; overrides of
    the plan for this host: site, python, env_script, launch_dir; env (added to the service's
    environment); wait (seconds), operator, force_running, recompile, timeout (seconds a child),
    line (descriptor whose end aborts before the commit point), agent (sha256 of these sources),
    options (settings of single verbs), manifest (its meaning, from the bundle's inputs).
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.verb = Verb(raw["verb"])
        self.plan = Plan.parse(raw["plan"]) if raw.get("plan") else None
        self.inputs = str(raw.get("inputs", ""))
        self.root = str(raw.get("root") or "/")
        self.site = self._place(raw, "site")
        self.python = self._place(raw, "python")
        self.env_script = self._place(raw, "env_script")
        self.launch_dir = self._place(raw, "launch_dir")
        self.env = {str(k): str(v) for k, v in raw.get("env", {}).items()}
        self.wait = float(raw.get("wait", 0))
        self.operator = str(raw.get("operator", ""))
        self.force_running = bool(raw.get("force_running"))
        self.recompile = bool(raw.get("recompile"))
        self.timeout = float(raw.get("timeout", 120))
        self.line: int | None = raw.get("line")
        self.options: dict[str, Any] = dict(raw.get("options") or {})
        self.manifest: dict[str, Any] = dict(raw.get("manifest") or {})

    def _place(self, raw: Mapping[str, Any], key: str) -> str:
        return str(raw.get(key) or (getattr(self.plan, key) if self.plan else "") or "")


class Call:
    """One call in progress: what it looked at, and the evidence it gathers."""

    def __init__(self, request: Request, blobs: Blobs, err: IO[str]) -> None:
        self.request, self.blobs, self._err = request, blobs, err
        self.started = time.time()
        self.evidence: dict[str, Any] = _blank(request)
        self.exit = Exit.OK
        kind = TreeWriter if request.verb.writes else TreeReader
        self.tree = kind(request.root, request.site)
        self.probe: Probe | None = None

    def say(self, line: str) -> None:
        _tell(self._err, printable(line))

    def writer(self) -> TreeWriter:
        assert isinstance(self.tree, TreeWriter)
        return self.tree

    @property
    def plan(self) -> Plan:
        if self.request.plan is None:
            raise Unfit("there is no plan", why="the request has none", fix="send one")
        return self.request.plan

    def python_path(self) -> str:
        """Return the service's interpreter on this machine. Raises Unfit when it is not there."""
        python = self.request.python
        folder, _, name = python.rpartition("/")
        try:
            parts = self.tree.resolve(folder or "/", ())
            path = "/".join((self.tree.root.rstrip("/"), *parts, name))
        except OSError:
            path = self.tree.from_root(python)
        if not os.access(path, os.X_OK) or os.path.isdir(path):
            raise Unfit(
                f"the target has no interpreter {printable(python)}",
                why=f"{printable(path)} is not there, or cannot be run",
                fix="set base.python in the manifest (or --python) to the service's interpreter",
            )
        return path

    def ask_python(self) -> None:
        """Start the origin probe; `python` waits for it."""
        request = self.request
        self.probe = Probe(
            self.tree,
            package=self.plan.package,
            python=self.python_path(),
            env_script=request.env_script,
            launch_dir=request.launch_dir,
            env=request.env,
        )

    def python(self) -> dict[str, str]:
        """Return what the service's interpreter is, and note origin and interpreter as evidence."""
        if self.probe is None:
            self.ask_python()
        assert self.probe is not None
        answers = self.probe.finish(self.request.timeout)
        first = next(iter(answers.values()))
        info = {key: str(first[key]) for key in ("tag", "version", "magic")}
        if tuple(map(int, info["version"].split(".")[:2])) < (3, 10):
            raise Unfit(
                "the service's interpreter is too old",
                why=f"{self.request.python} is Python {info['version']}",
                fix="Python 3.10 or newer is needed; see base.python in the manifest",
            )
        self.evidence["origin"] = origins(self.tree, self.plan.package, answers)
        self.evidence["python"] = {
            **info,
            "path": self.request.python,
            "pycache_prefix": first["pycache_prefix"],
            "writes_bytecode": first["writes_bytecode"],
        }
        return info


def run(raw: Mapping[str, Any], blobs: Blobs, out: IO[str], err: IO[str]) -> int:
    """Do what the request asks; write the evidence to `out`; return the exit code."""
    call = None
    try:
        request = Request(raw)
        evidence = _blank(request)
        call = Call(request, blobs, err)
        evidence = call.evidence
        _VERBS[request.verb](call)
        code = call.exit
    except BundleError as error:
        code = error.exit
        evidence = call.evidence if call else _blank_raw(raw)
        evidence["error"] = error.to_json()
        evidence["outcome"] = _OUTCOMES.get(code, "failed")
        _tell(err, str(error))
    finally:
        if call and call.probe:
            call.probe.cancel()
    evidence["exit"] = int(code)
    evidence["agent"] = str(raw.get("agent", ""))
    evidence["incidental"].update(_incidental(call))
    _tell(out, json.dumps(evidence, sort_keys=True, ensure_ascii=True))
    return int(code)


def _tell(stream: IO[str], text: str) -> None:
    # A reader who is gone must not stop a deploy that has passed its commit point.
    try:
        print(text, file=stream, flush=True)
    except OSError:
        pass


def _blank(request: Request) -> dict[str, Any]:
    plan = request.plan
    return {
        "schema": SCHEMA,
        "verb": request.verb.value,
        "outcome": "",
        "exit": 1,
        "name": plan.name if plan else "",
        "plan": plan.digest if plan else "",
        "payload": plan.payload if plan else "",
        "inputs": request.inputs,
        "tree": "",
        "files": [],
        "origin": {},
        "python": {},
        "met": "",
        "error": None,
        "incidental": {},
    }


def _blank_raw(raw: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("name", "plan", "payload", "inputs", "tree", "met", "outcome")
    blank: dict[str, Any] = dict.fromkeys(keys, "")
    return {
        "schema": SCHEMA,
        "verb": str(raw.get("verb", "")),
        **blank,
        "files": [],
        "origin": {},
        "python": {},
        "error": None,
        "incidental": {},
    }


def _incidental(call: Call | None) -> dict[str, Any]:
    info: dict[str, Any] = {"host": os.uname().nodename, "agent_python": sys.version.split()[0]}
    if call:
        info["time"] = _utc(call.started)
        info["duration"] = round(time.time() - call.started, 4)
        info["root"] = call.tree.root
    return info


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _agent_digest(bundle: ZipBlobs) -> str:
    """Return the sha256 over names and bytes of the sources that are running."""
    import hashlib

    found = hashlib.sha256()
    for name in sorted(bundle.names(), key=lambda n: n.removeprefix("agent/")):
        if name == "__main__.py" or name.startswith("agent/"):
            text = b"".join(bundle.entry(name))
            found.update(f"{name.removeprefix('agent/')}\0{len(text)}\0".encode())
            found.update(text)
    return found.hexdigest()


def _check(call: Call) -> None:
    judged = _judged(call)
    refuse_conflicts(judged.conflicts)
    call.evidence["outcome"] = "nothing to do" if judged.nothing else "would change"
    call.exit = Exit.OK if judged.nothing else Exit.DIFFERS


def _judged(call: Call) -> Judgement:
    call.ask_python()
    receipt = read_receipt(call.tree)
    call.evidence["requires"] = requirements(call.tree, call.plan.requires)
    judged = judge(call.tree, call.plan, receipt, call.python())
    _note(call, judged, receipt)
    return judged


def _note(call: Call, judged: Judgement, receipt: Receipt) -> None:
    call.evidence["met"] = _met(call, judged, receipt)
    call.evidence["conflicts"] = [conflict.to_json() for conflict in judged.conflicts]
    acts = {
        "put": [entry.path for entry in judged.put],
        "drop": list(judged.drop),
        "give back": list(judged.give_back),
        "compile": list(judged.compile),
        "drop pyc": list(judged.drop_pyc),
    }
    call.evidence["changes"] = {name: paths for name, paths in acts.items() if paths}


def _met(call: Call, judged: Judgement, receipt: Receipt) -> str:
    """Say in what state the target was met."""
    if read_journal(call.tree) is not None:
        return "interrupted"
    if not receipt.exists:
        return "first contact"
    if call.request.plan and receipt.plan != call.request.plan.digest:
        return "other plan"
    if call.request.verb is Verb.RESTORE:
        return "drifted" if judged.conflicts else "deployed"
    return "deployed" if judged.nothing and not judged.conflicts else "drifted"


def _deploy(call: Call) -> None:
    from .apply import carry_out, draft_deploy
    from .lock import Lock, Watch

    request, tree = call.request, call.writer()
    watch = Watch(request.line)
    watch.arm()
    call.ask_python()
    lock = Lock(tree, request.wait)
    try:
        _recovered(call)
        judged = _judged(call)
        refuse_conflicts(judged.conflicts)
        receipt = read_receipt(tree)
        if judged.nothing and receipt.plan == call.plan.digest:
            call.evidence["outcome"] = "nothing to do"
        else:
            _refuse_running(call, judged)
            who = _who(call)
            draft = draft_deploy(
                tree,
                call.plan,
                call.blobs,
                judged,
                receipt,
                python=call.python_path(),
                timeout=request.timeout,
                identities=_identities(call),
                incidental=who,
            )
            carry_out(draft, lock, watch, who, call.say)
            call.evidence["outcome"] = "deployed"
    finally:
        lock.release()
    _report_files(call)


def _recovered(call: Call) -> None:
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
        "since": _utc(call.started),
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
    from .judge import file_state
    from .verify import Row

    rows = []
    for entry in call.plan.files:
        found = call.tree.state(entry.path)
        rows.append(Row(entry.path, file_state(entry, found), found))
    table = sorted([r.path, r.found.type, r.found.mode, r.found.sha256, r.found.link] for r in rows)
    call.evidence["files"] = [row.to_json() for row in rows]
    call.evidence["tree"] = digest(table)


def _verify(call: Call) -> None:
    from .verify import verify

    call.ask_python()
    tree, plan = call.tree, call.plan
    receipt = read_receipt(tree)
    python = call.python()
    rows, identity = verify(
        tree,
        plan,
        receipt,
        python,
        call.python_path(),
        recompile=call.request.recompile,
        timeout=call.request.timeout,
    )
    evidence = call.evidence
    evidence["files"] = [row.to_json() for row in rows]
    evidence["tree"] = identity
    _add_shadowed(evidence, plan.package)
    interrupted = read_journal(tree) is not None
    bad = [row for row in evidence["files"] if row["state"] != FileState.OK.value]
    for row in bad:
        call.say(f"{row['state']}: {row['path']} {row.get('why', '')}".rstrip())
    if interrupted:
        call.say("an interrupted deploy or restore waits to be finished: run deploy again")
    evidence["met"] = _met_verified(receipt, plan, bool(bad), interrupted)
    evidence["outcome"] = "differs" if bad or interrupted else "verified"
    call.exit = Exit.DIFFERS if bad or interrupted else Exit.OK


def _met_verified(receipt: Receipt, plan: Plan, bad: bool, interrupted: bool) -> str:
    if interrupted:
        return "interrupted"
    if not receipt.exists:
        return "first contact"
    if receipt.plan != plan.digest:
        return "other plan"
    return "drifted" if bad else "deployed"


def _add_shadowed(evidence: dict[str, Any], package: str) -> None:
    """Turn an import that comes from elsewhere into a row: right files that nobody loads."""
    places = evidence["origin"].items()
    reasons = [f"from {k}: {v['why']}" for k, v in places if v["state"] != "ok"]
    if not reasons:
        return
    path = f"{package}/__init__.py"
    rows = [row for row in evidence["files"] if row["path"] != path]
    row = next((row for row in evidence["files"] if row["path"] == path), {"path": path})
    if row.get("state", "ok") == FileState.OK.value:
        row = {**row, "state": FileState.SHADOWED.value, "why": "; ".join(reasons)}
    evidence["files"] = sorted([*rows, row], key=lambda item: str(item["path"]))


def _restore(call: Call) -> None:
    from .apply import carry_out, draft_restore
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
        refuse_conflicts(judged.conflicts)
        if request.plan:
            _refuse_running(call, judged)
        carry_out(draft_restore(tree, judged, receipt), lock, watch, _who(call), call.say)
        call.evidence["outcome"] = "restored"
    finally:
        lock.release()


def _facts(call: Call) -> None:
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


def _status(call: Call) -> None:
    """Say what is deployed, without a plan."""
    receipt = read_receipt(call.tree)
    interrupted = read_journal(call.tree) is not None
    call.evidence["receipt"] = receipt.identities
    call.evidence["incidental"]["deployed"] = receipt.incidental
    if interrupted:
        call.evidence["met"] = "interrupted"
    elif not receipt.exists:
        call.evidence["met"] = "first contact"
    else:
        judged = judge(call.tree, None, receipt, {})
        _note(call, judged, receipt)
        del call.evidence["changes"]
        plan = call.request.plan
        other = plan is not None and plan.digest != receipt.plan
        call.evidence["met"] = (
            "drifted" if judged.conflicts else "other plan" if other else "deployed"
        )
    call.evidence["outcome"] = "answered"


def _service(name: str) -> Callable[[Call], None]:
    """A verb about the service; its modules are loaded by those who ask for it only."""

    def verb(call: Call) -> None:
        from . import serve

        getattr(serve, name)(call)

    return verb


def _doctor(call: Call) -> None:
    from .doctor import examine

    examine(call)


_VERBS = {
    Verb.FACTS: _facts,
    Verb.CHECK: _check,
    Verb.DEPLOY: _deploy,
    Verb.VERIFY: _verify,
    Verb.RESTORE: _restore,
    Verb.STATUS: _status,
    Verb.SERVICE: _service("look"),
    Verb.START: _service("start"),
    Verb.RECORD: _service("note"),
    Verb.STOP: _service("stop"),
    Verb.MARKERS: _service("read_markers"),
    Verb.DOCTOR: _doctor,
}

USAGE = """\
usage: python3 BUNDLE check|deploy|verify|restore|facts|status [options]
       python3 BUNDLE service|start|stop|record|markers|doctor [options]

  --root DIR         the target's file system (default: /)
  --site DIR         overrides of the plan, as seen from that root
  --python FILE
  --env-script FILE
  --launch-dir DIR
  --wait SECONDS     wait for another deploy (default: 0)
  --operator TEXT    who you are, for the next one who asks
  --force-running    change files although a process runs from them
  --recompile        verify by compiling everything afresh
  --timeout SECONDS  for every child process (default: 120)

  --expect clean     (service) anything left of a server is a fault; or running
  --full             (service) hash the model's shards too
  --port PORT        (service) another port than the locked one
  --ready SECONDS    (start) wait so long for the first generation; 0: do not wait
  --grace SECONDS    (stop) wait so long for it to end by itself (default: 60)
  --kill             (stop) then end for good what hangs
  --pid PID          (record) the server that was just started
  --run DIR          (record) the folder of this start
  --options JSON     all of these at once
"""
_FLAGS = {"--force-running", "--recompile"}
_TEXTS = {"--root", "--site", "--python", "--env-script", "--launch-dir", "--operator"}
_NUMBERS = {"--wait", "--timeout"}
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "--expect": str,
    "--port": int,
    "--ready": float,
    "--grace": float,
    "--pid": int,
    "--run": str,
}


def main(argv: list[str] | None = None) -> int:
    """Run a bundle: the zip that this very module was loaded from."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    try:
        request = _parse(argv)
    except ValueError as err:
        print(f"{err}\n{USAGE}", end="", file=sys.stderr)
        return 2
    try:
        # The zip is the folder above agent/: "DIR/NAME.pyz/agent/main.py".
        blobs = ZipBlobs(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        request["plan"] = json.loads(b"".join(blobs.entry("plan.json")))
        if "inputs.json" in blobs.names():
            inputs = json.loads(b"".join(blobs.entry("inputs.json")))
            request["inputs"] = digest(inputs)
            request["manifest"] = inputs.get("manifest")
        request["agent"] = _agent_digest(blobs)
    except BundleError as error:
        print(error, file=sys.stderr)
        return int(error.exit)
    return run(request, blobs, sys.stdout, sys.stderr)


def _parse(argv: list[str]) -> dict[str, Any]:
    if argv[0] not in [verb.value for verb in Verb]:
        raise ValueError(f"unknown verb {argv[0]!r}")
    request: dict[str, Any] = {"verb": argv[0]}
    options: dict[str, Any] = {}
    rest = argv[1:]
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        key = flag[2:].replace("-", "_")
        if flag in _FLAGS and not equals:
            request[key] = True
            continue
        if flag in ("--full", "--kill") and not equals:
            options[key] = True
            continue
        if flag not in {*_TEXTS, *_NUMBERS, *_OPTIONS, "--options"}:
            raise ValueError(f"unknown option {flag!r}")
        if not equals:
            if not rest:
                raise ValueError(f"{flag} needs a value")
            value = rest.pop(0)
        if flag == "--options":
            options.update(json.loads(value))
        elif flag in _OPTIONS:
            options[key] = _OPTIONS[flag](value)
        else:
            request[key] = float(value) if flag in _NUMBERS else value
    return {**request, "options": options}
