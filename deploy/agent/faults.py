"""Say what speaks against a service's state, from service/1 alone: gate 5 before and after a start.

Both functions are pure: the operator's side and a person at a web terminal get one verdict.
Each fault names the process or the value, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .launch import Launch, options, words
from .roles import Role
from .words import printable

_BUSY_MEMORY = 5.0  # percent of a card's memory that an idle card may show in use
_PROBES = ("health", "models", "generation")
_ROLES = {
    Role.SERVER.value: "an API server runs",
    Role.ENGINE.value: "an EngineCore runs",
    Role.WORKER.value: "a worker runs",
    Role.COORDINATOR.value: "a coordinator runs",
    Role.BENCH.value: "a bench driver runs",
    Role.PROFILER.value: "a profiler runs",
}
_SERVING = tuple(_ROLES)[:4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is not as it should be. A `warning` speaks against nothing by itself."""

    what: str
    text: str
    warning: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "text": self.text, "warning": self.warning}


def before_start(seen: Mapping[str, Any]) -> tuple[Fault, ...]:
    """What must go away before a start: whatever serves, measures, listens or holds the card."""
    return (
        *_others(seen, ()),
        *_holders(seen, ()),
        *(_listener(row, "the port is taken") for row in seen["listeners"]),
        *_bound(seen),
        *_hidden(seen),
        *_memory(seen),
    )


def after_start(
    seen: Mapping[str, Any],
    launch: Launch,
    *,
    plan: str = "",
    receipt: str = "",
    asked: bool = True,
) -> tuple[Fault, ...]:
    """What is wrong with the service that runs, and with whatever runs beside it.

    `receipt` names the site's last deploy. Without `asked` no request was sent, and the
    server's answers are not judged.
    """
    server = seen["server"]
    if server is None:
        none = Fault(what="no server", text=_no_server(seen))
        return (none, *_log(seen), *_others(seen, ()), *_hidden(seen))
    members = tuple(server["members"])
    return (
        *_others(seen, members),
        *_holders(seen, members),
        *_listeners(seen, members, launch.port),
        *_hidden(seen),
        *_record(seen, plan, receipt),
        *_command(server, launch),
        *_interpreter(server, launch),
        *_environment(server),
        *_code(server),
        *_rewritten(server),
        *(_answers(seen, launch) if asked else ()),
        *_model(seen),
        *_log(seen),
        *_age(seen),
    )


def failed(faults: Sequence[Fault]) -> bool:
    return any(not fault.warning for fault in faults)


def _others(seen: Mapping[str, Any], members: tuple[int, ...]) -> Iterator[Fault]:
    """Processes that serve, measure or profile and are none of this service's."""
    for row in seen["processes"]:
        if row["pid"] in members or row["role"] not in _ROLES:
            continue
        if row["state"] == "Z":
            text = f"a dead {row['role']} waits for its parent {row['parent']}: {_name(row)}"
            yield Fault(what="zombie", text=text, warning=True)
        elif row["container"]:
            # Told apart: what another container runs is its own affair while it leaves the card be.
            text = f"{_ROLES[row['role']]} in another container ({row['container']}): {_name(row)}"
            yield Fault(what="other container", text=text, warning=True)
        elif row["orphan"]:
            text = (
                f"an {row['role']} has lost its server and still holds "
                f"{row['memory'] >> 20} MiB: {_name(row)}, parent {row['parent']},"
                f" started {row['started']}"
            )
            yield Fault(what="orphan", text=text)
        else:
            yield Fault(what=row["role"], text=f"{_ROLES[row['role']]}: {_name(row)}")


def _holders(seen: Mapping[str, Any], members: tuple[int, ...]) -> Iterator[Fault]:
    for row in seen["processes"]:
        if row["devices"] and row["pid"] not in members:
            where = f" in another container ({row['container']})" if row["container"] else ""
            text = f"{', '.join(row['devices'])} is held{where}: {_name(row)}"
            yield Fault(what="device", text=text)


def _listeners(seen: Mapping[str, Any], members: tuple[int, ...], port: int) -> Iterator[Fault]:
    foreign = [row for row in seen["listeners"] if not set(row["pids"]) & set(members)]
    for row in foreign:
        yield _listener(row, "another process listens on the service's port too")
    own = [row for row in seen["listeners"] if row not in foreign]
    if not own:
        text = f"the server does not listen on port {port}"
        yield Fault(what="listener", text=text)
    elif len({pid for row in own for pid in row["pids"]} & set(members)) and len(own) > 1:
        text = f"the service has {len(own)} listening sockets on port {port}, expected one"
        yield Fault(what="listener", text=text)


def _listener(row: Mapping[str, Any], why: str) -> Fault:
    who = f"pid {', '.join(map(str, row['pids']))}" if row["pids"] else "a process not to be seen"
    return Fault(what="listener", text=f"{why}: {row['address']}:{row['port']} by {who}")


def _bound(seen: Mapping[str, Any]) -> Iterator[Fault]:
    if seen["bound"]:
        text = f"port {seen['port']} is bound by a process that does not listen yet"
        yield Fault(what="listener", text=text)


def _hidden(seen: Mapping[str, Any]) -> Iterator[Fault]:
    if seen["hidden"]:
        text = (
            f"cannot tell what {seen['hidden']} of {seen['seen']} processes hold open;"
            " look as root, or as the user who runs the service"
        )
        yield Fault(what="hidden", text=text)


def _memory(seen: Mapping[str, Any]) -> Iterator[Fault]:
    """A card in use although nobody here holds it: somebody outside this pid namespace does."""
    cards = (seen.get("cards") or {}).get("cards", ())
    hosts = (seen.get("cards") or {}).get("host_processes", ())
    for card in cards:
        if card["memory"] is None:
            text = f"card {card['index']}: the tool does not know how much memory is in use"
            yield Fault(what="card", text=text, warning=True)
        elif card["memory"] > _BUSY_MEMORY:
            named = [str(row["host_pid"]) for row in hosts if card["index"] in row["cards"]]
            pids = f"host pids {', '.join(named)}, not pids of here" if named else "no pid is named"
            text = (
                f"card {card['index']}: {card['memory']:g} % of its memory is in use by a process"
                f" outside this PID namespace ({pids})"
            )
            if any(row["devices"] for row in seen["processes"]):
                text = f"card {card['index']}: {card['memory']:g} % of its memory is in use"
            yield Fault(what="card", text=text)


def _record(seen: Mapping[str, Any], plan: str, receipt: str) -> Iterator[Fault]:
    run, server = seen["run"], seen["server"]
    if run is None:
        text = f"server {server['pid']} has no run record: it was not started by start_vllm.sh"
        yield Fault(what="record", text=text)
        return
    if run["state"] != "running" or run["pid"] != server["pid"]:
        text = (
            f"server {server['pid']} is not the recorded one"
            f" (pid {run['pid']}, {run['state']}, started {run['started']})"
        )
        yield Fault(what="record", text=text)
        return
    if plan and run["plan"] != plan:
        text = f"it was started on plan {run['plan'][:12] or 'none'}, deployed is {plan[:12]}"
        yield Fault(what="old process", text=text)
    elif receipt and run["receipt"] and run["receipt"] != receipt:
        text = "it was started on an earlier deploy of this plan; the site was changed since"
        yield Fault(what="old process", text=text)


def _command(server: Mapping[str, Any], launch: Launch) -> Iterator[Fault]:
    wanted = list(words(launch.argv))
    if wanted and server["words"] != wanted:
        text = f"its arguments are not the locked ones: {_difference(wanted, server['words'])}"
        yield Fault(what="arguments", text=text)
    if launch.dir and server["folder"] != launch.dir:
        text = f"it works in {printable(server['folder'])}, locked is {launch.dir}"
        yield Fault(what="folder", text=text)


def _interpreter(server: Mapping[str, Any], launch: Launch) -> Iterator[Fault]:
    row = server["interpreter"] or {"state": "not asked"}
    if row["state"] == "other":
        text = (
            f"it runs {printable(row['found'])}, base.python is {printable(row['wanted'])}:"
            " it may import another package"
        )
        yield Fault(what="interpreter", text=text)
    elif row["state"] == "unknown":
        found, wanted = (printable(row[key]) or "not to be seen" for key in ("found", "wanted"))
        text = f"cannot tell whether its interpreter ({found}) is base.python ({wanted})"
        yield Fault(what="interpreter", text=text, warning=True)
    locked = list(options(launch.argv))
    if server["options"] != locked:
        text = (
            "its interpreter's options are not the locked ones:"
            f" {_difference(locked, server['options'])}: it may run other bytecode"
        )
        yield Fault(what="interpreter", text=text)


def _difference(wanted: Sequence[str], found: Sequence[str]) -> str:
    parts = [
        f"{name} {printable(' '.join(beyond))}"
        for name, beyond in (("lacks", _beyond(wanted, found)), ("has", _beyond(found, wanted)))
        if beyond
    ]
    return "; ".join(parts) or "the same words in another order"


def _beyond(some: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the words of `some` that `others` has not, or not as often."""
    left = list(others)
    beyond = []
    for word in some:
        if word in left:
            left.remove(word)
        else:
            beyond.append(word)
    return beyond


def _environment(server: Mapping[str, Any]) -> Iterator[Fault]:
    texts = {
        "missing": "{name} is locked and not set",
        "differs": "{name}={found} is not the locked value",
        "not locked": "{name}={found} is set and not locked in launch.env",
        "shadows": "{name}={found} leads to another package of the service's name",
        "unlocked path": "{name}={found} is set and not locked in launch.env",
        "not given": "{name}={found} comes not from launch.env, env_script or the container",
        "of unknown origin": "cannot tell whether {name}={found} comes from env_script",
    }
    warnings = ("unlocked path", "of unknown origin")
    for row in server["environment"]:
        if row["state"] in texts:
            text = texts[row["state"]].format(name=row["name"], found=printable(row["found"]))
            yield Fault(what="environment", text=text, warning=row["state"] in warnings)


def _code(server: Mapping[str, Any]) -> Iterator[Fault]:
    texts = {
        "deleted": "maps {path}, which has been deleted: it runs old code",
        "replaced": "maps {path} as inode {inode}, another file lies there now: it runs old code",
        "from elsewhere": "maps {path}, which is not in the site",
    }
    for row in server["mapped"]:
        if row["state"] in texts:
            text = f"process {row['pid']} " + texts[row["state"]].format_map(row)
            yield Fault(what="mapped", text=text)
    mapped = {row["path"] for row in server["mapped"]}
    for row in server["installed"]:
        if row["state"] != "ok":
            text = f"{row['path']} is {row['state']}: its sha256 is {row['found'] or 'none'}"
            yield Fault(what="mapped", text=text)
        elif row["path"] not in mapped:
            text = f"no process of the service has loaded {row['path']}"
            yield Fault(what="mapped", text=text)


def _rewritten(server: Mapping[str, Any]) -> Iterator[Fault]:
    """Files as planned again, of which nobody knows what they were when the server read them."""
    paths = server.get("rewritten", ())  # an older record does not tell
    if paths:
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        text = (
            f"{', '.join(map(printable, paths[:3]))}{more} was written, or its mode, owner or links"
            " changed, after the server was started: it may run what was there before; start it"
            " again"
        )
        yield Fault(what="old process", text=text)


def _answers(seen: Mapping[str, Any], launch: Launch) -> Iterator[Fault]:
    answers = {row["probe"]: row for row in seen["answers"]}
    for probe in _PROBES:
        row = answers.get(probe)
        if row is None or row["error"]:
            text = f"{probe}: {row['error'] if row else 'was not asked'}"
            yield Fault(what="answer", text=text)
            return
    root = answers["models"]["detail"]
    if launch.model and root.rstrip("/") != launch.model.rstrip("/"):
        yield Fault(what="model", text=f"it serves {printable(root)}, locked is {launch.model}")


def _model(seen: Mapping[str, Any]) -> Iterator[Fault]:
    for row in seen["model"]:
        if row["state"] in ("missing", "changed"):
            text = f"model file {row['path']} is {row['state']}"
            yield Fault(what="model", text=text)


def _log(seen: Mapping[str, Any]) -> Iterator[Fault]:
    log = seen.get("log") or {}
    if log.get("error"):
        text = f"its log {printable(log['path'])} is not read: {printable(log['error'])}"
        yield Fault(what="log", text=text)


def _age(seen: Mapping[str, Any]) -> Iterator[Fault]:
    """A clock decides nothing; of a process that we did not start it is all there is."""
    server, run = seen["server"], seen["run"]
    ours = run is not None and run["state"] == "running" and run["pid"] == server["pid"]
    if not ours and server["deployed"] and server["started"] < server["deployed"]:
        text = f"server {server['pid']} seems to be older than the last deploy"
        yield Fault(what="age", text=text, warning=True)


def _no_server(seen: Mapping[str, Any]) -> str:
    run = seen["run"]
    if run is None:
        return "no server runs, and none was recorded"
    log = (seen["log"] or {}).get("path", "")
    oom = seen.get("oom") or {}
    killed = [str(kill["task"]) for kill in oom.get("ours", ())]
    why = f"; the kernel ended {', '.join(killed)} for want of memory" if killed else ""
    if oom.get("error"):
        why = f"; whether memory ran out cannot be told ({printable(oom['error'])})"
    return f"no server runs; the one recorded (pid {run['pid']}) is {run['state']}{why}; read {log}"


def _name(row: Mapping[str, Any]) -> str:
    command = printable(" ".join(row["argv"]) or row["comm"])
    return f"pid {row['pid']} ({command[:120]})"
