"""A carrier brings a bundle to one target, runs its agent there and brings the evidence back.

It decides nothing: what to do is in the request, what must be true is in the plan, and what was
found is in the evidence. All carriers are held to one contract test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from deploy.agent.words import Verb
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
