"""The tasks for the machines of hosts.yaml: how they are, and which keys they may show."""

from __future__ import annotations

from invoke import Context

from deploy.console import show_json, task


@task(
    example="./inv hosts.status -n demo --group contest",
    help={
        "group": "every host of this group of hosts.yaml",
        "all": "every host of hosts.yaml (the default)",
        "to": "only these targets",
    },
)
def status(
    _: Context,
    name: str = "",
    to: str = "",
    group: str = "",
    all: bool = False,
    json: bool = False,
) -> int:
    """Show in one table how every host stands to the locked plan. Changes nothing.

    A host that is not as planned makes the exit code 10, or that of its own error.
    """
    from deploy import flow, report
    from deploy.agent.words import Verb
    from deploy.carriers import Request
    from deploy.errors import worst

    to = flow.chosen(to, group=group, everyone=all or not (to or group))
    visits = flow.run(name, to, Request(verb=Verb.CHECK, operator=flow.operator()))
    if json:
        show_json(report.visits_json(visits))
    else:
        print(report.fleet_text(visits))
    return worst(visit.exit for visit in visits)


@task(
    example="./inv hosts.trust -a a --fingerprint SHA256:... --reason 'rebuilt over night'",
    help={
        "alias": "a host of hosts.yaml, or a jump host as ProxyJump names it",
        "fingerprint": "what `ssh-keygen -lf` prints on the host itself: SHA256:...",
        "reason": "why, for whoever reads hosts.yaml next year",
    },
)
def trust(
    _: Context, alias: str = "", fingerprint: str = "", reason: str = "", json: bool = False
) -> int:
    """Pin a host key in hosts.yaml, beside those that are pinned already. Asks no network."""
    import datetime as dt
    import os

    from deploy import inventory
    from deploy.layout import HERE

    path = inventory.path_of(HERE, os.environ)
    today = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
    key = inventory.Key(fingerprint=fingerprint, since=today, reason=reason)
    pins = inventory.trust(path, alias, key).pins()[alias]
    if json:
        show_json({"schema": "pins/1", "host": alias, "pins": pins})
    else:
        print("\n".join(f"{alias}: {pin} ({told})" for pin, told in pins.items()))
    return 0
