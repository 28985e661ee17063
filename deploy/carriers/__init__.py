"""A carrier brings a bundle to one target, runs its agent there and brings the evidence back.

It decides nothing: what to do is in the request, what must be true is in the plan, and what was
found is in the evidence. All carriers are held to one contract test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from deploy.agent.words import Exit, Verb
from deploy.bundle import Bundle
from deploy.evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of the agent. Empty texts mean "as the plan says"; `wait` is in seconds."""

    verb: Verb
    site: str = ""
    python: str = ""
    env_script: str = ""
    launch_dir: str = ""
    wait: float = 0.0
    operator: str = ""
    force_running: bool = False
    recompile: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def steps_only(self) -> Request:
        """The same, from one who prints the evidence: the agent tells its steps and no more."""
        # As an option: the older agent of a locked bundle ignores what it does not know.
        return replace(self, options={**self.options, "steps_only": True})

    def to_json(self) -> dict[str, Any]:
        """The request as the agent's transport-independent entry takes it."""
        return {**asdict(self), "verb": self.verb.value, "options": dict(self.options)}

    def to_argv(self) -> list[str]:
        """The request as arguments of ``python3 NAME.pyz``."""
        argv = [self.verb.value]
        for key in ("site", "python", "env_script", "launch_dir", "operator"):
            if value := getattr(self, key):
                argv += ["--" + key.replace("_", "-"), value]
        if self.wait:
            argv += ["--wait", format(self.wait, "g")]
        if self.options:
            argv += ["--options", json.dumps(dict(self.options), sort_keys=True)]
        argv += [
            "--" + key.replace("_", "-")
            for key in ("force_running", "recompile")
            if getattr(self, key)
        ]
        return argv


class Carrier(Protocol):
    """The way to one target."""

    @property
    def name(self) -> str:
        """The target as the operator typed it, for instance ``ssh:a``."""
        ...

    def deliver(self, bundle: Bundle, request: Request) -> Evidence:
        """Run one verb of the bundle's agent on the target and return its evidence (evidence/1).

        Raises:
            Unreachable: the target gave no evidence, and why.
        """
        ...


def in_turn(
    target: Carrier,
    bundle: Bundle,
    requests: Sequence[Request],
    *,
    if_needed: bool = False,
    tell: Callable[[str], None],
) -> list[Evidence]:
    """Run several verbs on one target, each in a process of its own, until one fails.

    With `if_needed` the target is verified first; where all is well that evidence is the only one.
    A carrier that can do this in one go has a method of the same meaning, `deliver_in_turn`.
    """
    at_once = getattr(target, "deliver_in_turn", None)
    if at_once is not None:
        found: list[Evidence] = at_once(bundle, requests, if_needed=if_needed, tell=tell)
        return found
    if if_needed:
        first = target.deliver(bundle, replace(requests[0], verb=Verb.VERIFY))
        if first.exit is Exit.OK:
            return [first]
    said: list[Evidence] = []
    for request in requests:
        if said:
            tell(f"{request.verb.value}, in a process of its own")
        said.append(target.deliver(bundle, request))
        if said[-1].exit is not Exit.OK:
            break
    return said
