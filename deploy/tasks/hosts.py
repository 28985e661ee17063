"""The tasks for the machines of hosts.yaml: how they are, and which keys they may show."""

from __future__ import annotations

from invoke import Context

from deploy.console import show_json, task


@task(
    example="./inv hosts.status -n demo --group GROUP",
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
    example="./inv hosts.trust -a ALIAS --fingerprint FINGERPRINT --reason 'rebuilt over night'",
    help={
        "alias": "a host of hosts.yaml, an alias of ~/.ssh/config, or a jump host as ProxyJump"
        " names it",
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
    from deploy.carriers import ssh_config
    from deploy.layout import HERE

    path, name = inventory.path_of(HERE, os.environ), alias.removeprefix("ssh:")
    today = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
    key = inventory.Key(fingerprint=fingerprint, since=today, reason=reason)
    known, config = inventory.load(path), ssh_config.load()
    jumps = ssh_config.jumps(config, [known.host(host).ssh for host in known.hosts])
    section = inventory.section_of(known, name, aliases=ssh_config.aliases(config), jumps=jumps)
    made = inventory.trust(path, name, key, section)
    pins = made.inventory.pins()[name]
    if json:
        show_json({"schema": "pins/1", "host": name, "done": made.done, "pins": pins})
    else:
        told = [f"  {pin} ({when})" for pin, when in pins.items()]
        print("\n".join([f"{name}: {made.done}; trusted now:", *told]))
    return 0
