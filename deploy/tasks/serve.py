"""Tasks about the service of a target: `./inv serve.start`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from invoke import Context

from deploy.console import show_json, task

if TYPE_CHECKING:
    from deploy.gates import Visit

_TWIN = "a twin of the measured service, with markers on (dispatch.diag: twin)"
_OFF = "the service with the candidate's switch (dispatch.switch) turned off"


@task(
    example="./inv serve.start -n NAME -t ssh:ALIAS",
    help={
        "ready": "seconds to wait for the first generation (default: launch.ready); 0: do not wait",
        "off": _OFF,
        "twin": _TWIN,
    },
)
def start(
    _: Context, name: str = "", to: str = "", ready: float = -1.0, off: bool = False,
    twin: bool = False, json: bool = False,
) -> int:  # fmt: skip
    """Start the locked service with start_vllm.sh, wait until it generates, judge gate 5."""
    options = {} if ready < 0 else {"ready": ready}
    return _ask("start", name, to, options, json=json, off=off, twin=twin)


@task(
    example="./inv serve.stop -n NAME -t ssh:ALIAS",
    help={
        "grace": "seconds it may take to end by itself",
        "kill": "then end for good what hangs; only what was recorded",
    },
)
def stop(
    _: Context, name: str = "", to: str = "", grace: float = 60.0, kill: bool = False,
    json: bool = False,
) -> int:  # fmt: skip
    """End the recorded service by pid and start time, and prove that nothing of it is left."""
    return _ask("stop", name, to, {"grace": grace, "kill": kill}, json=json)


@task(
    example="./inv serve.status -n NAME -t ssh:ALIAS --follow",
    help={
        "expect": "clean: anything left of a server is a fault; running: its absence is",
        "full": "hash the model's shards too",
        "ask": "send a real request (--no-ask: look only)",
        "follow": "look again, and show its log, until it answers or has ended",
        "off": _OFF,
        "twin": _TWIN,
    },
)
def status(
    _: Context, name: str = "", to: str = "", expect: str = "", full: bool = False,
    ask: bool = True, follow: bool = False, off: bool = False, twin: bool = False,
    json: bool = False,
) -> int:  # fmt: skip
    """List servers, engines, orphans, listeners, device holders; judge gate 5. Changes nothing."""
    options = {"expect": expect, "full": full, "ask": ask}
    if follow:
        return _follow(name, to, options, json=json, off=off, twin=twin)
    return _ask("service", name, to, options, json=json, off=off, twin=twin)


@task(
    example="./inv serve.prove -n NAME --prompt 12000",
    help={
        "prompt": "tokens of the prompt that is sent",
        "salt": "another number, another prompt: no cached prefix fits",
        "off": "demand that nothing is selected, as the switch is off",
        "twin": _TWIN,
    },
)
def prove(
    _: Context, name: str = "", to: str = "", prompt: int = 12000, salt: int = 0,
    off: bool = False, twin: bool = False, json: bool = False,
) -> int:  # fmt: skip
    """Send one prompt and judge gate 6 by the markers it left in the log."""
    from deploy import serving

    visits = serving.prove(name, to, prompt=prompt, off=off, twin=twin, salt=salt)
    return _show(visits, json=json)


def _ask(
    verb: str,
    name: str,
    to: str,
    options: Mapping[str, Any],
    *,
    json: bool,
    off: bool = False,
    twin: bool = False,
) -> int:
    from deploy import serving
    from deploy.agent.words import Verb

    return _show(serving.ask(name, to, Verb(verb), options, off=off, twin=twin), json=json)


def _follow(
    name: str,
    to: str,
    options: Mapping[str, Any],
    *,
    json: bool,
    off: bool = False,
    twin: bool = False,
) -> int:
    """Look every few seconds and show what the log gained; end with the last look."""
    import time

    from deploy import serving
    from deploy.agent.words import Verb
    from deploy.console import say

    shown: dict[str, list[str]] = {}
    while True:
        look = {**options, "ask": True, "patience": 5}
        visits = serving.ask(name, to, Verb.SERVICE, look, off=off, twin=twin)
        for visit in visits:
            for line in _gained(visit, shown):
                say(f"{visit.target}: {line}")
        if all(_settled(visit) for visit in visits):
            return _show(visits, json=json)
        time.sleep(3)


def _gained(visit: Visit, shown: dict[str, list[str]]) -> list[str]:
    """Return the lines of the log's end that were not shown yet."""
    log = visit.evidence.raw.get("service", {}).get("log") if visit.evidence else None
    tail = list(log["tail"]) if log else []
    before = shown.get(visit.target, [])
    shown[visit.target] = tail
    known = next((n for n in range(len(tail), 0, -1) if tail[:n] == before[-n:]), 0)
    return tail[known:]


def _settled(visit: Visit) -> bool:
    """True when nothing more will come: it answers, it has ended, or the target does not answer."""
    seen = visit.evidence.raw.get("service") if visit.evidence else None
    if visit.error is not None or not seen or not seen["server"]:
        return True
    answers = seen["answers"]
    return len(answers) == 3 and not answers[-1]["error"]


def _show(visits: list[Visit], *, json: bool) -> int:
    from deploy import report
    from deploy.errors import worst

    if json:
        show_json(report.visits_json(visits))
    else:
        print("\n".join(report.visit_text(visit) for visit in visits))
    return worst(visit.exit for visit in visits)
