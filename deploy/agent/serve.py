"""The verbs about the service: look, start, record, stop. Which bytes it runs is the plan's affair.

Starting is the rendered script's work, so that a person with nothing but a web terminal starts the
service the same way; this module runs that script and watches. Stopping goes by the recorded pid
and start, never by a name.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from . import faults, health, interpreter, log, machine, oom, service
from .bring import bring, bundle_in, overrides
from .faults import Fault
from .launch import Launch, NoRecord, Run, last_error, read_run, record
from .log import Place
from .receipt import RECEIPT, read_receipt
from .words import BundleError, Exit, Refused, Unfit, printable

if TYPE_CHECKING:
    from .main import Call

START_SCRIPT = "start_vllm.sh"
BUNDLE = "DCU_BUNDLE"  # tells a script which of the bundles beside it is meant; "" any
_SCRIPT_TIME = (
    300.0  # seconds that the script may take; it returns as soon as the server is started
)
_LINES = 25  # of what a script said before it gave up; the end of a server's log is 20
_GRACE = 60.0  # seconds between asking to end and ending

Say = Callable[[str], None]


def look(call: Call) -> None:
    """Verb `service`: say what is there; `expect` clean or running decides what is a fault."""
    options = call.request.options
    expect = str(options.get("expect") or "")
    wanted = wanted_of(call)
    seen = service.observe(
        wanted,
        ask=expect != "clean" and bool(options.get("ask", True)),
        full=bool(options.get("full")),
        timeout=float(options.get("patience") or 60),
    )
    _answer(call, seen, _judged(wanted, seen, expect, asked=bool(options.get("ask", True))))


def lay(call: Call) -> None:
    """Verb `scripts`: put the scripts and the bundle into launch.dir, for a person to run them."""
    folder = wanted_of(call).launch.dir
    written = _bring(call, folder)
    call.evidence["outcome"] = "brought" if written else "nothing to do"


def _bring(call: Call, folder: str) -> list[str]:
    """Bring the scripts, and note where this machine departs from what they say."""
    written, departs = bring(call, folder), overrides(call)
    call.evidence["scripts"] = {"folder": folder, "written": written, "overrides": departs}
    if written:
        call.say(f"brought to {printable(folder)}: {', '.join(written)}")
    for place, path in departs.items():
        call.say(f"not as in the manifest: {place} is {printable(path)}")
    return written


def start(call: Call) -> None:
    """Verb `start`: run the rendered script, then wait until one generation has been made.

    Raises:
        Refused: something of an older service is there; nothing was started.
        Unfit: there is no script, or the target is a folder of this machine.
    """
    require_whole_machine(call)
    wanted = wanted_of(call)
    seen = service.observe(wanted, ask=False)
    found = faults.before_start(seen)
    if faults.failed(found):
        call.evidence["service"] = _document(seen, found)
        raise Refused(
            "the service was not started",
            why="the process state is not clean:" + _lines(found),
            fix="stop what is left (`./inv serve.stop`, what is not ours by hand) and start again",
        )
    _bring(call, wanted.launch.dir)
    run = _run_script(wanted, call.say, bundle_in(call, wanted.launch.dir))
    ready = float(call.request.options.get("ready") or wanted.launch.ready)
    if ready > 0:
        _await(run, wanted, ready, call.say)
    seen = service.observe(wanted)
    _answer(call, seen, _judged(wanted, seen, "running", asked=ready > 0))


def require_whole_machine(call: Call) -> None:
    """Raise Unfit where the target is a folder: a process started from it would see this machine.

    Its interpreter, its site and its launch.dir lie elsewhere than the scripts say.
    """
    if os.path.realpath(call.tree.root) != "/":
        raise Unfit(
            "no service can be started below a folder",
            why=f"the target's root is {printable(call.tree.root)}; the scripts mean the paths of"
            " the machine that they run on",
            fix="start it on the machine itself: -t ssh:ALIAS, container:ID, or local:/",
        )


def note(call: Call) -> None:
    """Verb `record`: write the run record of a process that the script has just started."""
    options = call.request.options
    wanted = wanted_of(call)
    pid, folder = int(options.get("pid") or 0), str(options.get("run") or "")
    begun = machine.start_of(pid) if pid else 0
    if not begun or not os.path.isdir(folder):
        raise Unfit(
            "there is nothing to record",
            why=f"no process {pid}" if not begun else f"no folder {printable(folder)}",
            fix="read the log beside it; the server may have ended at once",
        )
    receipt = read_receipt(call.tree)
    run = Run(
        folder=os.path.abspath(folder),
        pid=pid,
        start=begun,
        boot=machine.boot_id(),
        plan=receipt.plan or call.plan.digest,
        argv=wanted.launch.argv,
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        port=wanted.launch.port,
        receipt=wanted.receipt,
        group=oom.group_of(pid),
    )
    planned = {e.path for e in call.plan.files if e.role != "extension" and not e.want.absent}
    service.keep_stamps(run.folder, wanted.site, planned | receipt.pycs.keys())
    record(run)
    call.evidence["service"] = {"schema": service.SCHEMA, "run": run.to_json()}
    call.evidence["outcome"] = "recorded"


def stop(call: Call) -> None:
    """Verb `stop`: ask the recorded service to end, all of it, and prove that it is gone.

    Raises:
        Refused: something is left: it did not end by itself and `kill` was not asked for, or it
            was not recorded, and was not touched.
    """
    options = call.request.options
    wanted = wanted_of(call)
    run = read_run(wanted.launch.dir)
    grace, kill = float(options.get("grace") or _GRACE), bool(options.get("kill"))
    ended = end(run, call.say, grace, kill=kill) if run else []
    seen = service.observe(wanted, ask=False, cards=False)
    left = [f for f in faults.before_start(seen) if not f.warning]
    call.evidence["service"] = {**_document(seen, left), "ended": ended}
    hanging = [row for row in ended if row["how"] == "hangs"]
    if left or hanging:
        raise Refused(
            "something still runs",
            why=_left(hanging) + _lines(left),
            fix="--kill ends what is recorded and hangs; what is not ours, by hand and by its pid",
        )
    call.evidence["outcome"] = "stopped" if ended else "nothing to do"


def read_markers(call: Call) -> None:
    """Verb `markers`: scan the newest start's log; `window` and `end` are places noted before.

    With `send` ({"tokens", "salt", "output"}) one prompt is sent, and its window is looked at.

    Raises:
        NoRecord: nothing was started, so there is no log to read.
        NoLog: what lies there is no file of the launch folder.
    """
    options = call.request.options
    wanted = wanted_of(call)
    run = read_run(wanted.launch.dir)
    if run is None:
        raise NoRecord(
            "there is no log to read",
            why=f"no start is recorded below {printable(wanted.launch.dir or '?')}/runs",
            fix="start the service with start_vllm.sh (or `./inv serve.start`)",
        )
    log.require_log(run.log_path, wanted.launch.dir, run.folder)
    window, until = (Place.parse(options.get(name)) for name in ("window", "end"))
    answer: dict[str, Any] = {}
    if send := options.get("send"):
        window = log.mark(run.log_path)
        launch = wanted.launch
        size = {key: int(send[key]) for key in ("salt", "output") if key in send}
        answer = health.generate(launch.port, launch.served_name, int(send["tokens"]), **size)
        call.say(f"prompt of {send['tokens']} tokens: {answer['error'] or 'answered'}")
    found = log.scan(run.log_path, None, window, until)
    members = [process.pid for process in run.members()]
    call.evidence["markers"] = {
        **found.to_json(),
        "run": run.to_json(),
        "alive": run.alive,
        "pids": sorted({run.pid, *members}),
        "place": log.mark(run.log_path).to_json(),
        "answer": answer,
    }
    call.evidence["outcome"] = "answered"


def _left(hanging: list[dict[str, Any]]) -> str:
    """Name what hangs here: not all of it looks like a service to the faults that follow."""
    if not hanging:
        return "it was not touched:"
    rows = "".join(f"\n    pid {row['pid']} ({row['role']}) hangs" for row in hanging)
    return f"it was asked to end and did not:{rows}"


def end(run: Run, say: Say, grace: float = _GRACE, *, kill: bool = True) -> list[dict[str, Any]]:
    """Ask one recorded run to end: its server first, which ends its engine.

    Who is still there after `grace` seconds is ended for good with `kill`, else named as hanging.

    Each process is named by pid and start before it is signalled, so a pid that was given to
    somebody else meanwhile is left alone.
    """
    family = _family(run)
    if not family:
        return []
    first = [p for p in family if p.pid == run.pid] or family
    for process in first:
        say(f"asking pid {process.pid} ({process.role.value}) to end")
        _signal(process, signal.SIGTERM)
    gone = _wait_gone(run, grace)
    hanging = [] if gone else _family(run)
    for process in hanging if kill else ():
        say(f"ending pid {process.pid} ({process.role.value}), which did not end by itself")
        _signal(process, signal.SIGKILL)
    if hanging and kill:
        _wait_gone(run, 10.0)
    stayed = {process.identity for process in hanging}
    how = "killed" if kill else "hangs"
    return [
        {"pid": p.pid, "role": p.role.value, "how": how if p.identity in stayed else "ended"}
        for p in family
    ]


def wanted_of(call: Call) -> service.Wanted:
    """Hold the request, the plan and the site's receipt together; paths are this machine's."""
    request, tree = call.request, call.tree
    asked = request.options.get("launch")
    launch = Launch.parse(asked) if asked else Launch.of_manifest(request.manifest)
    named, deployed = _last_deploy(os.path.join(tree.from_root(request.site), RECEIPT))
    folder = request.launch_dir or launch.dir
    return service.Wanted(
        launch=launch.at(
            folder=os.path.realpath(tree.from_root(folder)) if folder else "",
            model=tree.from_root(launch.model) if launch.model else "",
            port=int(request.options.get("port") or launch.port),
        ),
        site=tree.from_root(request.site),
        package=call.plan.package,
        plan=call.plan.digest,
        libraries={
            entry.path: entry.want.sha256
            for entry in call.plan.files
            if entry.role == "extension" and not entry.want.absent
        },
        receipt=named,
        deployed=deployed,
        # Once for all looks of a call: a measured run is looked at again and again.
        python=functools.cache(lambda: interpreter.of_service(call)),
    )


def _last_deploy(path: str) -> tuple[str, float]:
    """Return what names the site's last deploy, and its time; nothing where there was none."""
    import hashlib

    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest(), os.fstat(file.fileno()).st_mtime
    except OSError:
        return "", 0.0


def _judged(
    wanted: service.Wanted, seen: Mapping[str, Any], expect: str, *, asked: bool
) -> tuple[Fault, ...]:
    if expect == "clean":
        return faults.before_start(seen)
    if expect != "running" and seen["server"] is None:
        return faults.before_start(seen)
    return faults.after_start(
        seen, wanted.launch, plan=wanted.plan, receipt=wanted.receipt, asked=asked
    )


def _answer(call: Call, seen: Mapping[str, Any], found: tuple[Fault, ...]) -> None:
    call.evidence["service"] = _document(seen, found)
    for fault in found:
        call.tell(f"{'warning' if fault.warning else 'fault'}: {fault.text}")
    failed = faults.failed(found)
    call.evidence["outcome"] = "differs" if failed else "running" if seen["server"] else "clean"
    call.exit = Exit.DIFFERS if failed else Exit.OK


def _document(seen: Mapping[str, Any], found: Any) -> dict[str, Any]:
    return {**seen, "faults": [fault.to_json() for fault in found]}


def _lines(found: Any) -> str:
    return "".join(f"\n    {fault.text}" for fault in found if not fault.warning)


def _run_script(wanted: service.Wanted, say: Say, bundle: str) -> Run:
    """Run the start script in a session of its own; return the record that it wrote."""
    folder = wanted.launch.dir
    script = os.path.join(folder, START_SCRIPT)
    if not os.path.isfile(script):
        raise Unfit(
            f"there is no {START_SCRIPT}",
            why=f"{printable(script)} is not there",
            fix="render it (`./inv render`) and bring it to launch.dir",
        )
    before = read_run(folder)
    say(f"running {printable(script)}")
    # A terminal that drops must not end what is started here: no terminal, no group of ours.
    with open(os.path.join(folder, ".start.out"), "w+b") as output:
        done = subprocess.run(
            ("/bin/sh", script, "--no-wait"),
            cwd=folder,
            env={**os.environ, BUNDLE: bundle},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=_SCRIPT_TIME,
            check=False,
        )
        output.seek(max(0, os.fstat(output.fileno()).st_size - (1 << 16)))
        said = output.read().decode("utf-8", "replace")
    run = read_run(folder)
    if done.returncode or run is None or run == before:
        raise _as_it_said(done.returncode, said)
    return run


def _as_it_said(code: int, said: str) -> BundleError:
    """Return the script's own last what, why and fix with its exit code; below, what led there."""
    lines = [printable(line.rstrip()) for line in said.splitlines() if line.strip()]
    known = code in tuple(Exit) and code not in (Exit.OK, Exit.BUG)
    if known and (error := last_error(lines)) is not None:
        at, what, why, fix = error
        return BundleError(what, why=why + _indented(lines[:at]), fix=fix, exit=Exit(code))
    return Refused(
        f"{START_SCRIPT} started nothing",
        why=f"exit {code}:{_indented(lines) or ' it said nothing'}",
        fix="run it by hand in launch.dir and read what it says",
    )


def _indented(lines: list[str]) -> str:
    return "".join(f"\n    {line.strip()}" for line in lines[-_LINES:])


def _await(run: Run, wanted: service.Wanted, seconds: float, say: Say) -> None:
    """Wait until the server has generated, has ended, or the time is over; the caller judges."""
    say(f"pid {run.pid} is started; waiting up to {seconds:g} s for its first generation")
    launch = wanted.launch
    answers = health.wait(launch.port, launch.served_name, seconds, lambda: _running(run))
    last = answers[-1]
    say(f"{last.probe}: {last.error or 'passed'}")


def _running(run: Run) -> bool:
    process = next((p for p in _family(run) if p.pid == run.pid), None)
    return process is not None and not process.zombie


def _family(run: Run) -> tuple[machine.Process, ...]:
    """The run's processes that are alive."""
    return tuple(process for process in run.members() if not process.zombie)


def _wait_gone(run: Run, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while _family(run):
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True


def _signal(process: machine.Process, number: int) -> None:
    """Signal exactly this process; a pid that names another one by now is left alone."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # a kernel before 5.3
        if machine.start_of(process.pid) == process.start:
            os.kill(process.pid, number)
        return
    try:
        if machine.start_of(process.pid) == process.start:
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)
