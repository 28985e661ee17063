"""Look at the service of this machine and say what is there, as the document service/1.

`observe` is this module's face. It reads, asks the server and judges nothing; what speaks against
the state it saw is said by `faults`. Values that may be secrets leave this module only as "hidden".
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import device, health, interpreter, log, machine, maps, oom, ports
from .interpreter import Interpreter
from .launch import Launch, NoRecord, Run, options, read_run, words
from .proc import CannotTell
from .roles import Role

SCHEMA = "service/1"
STAMPS = "stamps.json"
# Names that decide what code runs, or where compiled code comes from; beside VLLM_* and proxies.
_CACHES = frozenset({
    "AITER_JIT_DIR",
    "AMD_COMGR_CACHE_DIR",
    "HF_MODULES_CACHE",
    "MIOPEN_CUSTOM_CACHE_DIR",
    "MIOPEN_USER_DB_PATH",
    "PYTHONPYCACHEPREFIX",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
})  # fmt: skip
# What decides which code an interpreter or a loader takes, and which kernels a library does. It may
# come from the manifest, from env_script and from the container; from a shell it is a surprise.
_STEERS = re.compile(r"^(PYTHON|LD_|HSA_|HIP_|ROCR_|ROCBLAS_|HIPBLASLT_|TENSILE_|MIOPEN_|PYTORCH_)")
_STEERS_NOTHING = frozenset({
    "PYTHONASYNCIODEBUG", "PYTHONCOERCECLOCALE", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER",
    "PYTHONHASHSEED", "PYTHONINTMAXSTRDIGITS", "PYTHONIOENCODING", "PYTHONMALLOC",
    "PYTHONNODEBUGRANGES", "PYTHONNOUSERSITE", "PYTHONPROFILEIMPORTTIME", "PYTHONSAFEPATH",
    "PYTHONSTARTUP", "PYTHONTRACEMALLOC", "PYTHONUNBUFFERED", "PYTHONUTF8", "PYTHONVERBOSE",
    "PYTHON_BASIC_REPL", "PYTHON_COLORS", "PYTHON_HISTORY", "PYTHON_VERSION",
})  # fmt: skip
_LISTS = frozenset({"LD_LIBRARY_PATH", "LD_PRELOAD"})
_PROXY = re.compile(r"^(https?|all|ftp)_proxy$", re.IGNORECASE)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|proxy", re.IGNORECASE)
_SMALL = 16 << 20  # model files up to this size are hashed at every look, larger ones on request
_TAIL = 1 << 16
_LOOKS = 20  # so often a server may end while it is looked at; one may hang in its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a service is held against: the plan and the launch of the lock, as seen from here.

    `site`, `launch.dir` and `launch.model` are paths of this machine; `libraries` is path below the
    site -> sha256 of each planned extension; `receipt` names the last deploy by the sha256
    of its record, and `deployed` is its time. `python` asks base.python what it really is. `first`
    is the process that the container began with.
    """

    launch: Launch
    site: str
    package: str
    plan: str = ""
    libraries: Mapping[str, str] | None = None
    receipt: str = ""
    deployed: float = 0.0  # seconds since the epoch
    python: Callable[[], Interpreter | None] | None = None
    first: int = 1


def observe(
    wanted: Wanted,
    *,
    ask: bool = True,
    cards: bool = True,
    full: bool = False,
    timeout: float = 60.0,
) -> dict[str, Any]:
    """Look once. `ask` sends real requests, `cards` runs the card's tools, `full` hashes shards."""
    launch = wanted.launch
    run = read_run(launch.dir) if launch.dir else None
    seen, server = _looked(wanted, run)
    return {
        "schema": SCHEMA,
        **seen.to_json(),
        "bound": bool(launch.port and not seen.listeners and ports.bound(launch.port)),
        "run": _run(run),
        "server": server,
        "answers": _answers(wanted, seen, timeout) if ask else [],
        "model": _model(launch, full=full),
        "device_files": machine.device_files(),
        "cards": device.look() if cards else None,
        "log": _log(run, launch.dir),
        "oom": oom.look(run.start / machine.TICKS, run.group) if run and not run.alive else None,
    }


def _looked(wanted: Wanted, run: Run | None) -> tuple[machine.Snapshot, dict[str, Any] | None]:
    """Look at the machine and its server: anew, where that ended while it was looked at.

    What /proc says of a process that ends is no fault: no folder, and an environment without a
    name in it.
    """
    port, also = wanted.launch.port, (run.pid,) if run else ()
    for left in reversed(range(_LOOKS)):
        seen = machine.snapshot(port, also=also)
        server = _server(seen, run)
        if server is None:
            break
        try:
            found = _describe(server, seen, wanted, run)
        except CannotTell as err:
            # It lets go of its folder before it is dead to others.
            ends = isinstance(err.__cause__, (FileNotFoundError, ProcessLookupError))
            if not left or not (ends or _ended(server)):
                raise
        else:
            if not _ended(server):
                return seen, found
        time.sleep(0.05)
    return seen, None


def _ended(process: machine.Process) -> bool:
    return machine.start_of(process.pid) != process.start


def _server(seen: machine.Snapshot, run: Run | None) -> machine.Process | None:
    """The recorded process while it runs, else a server that listens on the port or will.

    Any other server of this machine is somebody else's, and spoken of as such.
    """
    if run is not None and run.alive:
        found = seen.at(run.pid)
        if found is not None:
            return found
    listening = {pid for listener in seen.listeners for pid in listener.pids}
    servers = [p for p in seen.of(Role.SERVER) if not p.container and not p.zombie]
    meant = [p for p in servers if p.pid in listening or _port_of(p.argv) == seen.port]
    return meant[0] if meant else None


def _port_of(argv: Sequence[str]) -> int:
    """Return the port that a server's words name; vLLM's own default where they name none."""
    for word, following in zip(argv, [*argv[1:], ""]):
        flag, equals, value = word.partition("=")
        text = value if equals else following
        if flag == "--port" and text.isascii() and text.isdigit():
            return int(text)
    return 8000


def _run(run: Run | None) -> dict[str, Any] | None:
    if run is None:
        return None
    other = run.boot != machine.boot_id()
    state = "other boot" if other else "running" if run.alive else "gone"
    return {**run.to_json(), "folder": run.folder, "state": state}


def _describe(
    server: machine.Process, seen: machine.Snapshot, wanted: Wanted, run: Run | None
) -> dict[str, Any]:
    """Say what the processes of one server run: words, folder, environment, mapped libraries."""
    members = [process.pid for process in seen.family(server.pid) if not process.zombie]
    folder, environment = machine.working_folder(server.pid), machine.environment(server.pid)
    runs = interpreter.of_process(server.pid, server.argv, environment, folder)
    return {
        "pid": server.pid,
        "start_ticks": server.start,
        "members": members,
        "words": list(words(server.argv)),
        "options": list(options(server.argv)),
        "interpreter": interpreter.document(runs, wanted.python()) if wanted.python else None,
        "folder": folder,
        "environment": _environment(environment, wanted),
        "mapped": _mapped(members, wanted),
        "installed": _installed(wanted),
        "rewritten": _rewritten(run, wanted.site) if run and run.pid == server.pid else [],
        "started": seen.booted + server.start / machine.TICKS,
        "deployed": wanted.deployed,
    }


def keep_stamps(folder: str, site: str, paths: Iterable[str]) -> None:
    """Note in the folder of a start when each of these files of the site was last written.

    What a server has imported is not to be seen from outside: bytes that were put back since look
    as they should. The kernel's own stamp (ctime) tells, and nobody sets it. It is compared with
    itself: no clock is asked, which may have been set meanwhile.
    """
    with open(os.path.join(folder, STAMPS), "w", encoding="utf-8") as file:
        json.dump({path: _stamp(os.path.join(site, path)) for path in sorted(paths)}, file)


def _rewritten(run: Run, site: str) -> list[str]:
    """Return the files that were written since this start was recorded; an older agent's has none.

    Raises:
        NoRecord: what was noted cannot be read.
    """
    path = os.path.join(run.folder, STAMPS)
    try:
        with open(path, encoding="utf-8") as file:
            noted = dict(json.load(file))
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, OSError) as err:
        raise NoRecord(
            f"{path} cannot be read",
            why=str(err),
            fix="stop the server and start it again: each start notes its own",
        ) from err
    return [name for name, stamp in noted.items() if _stamp(os.path.join(site, name)) != stamp]


def _stamp(path: str) -> int:
    """Return when a file was last written, its mode included; 0 where there is none."""
    try:
        return os.lstat(path).st_ctime_ns
    except OSError:
        return 0


def _environment(found: Mapping[str, str], wanted: Wanted) -> list[dict[str, str]]:
    """Hold an environment against the locked one: one row for each name that matters."""
    locked = wanted.launch.env
    started = wanted.python() if wanted.python else None
    inside = _container(wanted.first)
    known = inside is not None and started is not None and started.environment is not None
    given = [(started.environment if started else None) or {}, inside or {}]
    names = sorted({*locked, *(name for name in found if _watched(name))})
    rows = []
    for name in names:
        value = found.get(name)
        if name in locked:
            state = "missing" if value is None else "ok" if value == locked[name] else "differs"
        elif name == "PYTHONPATH":
            state = "shadows" if _shadows(value or "", wanted) else "unlocked path"
        elif _steers(name):
            state = _origin(name, value or "", given, known=known)
        else:
            state = "not locked"
        rows.append({"name": name, "state": state, "found": _shown(name, value)})
    return rows


def _watched(name: str) -> bool:
    return name == "PYTHONPATH" or _wanted_nowhere(name) or _steers(name)


def _wanted_nowhere(name: str) -> bool:
    """True for what only the manifest may set, whatever the container says."""
    return (
        name.startswith("VLLM_")
        or name in _CACHES
        or name == "PYTHONHOME"
        or bool(_PROXY.match(name))
    )


def _steers(name: str) -> bool:
    return bool(_STEERS.match(name)) and name not in _STEERS_NOTHING and not _wanted_nowhere(name)


def _container(first: int) -> dict[str, str] | None:
    """Return the environment that the container was started with; None to who may not see it."""
    try:
        return machine.environment(first)
    except CannotTell:
        return None


def _origin(name: str, value: str, given: Sequence[Mapping[str, str]], *, known: bool) -> str:
    """Say whether a value comes from one of the environments that are `given`, all of them `known`.

    Of a list each part must: a script that is sourced twice adds its folders twice.
    """
    values = [environment.get(name, "") for environment in given]
    if name in _LISTS:
        parts = {part for one in values for part in re.split("[: ]", one)}
        same = {part for part in re.split("[: ]", value) if part} <= parts
    else:
        same = not value or value in values
    return "ok" if same else "not given" if known else "of unknown origin"


def _shadows(path: str, wanted: Wanted) -> bool:
    """True when an entry of PYTHONPATH holds a package of the service's name outside the site."""
    site = os.path.realpath(wanted.site)
    for entry in path.split(":"):
        folder = os.path.realpath(os.path.join(wanted.launch.dir or "/", entry))
        if folder != site and os.path.exists(os.path.join(folder, wanted.package)):
            return True
    return False


def _shown(name: str, value: str | None) -> str:
    if value is None:
        return ""
    return "hidden" if _SECRET.search(name) else value


def _mapped(pids: Sequence[int], wanted: Wanted) -> list[dict[str, Any]]:
    """Say of every library of the package that is mapped whether it is the one that lies there."""
    top = os.path.join(os.path.realpath(wanted.site), wanted.package) + "/"
    planned = {os.path.basename(path) for path in wanted.libraries or {}}
    found = [
        (pid, mapped)
        for pid in pids
        for mapped in maps.of(pid)
        if ".so" in os.path.basename(mapped.path)
        and (mapped.path.startswith(top) or os.path.basename(mapped.path) in planned)
    ]
    there = maps.identities(sorted({m.path for _, m in found if os.path.exists(m.path)}))
    return [
        {
            "pid": pid,
            "path": mapped.path.removeprefix(os.path.realpath(wanted.site) + "/"),
            "state": _mapped_state(mapped, there, top),
            "device": mapped.device,
            "inode": mapped.inode,
        }
        for pid, mapped in found
    ]


def _mapped_state(mapped: maps.Mapped, there: Mapping[str, tuple[str, int]], top: str) -> str:
    if not mapped.path.startswith(top):
        return "from elsewhere"
    if there.get(mapped.path) == (mapped.device, mapped.inode):
        return "ok"
    return "deleted" if mapped.deleted and mapped.path not in there else "replaced"


def _installed(wanted: Wanted) -> list[dict[str, str]]:
    rows = []
    for path, sha256 in sorted((wanted.libraries or {}).items()):
        found = _sha256(os.path.join(wanted.site, path))
        rows.append({"path": path, "state": _state(sha256, found), "found": found})
    return rows


def _answers(wanted: Wanted, seen: machine.Snapshot, timeout: float) -> list[dict[str, Any]]:
    if not seen.listeners:
        return []
    launch = wanted.launch
    host = ports.reach(seen.listeners)
    answers = health.probe(launch.port, launch.served_name, host=host, timeout=timeout)
    return [answer.to_json() for answer in answers]


def _model(launch: Launch, *, full: bool) -> list[dict[str, Any]]:
    """Hold the model's files against the locked ones; a missing digest says it was not computed."""
    rows: list[dict[str, Any]] = []
    for name, (size, sha256) in sorted(launch.files.items()):
        path = os.path.join(launch.model, name)
        try:
            found = os.stat(path).st_size
        except OSError:
            rows.append({"path": name, "state": "missing", "size": None, "sha256": ""})
            continue
        hashed = _sha256(path) if sha256 and (full or found <= _SMALL) else ""
        wrong = (size is not None and size != found) or (hashed and hashed != sha256)
        state = "changed" if wrong else "ok" if hashed or not sha256 else "size only"
        rows.append({"path": name, "state": state, "size": found, "sha256": hashed})
    return rows


def _log(run: Run | None, folder: str) -> dict[str, Any] | None:
    """Say where the newest start's log is, and its last lines; or why it is not read."""
    if run is None:
        return None
    found: dict[str, Any] = {"path": run.log_path, "tail": [], "error": ""}
    try:
        log.require_log(run.log_path, folder, run.folder)
        place = log.mark(run.log_path)
    except log.NoLog as err:
        return {**found, "place": log.Place(0, 0, 0).to_json(), "error": err.why}
    if place.inode:
        with log.opened(run.log_path) as file:
            file.seek(max(0, place.offset - _TAIL))
            found["tail"] = file.read(_TAIL).decode("utf-8", "replace").splitlines()[-20:]
    return {**found, "place": place.to_json()}


def _state(wanted: str, found: str) -> str:
    return "ok" if found == wanted else "changed" if found else "missing"


def _sha256(path: str) -> str:
    """Return the sha256 of a file, or "" when it cannot be read."""
    import hashlib

    total = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                total.update(chunk)
    except OSError:
        return ""
    return total.hexdigest()
