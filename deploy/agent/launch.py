"""How the service is to be started, and the record of how it was.

A start leaves one folder ``<launch.dir>/runs/<stamp>/`` with the server's log and ``run.json``; the
link ``runs/current`` names the newest. A pid alone proves nothing, it is given away again: a record
names its process by pid, start ticks and boot.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import machine
from .words import BundleError, Exit

SCHEMA = "run/1"
RUNS = "runs"
CURRENT = "runs/current"
RECORD = "run.json"
LOG = "serve.log"
_PORT = 8000  # the manifest's default, which its meaning leaves out
_COMMAND = ("vllm", "serve")
_WHY, _FIX = "  why: ", "  fix: "  # as BundleError is shown, and as the scripts' `die` writes
_HARMLESS = re.compile(r"-[uBqvsP]+")
_FOUND = frozenset({"pid", "start_ticks", "boot_id", "plan", "argv", "started"})


class NoRecord(BundleError):
    exit = Exit.DIFFERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the lock says of the service. `files` is path -> size and sha256 (None, "" untold)."""

    dir: str = ""
    argv: tuple[str, ...] = ()
    port: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    ready: int = 900  # seconds that a start may take
    model: str = ""
    served_name: str = ""
    files: Mapping[str, tuple[int | None, str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Launch:
        """Build it from JSON as `to_json` makes it; a bundle's inputs carry it."""
        return cls(
            dir=str(raw.get("dir", "")),
            argv=tuple(str(word) for word in raw.get("argv", ())),
            port=int(raw.get("port", 0)),
            env={str(k): str(v) for k, v in dict(raw.get("env", {})).items()},
            ready=int(raw.get("ready", 900)),
            model=str(raw.get("model", "")),
            served_name=str(raw.get("served_name", "")),
            files={str(k): _file(v) for k, v in dict(raw.get("files", {})).items()},
        )

    @classmethod
    def of_manifest(cls, meaning: Mapping[str, Any]) -> Launch:
        """Build it from a manifest's meaning, as the inputs of a bundle hold it."""
        launch, model = dict(meaning.get("launch") or {}), dict(meaning.get("model") or {})
        if not launch:
            return cls()
        served = (model["path"], "--served-model-name", model["served_name"]) if model else ()
        port = launch.get("port", _PORT)
        argv = (*launch.get("command", _COMMAND), *served, "--port", str(port))
        return cls.parse({
            **launch,
            "port": port,
            "argv": (*argv, *launch.get("serve", ())),
            "env": {name: row["value"] for name, row in dict(launch.get("env", {})).items()},
            "model": model.get("path", ""),
            "served_name": model.get("served_name", ""),
            "files": model.get("files", {}),
        })  # fmt: skip

    def at(self, *, folder: str, model: str, port: int) -> Launch:
        """The same launch where it is on this machine: below a root, or on another port."""
        return replace(self, dir=folder, model=model, port=port)

    def to_json(self) -> dict[str, Any]:
        return {
            "dir": self.dir,
            "argv": list(self.argv),
            "port": self.port,
            "env": dict(sorted(self.env.items())),
            "ready": self.ready,
            "model": self.model,
            "served_name": self.served_name,
            "files": {
                name: {"size": size, "sha256": sha256}
                for name, (size, sha256) in sorted(self.files.items())
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One start, as it was recorded.

    `receipt` names the deploy that it ran on (sha256), `group` the cgroup that limits its memory.
    """

    folder: str
    pid: int
    start: int
    boot: str
    plan: str
    argv: tuple[str, ...]
    started: str = ""
    log: str = LOG
    port: int = 0
    receipt: str = ""
    group: str = ""

    @property
    def log_path(self) -> str:
        return os.path.join(self.folder, self.log)

    @property
    def alive(self) -> bool:
        """True when the very process that was started runs."""
        return self.boot == machine.boot_id() and machine.start_of(self.pid) == self.start

    def members(self) -> tuple[machine.Process, ...]:
        """Its processes, dead ones too: itself, its descendants, its session's members.

        The session carries the server's pid and outlives it, which is how an engine is known that
        lost its server. The kernel gives no pid away while a session of that number lives: once
        the pid is another's, or the machine has booted again, whatever goes by it is the other's.
        """
        seen = machine.snapshot(also=(self.pid,))
        if self.boot != machine.boot_id() or machine.given_away(self.pid, self.start):
            return ()
        return tuple(p for p in seen.family(self.pid) if p.start >= self.start)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "pid": self.pid,
            "start_ticks": self.start,
            "boot_id": self.boot,
            "plan": self.plan,
            "argv": list(self.argv),
            "started": self.started,
            "log": self.log,
            "port": self.port,
            "receipt": self.receipt,
            "group": self.group,
        }


def new_run(folder: str, stamp: str) -> str:
    """Make the folder of a start and return it; `stamp` is its time and the pid of who starts."""
    path = os.path.join(folder, RUNS, stamp)
    os.makedirs(path, exist_ok=False)
    return path


def record(run: Run) -> None:
    """Write the record beside its place, then rename it, and point ``runs/current`` to it."""
    beside = os.path.join(run.folder, f".{RECORD}")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(run.to_json(), file, indent=1)
        file.write("\n")
    os.replace(beside, os.path.join(run.folder, RECORD))
    runs, stamp = os.path.split(run.folder)
    link = os.path.join(runs, ".current")
    if os.path.lexists(link):
        os.unlink(link)
    os.symlink(stamp, link)
    os.replace(link, os.path.join(runs, "current"))


def read_run(folder: str, stamp: str = "") -> Run | None:
    """Return the newest start recorded below a launch folder (or the one named), if there is one.

    Raises:
        NoRecord: there is one and it cannot be read, so nobody knows what was started.
    """
    path = os.path.join(folder, RUNS, stamp or "current")
    try:
        with open(os.path.join(path, RECORD), encoding="utf-8") as file:
            raw = json.load(file)
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA or not set(raw) >= _FOUND:
            raise ValueError(f"it is no {SCHEMA}")
        return _run(os.path.realpath(path), raw)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, OSError) as err:
        raise NoRecord(
            f"the run record in {path} cannot be read",
            why=str(err),
            fix="stop the server by hand, remove that folder, and start it again",
        ) from err


def words(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command line as it was meant: no interpreter, no folder before the program's name.

    ``/usr/bin/python3 /usr/local/bin/vllm serve M`` was typed as ``vllm serve M``.
    """
    argv = argv[_program(argv) :]
    if argv and argv[0] != "-m":
        return (os.path.basename(argv[0]), *argv[1:])
    return argv


def options(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the options of a command line's interpreter which may decide what code runs.

    Left out are those that cannot: -u -B -q -v, and -s -P, which take away folders of a user's.
    """
    given = argv[1 : _program(argv)]
    return tuple(word for word in given if not _HARMLESS.fullmatch(word))


def last_error(lines: Sequence[str]) -> tuple[int, str, str, str] | None:
    """Find the last error of three lines in what a script said: where it begins, what, why, fix."""
    for at in reversed(range(len(lines) - 2)):
        what, why, fix = lines[at : at + 3]
        if why.startswith(_WHY) and fix.startswith(_FIX):
            return at, what, why[len(_WHY) :], fix[len(_FIX) :]
    return None


def _program(argv: tuple[str, ...]) -> int:
    """Return where the program stands, behind its interpreter and that one's options."""
    if not argv or not os.path.basename(argv[0]).startswith(("python", "pypy")):
        return 0
    index = 1
    while index < len(argv) and argv[index].startswith("-") and argv[index] != "-m":
        index += 2 if argv[index] in ("-X", "-W") else 1
    return index


def _run(folder: str, raw: Mapping[str, Any]) -> Run:
    return Run(
        folder=folder,
        pid=int(raw["pid"]),
        start=int(raw["start_ticks"]),
        boot=str(raw["boot_id"]),
        plan=str(raw["plan"]),
        argv=tuple(str(word) for word in raw["argv"]),
        started=str(raw["started"]),
        log=_log(str(raw.get("log") or LOG)),
        port=int(raw.get("port") or 0),
        receipt=str(raw.get("receipt") or ""),
        group=str(raw.get("group") or ""),
    )


def _log(said: str) -> str:
    """A record is data: its log lies in its own folder, whatever it says."""
    name = os.path.basename(said)
    if name in ("", ".", ".."):
        raise ValueError(f"its log {said!r} is no file's name")
    return name


def _file(raw: Mapping[str, Any]) -> tuple[int | None, str]:
    size = raw.get("size")
    return (None if size is None else int(size), str(raw.get("sha256") or ""))
