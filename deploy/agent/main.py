"""The agent's two doors: `run` for a request that came over any line, `main` for a bundle.

Evidence goes to `out` as one JSON text, a line a step to `err`; what the evidence holds goes to
`err` too, unless the caller prints it. Whatever may differ between two equal targets stands below
"incidental".
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any

from .blobs import Blobs, ZipBlobs
from .plan import Plan, PlannedFile
from .probe import Probe
from .tree import TreeReader, TreeWriter
from .words import (
    LISTING,
    SET_PYTHON,
    BundleError,
    Damaged,
    Exit,
    Interrupted,
    Refused,
    Unfit,
    Verb,
    digest,
    printable,
)

if TYPE_CHECKING:
    from .audit import Audit

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

# Verb -> (module, function). A module is loaded by those who ask for it only: every line of the
# agent is compiled anew on every call, since a bundle carries no bytecode.
_VERBS = {
    Verb.FACTS: ("verbs", "facts"),
    Verb.CHECK: ("verbs", "check"),
    Verb.DEPLOY: ("verbs", "deploy"),
    Verb.VERIFY: ("verbs", "verify"),
    Verb.RESTORE: ("verbs", "restore"),
    Verb.STATUS: ("verbs", "status"),
    Verb.FILES: ("verbs", "files"),
    Verb.SERVICE: ("serve", "look"),
    Verb.SCRIPTS: ("serve", "lay"),
    Verb.START: ("serve", "start"),
    Verb.RECORD: ("serve", "note"),
    Verb.STOP: ("serve", "stop"),
    Verb.MARKERS: ("serve", "read_markers"),
    Verb.DOCTOR: ("doctor", "examine"),
    Verb.MEASURE: ("measure", "measure"),
}
# These ask the service's interpreter, which answers while the rest of the agent is being loaded.
_ASKING = (Verb.CHECK, Verb.DEPLOY, Verb.VERIFY)


class Request:
    """What one call asks for; parsed once, here.

    Keys: verb, plan (plan/1, or none for restore/status/facts), inputs (digest), root; overrides of
    the plan for this host: site, python, env_script, launch_dir; env (added to the service's
    environment); wait (seconds), operator, force_running, recompile, timeout (seconds a child),
    line (descriptor whose end aborts before the commit point), agent (sha256 of these sources),
    options (settings of single verbs), manifest (its meaning, from the bundle's inputs), base_files
    (what the lock pins of the base's listing), listing (its text, where the target has none),
    scripts (what the lock pins of the bundle's own) and by_hand (a person reads `err`: end it with
    a sentence). options.steps_only: somebody prints the evidence, so `err` gets nothing that it
    holds.
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
        self.env = {str(k): str(v) for k, v in (raw.get("env") or {}).items()}
        self.wait = float(raw.get("wait", 0))
        self.operator = str(raw.get("operator", ""))
        self.force_running = bool(raw.get("force_running"))
        self.recompile = bool(raw.get("recompile"))
        self.timeout = float(raw.get("timeout", 120))
        self.line: int | None = raw.get("line")
        self.options: dict[str, Any] = dict(raw.get("options") or {})
        self.manifest: dict[str, Any] = dict(raw.get("manifest") or {})
        self.base_files: dict[str, Any] = dict(raw.get("base_files") or {})
        self.listing = str(raw.get("listing") or "")
        self.scripts: dict[str, Any] = dict(raw.get("scripts") or {})

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
        self.strangers: dict[str, str] = {}  # modules whose import finds something else -> why
        self.unsearched: tuple[str, str] | None = None  # why no import reaches the site, and mend
        self.audit: Audit | None = None

    def say(self, line: str) -> None:
        """Tell a step."""
        _tell(self._err, printable(line))

    def tell(self, line: str) -> None:
        """Tell what the evidence holds too: not to those who print the evidence."""
        if not self.request.options.get("steps_only"):
            self.say(line)

    def since(self) -> str:
        """Return when the call began, in UTC."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started))

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
                fix=f"{SET_PYTHON} to the service's interpreter",
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
            modules=[entry.path for entry in self._asked() if entry.compiled],
        )

    def _asked(self) -> tuple[PlannedFile, ...]:
        # Before a deploy, the modules are not there yet.
        return self.plan.files if self.request.verb is Verb.VERIFY else ()

    def begin_audit(self) -> None:
        """Let threads read the whole package while the rest of the agent is being loaded."""
        from .audit import Audit

        self.audit = Audit(self.tree, self.plan, self.request.base_files, self.request.listing)

    def _note_imports(self, first: dict[str, Any], answers: dict[str, Any]) -> None:
        from .imports import Setting, origins, strangers, traps, unsearched

        request = self.request
        dist = str(request.base_files.get("record", "")).partition(".dist-info/")[0]
        setting = Setting(os.environ, request.env, request.env_script, dist.rpartition("-")[0])
        asked = (self.tree, self.plan.package, first, answers, setting)
        self.evidence["origin"] = origins(*asked)
        self.strangers = strangers(answers)
        self.unsearched = unsearched(self.tree, self.plan.package, answers, setting)
        self.evidence["traps"] = traps(*asked)

    def python(self) -> dict[str, str]:
        """Return what the service's interpreter is, and note origin and interpreter as evidence."""
        if self.probe is None:
            self.ask_python()
        assert self.probe is not None
        first, answers = self.probe.finish(self.request.timeout)
        info = {key: str(first[key]) for key in ("tag", "version", "magic")}
        if tuple(map(int, info["version"].split(".")[:2])) < (3, 10):
            raise Unfit(
                "the service's interpreter is too old",
                why=f"{self.request.python} is Python {info['version']}",
                fix="Python 3.10 or newer is needed; see base.python in the manifest",
            )
        self._note_imports(first, answers)
        self.evidence["python"] = {
            **info,
            "path": self.request.python,
            "pycache_prefix": first["pycache_prefix"],
            "writes_bytecode": first["writes_bytecode"],
        }
        return info


def run(raw: Mapping[str, Any], blobs: Blobs, out: IO[str], err: IO[str]) -> int:
    """Do what the request asks; write the evidence to `out`; return the exit code."""
    # A umask that takes the owner's own rights would lock the agent out of what it makes.
    os.umask(os.umask(0o077) & 0o077)
    call = None
    try:
        call = Call(Request(raw), blobs, err)
        _answer(call)
        code = call.exit
    except (BundleError, OSError, KeyboardInterrupt) as problem:
        error = _told(problem)
        code = error.exit
        evidence = call.evidence if call else _blank_raw(raw)
        evidence["error"] = error.to_json()
        evidence["outcome"] = _OUTCOMES.get(code, "failed")
        if not (raw.get("options") or {}).get("steps_only"):
            _tell(err, str(error))
    else:
        evidence = call.evidence
    finally:
        if call and call.probe:
            call.probe.cancel()
    evidence["exit"] = int(code)
    evidence["agent"] = str(raw.get("agent", ""))
    evidence["incidental"].update(_incidental(call))
    if not _tell(out, json.dumps(evidence, sort_keys=True, ensure_ascii=True)) and not code:
        _tell(err, "nobody could be told: the evidence was not written; run verify to see it")
        code = Exit.NEEDS_PERSON
    elif raw.get("by_hand") and not evidence["error"]:
        from .sentence import sentence

        _tell(err, printable(sentence(evidence)))
    return int(code)


def _answer(call: Call) -> None:
    if call.request.verb in _ASKING:
        call.ask_python()
        if call.request.verb is Verb.VERIFY and call.request.options.get("all"):
            call.begin_audit()
        # What judges the child's answers is loaded while it starts.
        import_module(".imports", __package__)
    module, name = _VERBS[call.request.verb]
    getattr(import_module(f".{module}", __package__), name)(call)


def _told(problem: BundleError | OSError | KeyboardInterrupt) -> BundleError:
    if isinstance(problem, BundleError):
        return problem
    if isinstance(problem, OSError):
        return _unreadable(problem)
    # A deploy or restore has its own handler, which knows how far it came.
    return Interrupted(
        "stopped",
        why="it was ended by SIGINT",
        fix="run it again; no file of the site was changed by it",
    )


def _unreadable(err: OSError) -> Refused:
    # A transaction wraps its own errors; what comes here was met while looking.
    return Refused(
        "the target cannot be read",
        why=f"{printable(str(err.filename or ''))}: {err.strerror}".lstrip(": "),
        fix="mend the cause (owner, mode, disk); nothing was changed",
    )


def _tell(stream: IO[str] | None, text: str) -> bool:
    """Write a line; return whether it was written."""
    # A reader who is gone must not stop a deploy that has passed its commit point.
    if stream is None:
        return False
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _silence(stream)
        return False
    return True


def _silence(stream: IO[str]) -> None:
    # What it still holds would fail once more at the end, and that would decide the exit code.
    try:
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, number)
        os.close(nowhere)
    except (OSError, ValueError):
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
        info["time"] = call.since()
        info["duration"] = round(time.time() - call.started, 4)
        info["root"] = call.tree.root
    return info


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


USAGE = """\
usage: python3 BUNDLE check|deploy|verify|restore|facts|status|files [options]
       python3 BUNDLE scripts|service|start|stop|record|markers|measure|doctor [options]

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
  --all              (verify) audit the whole package: ours, base, vendor or foreign
  --replace-drift FILE  (deploy) replace this file although somebody changed it; may be repeated;
                     a restore gives the changed file back

  --expect clean     (service) anything left of a server is a fault; or running
  --full             (service) hash the model's shards too
  --port PORT        (service) another port than the locked one
  --ready SECONDS    (start) wait so long for the first generation; 0: do not wait
  --grace SECONDS    (stop) wait so long for it to end by itself (default: 60)
  --kill             (stop) then end for good what hangs
  --pid PID          (record) the server that was just started
  --run DIR          (record) the folder of this start
  --options JSON     all of these at once

  --steps-only       say on stderr only what the evidence does not hold
  --help             this text
"""
_FLAGS = {"--force-running", "--recompile"}
_HELP = {"-h", "--help"}
_TEXTS = {"--root", "--site", "--python", "--env-script", "--launch-dir", "--operator"}
_PLACES = _TEXTS - {"--operator"}
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
    if not argv or argv[0] == "help" or _HELP.intersection(argv):
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
        request["plan"] = _document(blobs, "plan.json")
        if "inputs.json" in blobs.names():
            inputs = _document(blobs, "inputs.json")
            request["inputs"] = digest(inputs)
            request["manifest"] = inputs.get("manifest")
            request["base_files"] = inputs.get("base_files")
            request["scripts"] = inputs.get("scripts")
            request["env"] = launch_env(inputs)
        if request["options"].get("all") and LISTING in blobs.names():
            request["listing"] = b"".join(blobs.entry(LISTING)).decode("utf-8", "surrogateescape")
        request["agent"] = _agent_digest(blobs)
    except BundleError as error:
        print(error, file=sys.stderr)
        return int(error.exit)
    return run(request, blobs, sys.stdout, sys.stderr)


def launch_env(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return what the manifest adds to the service's environment."""
    launch = (inputs.get("manifest") or {}).get("launch") or {}
    return {name: str(entry["value"]) for name, entry in (launch.get("env") or {}).items()}


def _document(bundle: ZipBlobs, name: str) -> dict[str, Any]:
    """Return one of the bundle's JSON objects. Raises Damaged."""
    try:
        text = b"".join(bundle.entry(name)).decode("utf-8")  # json would take half a character
        found = json.loads(text)
        # As an escape it is taken still. Like what is no number, it has no digest.
        if any(word in text for word in ("\\u", "NaN", "Infinity")):
            digest(found)
        if isinstance(found, dict):
            return found
        why = f"{name} is no JSON object"
    except (KeyError, ValueError, RecursionError) as err:
        why = f"{name}: {type(err).__name__}: {err}"
    raise Damaged(
        "the bundle is damaged",
        why=printable(why),
        fix="make it again with `./inv bundle`, or upload it again; compare the sha256 first",
    )


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
        if flag in ("--full", "--kill", "--all", "--steps-only") and not equals:
            options[key] = True
            continue
        if flag not in {*_TEXTS, *_NUMBERS, *_OPTIONS, "--options", "--replace-drift"}:
            raise ValueError(f"unknown option {flag!r}")
        if not equals:
            if not rest:
                raise ValueError(f"{flag} needs a value")
            value = rest.pop(0)
        if not value and flag in _PLACES:
            # An unset variable of somebody's script: it must not mean this machine's own root.
            raise ValueError(f"{flag} needs a value, found an empty one")
        if flag in {*_OPTIONS, "--options", "--replace-drift"}:
            _set_option(options, flag, value)
        else:
            request[key] = _seconds(flag, value) if flag in _NUMBERS else value
    return {**request, "by_hand": not options.get("steps_only"), "options": options}


def _seconds(flag: str, value: str) -> float:
    seconds = float(value)
    if not seconds >= 0:
        raise ValueError(f"{flag} is a number of seconds, found {value}")
    return seconds


def _set_option(options: dict[str, Any], flag: str, value: str) -> None:
    key = flag[2:].replace("-", "_")
    if flag == "--options":
        said = json.loads(value)
        if not isinstance(said, dict):
            raise ValueError(f"{flag} is one JSON object, found {value}")
        options.update(said)
    elif flag == "--replace-drift":
        options.setdefault(key, []).append(value)
    else:
        options[key] = _OPTIONS[flag](value)
