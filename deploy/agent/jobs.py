"""A long piece of work that goes on when whoever asked for it is gone, and can be asked about.

Each has a folder of its own, ``<launch.dir>/measured/<kind>/<stamp>/``, that is never used twice:
``job.json`` says how far it is, ``job.log`` what it said, ``record.json`` what came of it. The
worker is a fork of the agent itself: it needs no file of ours on the target, whatever line brought
the agent.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from . import machine
from .words import BundleError, Exit, Refused, Unfit, printable

SCHEMA = "job/1"
KINDS = ("bench", "profile", "accuracy")
_TASKS = {"bench": "bench.run", "profile": "profile.run", "accuracy": "bench.accuracy --script"}
WITHOUT_RESULT = ("failed", "stopped", "died")  # how a run ends, unless it is done
FOLDER = "measured"  # bench/ and profile/ are the rendered scripts' own
JOB, LOG, RECORD = "job.json", "job.log", "record.json"
_LOCK = ".measure.lock"
_STAMP = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9]+")
_START = 30.0  # seconds that the worker may take to say that it runs


class NoJob(BundleError):
    exit = Exit.DIFFERS


class Job:
    """One piece of work: its folder and what is written there."""

    def __init__(self, folder: str, state: dict[str, Any]) -> None:
        self.folder, self.state = folder, state

    @property
    def log(self) -> str:
        return os.path.join(self.folder, LOG)

    def say(self, line: str) -> None:
        """Add a line to the log, with the time in UTC."""
        stamp = time.strftime("%H:%M:%S", time.gmtime())
        with open(self.log, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{stamp} {printable(line)}\n")

    def step(self, step: str) -> None:
        self.say(step)
        self.write(step=step)

    def write(self, **changed: Any) -> None:
        self.state.update(changed)
        put(os.path.join(self.folder, JOB), self.state)

    def keep(self, record: Mapping[str, Any]) -> None:
        put(os.path.join(self.folder, RECORD), record)

    def to_json(self) -> dict[str, Any]:
        return {**self.state, "folder": self.folder, "state": state_of(self.state)}


def put(path: str, value: Any) -> None:
    """Write JSON beside its place, then rename it: a reader finds the old text or the new."""
    beside = f"{path}.new"
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(value, file, sort_keys=True, allow_nan=False)
        file.write("\n")
    os.replace(beside, path)


def start(top: str, kind: str, asked: Mapping[str, Any], work: Callable[[Job], None]) -> Job:
    """Start `work` in a process of its own and return at once; one at a time below `top`.

    Raises:
        Refused: another one runs.
        Unfit: there is no such folder, or nothing can be written there.
    """
    lock = _locked(top)
    try:
        stamp = _new_stamp(os.path.join(top, FOLDER, kind))
        folder = os.path.join(top, FOLDER, kind, stamp)
        os.makedirs(folder, exist_ok=False)
        job = Job(folder, {"schema": SCHEMA, "kind": kind, "stamp": stamp, "asked": dict(asked),
                           "state": "starting", "step": "", "error": None})  # fmt: skip
        job.write()
        _fork(job, work, lock)
    finally:
        os.close(lock)
    return find(top, kind, stamp)


def require_idle(top: str) -> None:
    """Raise what `start` would where another run is being made, before anything is looked at."""
    os.close(_locked(top))


def made(top: str, kind: str) -> bool:
    """True when there is any run of this kind."""
    return bool(_stamps(os.path.join(top, FOLDER, kind)))


def find(top: str, kind: str, stamp: str = "") -> Job:
    """Return a job by its stamp, or the newest of its kind.

    Raises:
        NoJob: there is none.
    """
    if stamp and not _STAMP.fullmatch(stamp):
        raise NoJob(f"{printable(stamp)} is no stamp of a run", why="a stamp is as the start"
                    " printed it", fix="leave it out for the newest")  # fmt: skip
    above = os.path.join(top, FOLDER, kind)
    stamps = [stamp] if stamp else _stamps(above)
    try:
        if not stamps:
            raise FileNotFoundError("none was made")
        folder = os.path.join(above, stamps[-1])
        with open(os.path.join(folder, JOB), encoding="utf-8") as file:
            return Job(folder, dict(json.load(file)))
    except (OSError, ValueError) as err:
        raise NoJob(
            f"there is no {kind} run" + (f" {stamp}" if stamp else ""),
            why=f"{printable(above)}: {err}",
            fix=f"start one: `./inv {_TASKS[kind]}`",
        ) from err


def state_of(state: Mapping[str, Any]) -> str:
    """Return running, done, failed, stopped; or died, when its process is gone without a word."""
    said = str(state.get("state", ""))
    if said not in ("starting", "running"):
        return said
    alive = state.get("boot_id") == machine.boot_id() and (
        machine.start_of(int(state.get("pid") or 0)) == state.get("start_ticks")
    )
    return "running" if alive else "died"


def end(job: Job) -> bool:
    """Ask a running job to end; it ends its client first. False when it does not run."""
    if state_of(job.state) != "running":
        return False
    pid = int(job.state["pid"])
    if machine.start_of(pid) == job.state["start_ticks"]:
        os.kill(pid, signal.SIGTERM)
        return True
    return False


def tail(job: Job, since: int = 0) -> tuple[list[str], int]:
    """Return the log's whole lines from an offset in bytes, and where they end."""
    try:
        with open(job.log, "rb") as file:
            file.seek(since)
            data = file.read(1 << 20)
    except OSError:
        return [], since
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode("utf-8", "replace").splitlines(), since + len(whole)


def record_of(job: Job) -> dict[str, Any] | None:
    try:
        with open(os.path.join(job.folder, RECORD), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _new_stamp(folder: str) -> str:
    """The time, and a number greater than any before: clocks jump, and two runs fit in a second."""
    number = 1 + max((_number(stamp) for stamp in _stamps(folder)), default=0)
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{number}"


def _stamps(folder: str) -> list[str]:
    """The runs of one kind, the newest last."""
    try:
        return sorted((n for n in os.listdir(folder) if _STAMP.fullmatch(n)), key=_number)
    except OSError:
        return []


def _number(stamp: str) -> int:
    return int(stamp.rpartition("-")[2])


def _locked(top: str) -> int:
    try:
        lock = os.open(os.path.join(top, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as err:
        raise Unfit(
            f"nothing can be measured from {printable(top or '?')}",
            why=err.strerror or str(err),
            fix="launch.dir must be there and writable; deploy and start the service first",
        ) from err
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(lock)
        raise Refused(
            "another run is being made",
            why=_who(top),
            fix="wait for it (`./inv bench.status --follow`), or end it with bench.stop",
        ) from err
    return lock


def _who(top: str) -> str:
    running = [
        f"{kind} {stamp}"
        for kind in KINDS
        for stamp in _stamps(os.path.join(top, FOLDER, kind))[-50:]
        if state_of(find(top, kind, stamp).state) == "running"
    ]
    return f"{', '.join(running) or 'a process'} holds {_LOCK}"


def _fork(job: Job, work: Callable[[Job], None], lock: int) -> None:
    """Fork twice, so that the worker is nobody's child, in a session of its own."""
    ours, theirs = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    first = os.fork()
    if not first:
        try:
            os.setsid()
            if not os.fork():
                _become(job, work, theirs, lock)
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(first, 0)
    try:
        if not _waited(ours):
            raise Unfit(
                f"the {job.state['kind']} run did not start",
                why=f"its process said nothing within {_START:g} s",
                fix=f"read {printable(job.log)}",
            )
    finally:
        os.close(ours)


def _waited(fd: int) -> bool:
    import select

    ready, _, _ = select.select([fd], [], [], _START)
    return bool(ready) and os.read(fd, 1) == b"1"


def _become(job: Job, work: Callable[[Job], None], started: int, lock: int) -> None:
    """Be the worker: no stream and no descriptor of the caller's; never return."""
    try:
        for name in ("SIGHUP", "SIGINT", "SIGQUIT"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _ended)
        _let_go(job.log, keep=(started, lock))
        end, said = _worked(job, work, started)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for line in said.splitlines():
            job.say(line)
        # Before it is told: whoever reads how it ended may start the next at once.
        fcntl.flock(lock, fcntl.LOCK_UN)
        job.write(**end, ended=time.time())
    finally:
        os._exit(0)


def _worked(job: Job, work: Callable[[Job], None], started: int) -> tuple[dict[str, Any], str]:
    """Do the work; return what to write of its end, and what to say."""
    end: dict[str, Any]
    try:
        job.write(
            state="running",
            pid=os.getpid(),
            start_ticks=machine.start_of(os.getpid()),
            boot_id=machine.boot_id(),
            started=time.time(),
        )
        os.write(started, b"1")
        os.close(started)
        work(job)
        end, said = {"state": "done", "step": ""}, "done"
    except BundleError as error:
        end, said = {"state": "failed", "error": error.to_json()}, str(error)
    except SystemExit:
        asked = Refused("the run was ended", why="somebody asked for it", fix="start it again")
        end, said = {"state": "stopped", "error": asked.to_json()}, asked.what
    except BaseException as err:  # noqa: BLE001 - nobody is there to see a traceback
        why = {"what": "the run broke off", "why": f"{type(err).__name__}: {err}",
               "fix": "read job.log", "exit": int(Exit.BUG)}  # fmt: skip
        end, said = {"state": "failed", "error": why}, traceback.format_exc()
    return end, said


def _ended(*_: object) -> None:
    raise SystemExit


def _let_go(log: str, keep: tuple[int, ...]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass
