"""The carrier for a machine behind ssh: one connection, one exec, at most two round trips.

The agent goes over the line and runs from memory: the target needs sh and a Python >= 3.10. What it
keeps in its `state_dir`, contents, plan and agent alike, is not sent again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import paramiko

from deploy import inventory
from deploy.agent.main import launch_env
from deploy.agent.words import BundleError, Exit, Verb, canonical, digest, printable
from deploy.bundle import Bundle, listing_of
from deploy.carriers import Request
from deploy.carriers import ssh_wire as wire
from deploy.carriers.ssh_config import load
from deploy.carriers.ssh_keys import shown_safely
from deploy.carriers.ssh_line import Limits, Line, Stream, connect
from deploy.errors import NeedsPerson, Unfit, Unreachable
from deploy.evidence import Evidence, parse
from deploy.inventory import Host, Inventory
from deploy.layout import HERE

Tell = Callable[[str], None]
_IMPORT = re.compile(r"^\s*from \.(\w+)? ?import ([\w, ]+)", re.MULTILINE)
# The agent's table of verbs: the modules that it loads by name.
_VERB = re.compile(r"^\s*Verb\.(\w+): \(\"(\w+)\",", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    """A target behind ssh. `memory` is a folder that notes what each target is known to keep."""

    alias: str
    host: Host
    pins: Mapping[str, Mapping[str, str]]
    config: paramiko.SSHConfig
    limits: Limits = field(default_factory=Limits)
    memory: Path | None = None

    @property
    def name(self) -> str:
        return f"ssh:{self.alias}"

    def deliver(self, bundle: Bundle, request: Request) -> Evidence:
        """Run one verb of the bundle's agent there; its lines of progress go to stderr."""
        return self.deliver_in_turn(bundle, [request])[0]

    def deliver_in_turn(
        self,
        bundle: Bundle,
        requests: Sequence[Request],
        *,
        if_needed: bool = False,
        tell: Tell | None = None,
    ) -> list[Evidence]:
        """Run several verbs over one connection, each in a process of its own, until one fails.

        With `if_needed` the target is verified first; where all is well, that evidence is the only
        one and nothing else is done. `tell` takes the lines of progress.

        Raises:
            Unreachable: there is no evidence; the message says whether anything can have changed.
            Unfit: no Python there can run the agent, or sudo wants a password.
        """
        tell = tell or (lambda line: print(f"{self.name}: {line}", file=sys.stderr, flush=True))
        call = _Call(self, bundle, requests, if_needed, tell)
        with connect(
            self.host.ssh,
            config=self.config,
            pins=self.pins,
            label=self.alias,
            limits=self.limits,
        ) as line:
            return call.over(line)


class _Call:
    """One conversation with one target's agent."""

    def __init__(
        self,
        target: Ssh,
        bundle: Bundle,
        requests: Sequence[Request],
        if_needed: bool,
        tell: Tell,
    ) -> None:
        self._target, self._bundle, self._tell = target, bundle, tell
        self._nonce = f"dcu-bundle-{secrets.token_hex(8)}-"
        self._writes = any(request.verb.writes for request in requests)
        self._last = "it said nothing yet"
        verbs = {request.verb.name for request in requests} | {Verb.VERIFY.name}
        agent = _agent(bundle.path, bundle.sha256, frozenset(verbs))
        plan = canonical(bundle.plan.to_json()).decode()
        self._parts = {_sha(agent): agent, _sha(plan): plan}
        self._job: dict[str, Any] = {
            "nonce": self._nonce,
            "agent": _sha(agent),
            "plan": _sha(plan),
            "needs": list(self._parts),
            "alias": target.alias,
            "state_dir": target.host.state_dir,
            "if_needed": if_needed,
            "requests": [self._request(request) for request in requests],
        }

    def over(self, line: Line) -> list[Evidence]:
        host = self._target.host
        # What the target is believed to keep stays here; it asks for it where that is not so.
        memo = Memo(self._target)
        along = {sha: text for sha, text in self._parts.items() if sha not in memo.parts}
        head = wire.job({**self._job, "codes": memo.codes}, along)
        pythons = (*self._own_python(), *wire.PYTHONS)
        stream = line.start(*wire.command(pythons, head, self._nonce, sudo=host.sudo))
        answer = self._converse(line, stream)
        stream.finish()
        memo.note(answer["stored"], answer["codes"])
        return [self._evidence(found, line) for found in answer["evidence"]]

    def _own_python(self) -> tuple[str, ...]:
        """The service's interpreter, unless it belongs to a tree that is not the machine's own."""
        found = str(self._job["requests"][0]["python"])
        return (found,) if self._target.host.root == "/" else ()

    def _converse(self, line: Line, stream: Stream) -> dict[str, Any]:
        frames = wire.Frames(self._nonce)
        end = time.monotonic() + self._target.limits.greeting
        while data := self._received(line, stream):
            try:
                for kind, body in frames.feed(data):
                    if kind == "E":
                        answer: dict[str, Any] = json.loads(body)
                        return answer
                    self._act(kind, body, stream)
            except ValueError as err:
                raise self._lost(f"what it says makes no sense: {err}") from err
            if not frames.open and time.monotonic() > end:
                raise self._never_spoke(_greeting(self._target.limits, frames))
        raise self._ended(line, stream, frames)

    def _received(self, line: Line, stream: Stream) -> bytes:
        try:
            return stream.receive()
        except (OSError, EOFError, paramiko.SSHException) as err:
            raise self._lost(_silence(line) or f"{type(err).__name__}: {err}") from err

    def _act(self, kind: str, body: bytes, stream: Stream) -> None:
        if kind == "L":
            self._last = printable(body.decode("utf-8", "replace"))
            self._tell(self._last)
        elif kind == "N":
            try:
                self._send([str(sha) for sha in json.loads(body)], stream)
            except (OSError, EOFError, paramiko.SSHException):
                # The agent may have ended in the middle, and said why: that is read next.
                self._last = "it stopped taking contents"
        elif kind == "X":
            text = "\n".join(printable(row) for row in body.decode("utf-8", "replace").splitlines())
            raise BundleError(
                f"the agent crashed on {self._target.name}",
                why=text,
                fix="this is our bug; run `./inv verify` to see what state the target is in",
                exit=Exit.BUG,
            )

    def _send(self, wanted: Sequence[str], stream: Stream) -> None:
        """Send the contents that the target asked for; only what belongs to this call."""
        known = {*self._parts, self._bundle.sha256, *self._bundle.plan.blobs()}
        if not known.issuperset(wanted):
            raise ValueError("it asks for contents that are not of this plan")
        with zipfile.ZipFile(self._bundle.path) as archive:
            size = sum(self._size(archive, sha) for sha in wanted)
            self._tell(f"sending {len(wanted)} contents, {size:,} bytes")
            packer, ready = wire.Packer(), bytearray()
            for sha in wanted:
                with self._open(archive, sha) as content:
                    for frame in packer.frames(content):
                        ready += frame
                        if len(ready) >= wire.SENT_ALONE:
                            stream.send(ready)
                            ready = bytearray()
            stream.send(ready)

    def _size(self, archive: zipfile.ZipFile, sha: str) -> int:
        if sha == self._bundle.sha256:
            return self._bundle.path.stat().st_size
        part = self._parts.get(sha)
        return len(part) if part is not None else archive.getinfo(f"blobs/{sha}").file_size

    def _open(self, archive: zipfile.ZipFile, sha: str) -> IO[bytes]:
        import io

        if sha == self._bundle.sha256:  # a start brings the bundle itself to launch.dir
            return self._bundle.path.open("rb")
        part = self._parts.get(sha)
        return io.BytesIO(part.encode()) if part is not None else archive.open(f"blobs/{sha}")

    def _request(self, request: Request) -> dict[str, Any]:
        """The request as the agent takes it, with what hosts.yaml says of this host filled in."""
        host, found = self._target.host, request.steps_only().to_json()
        for key, value in host.overrides().items():
            found[key] = found[key] or value
        python = found["python"] or self._bundle.plan.python
        return {
            **found,
            "python": python,
            "root": host.root,
            "inputs": digest(self._bundle.inputs),
            "base_files": self._bundle.inputs.get("base_files"),
            "env": launch_env(self._bundle.inputs),
            "listing": listing_of(self._bundle) if request.options.get("all") else "",
            "agent": self._bundle.agent,
        }

    def _evidence(self, found: Mapping[str, Any], line: Line) -> Evidence:
        incidental = dict(found["incidental"])
        if overrides := self._target.host.overrides():
            incidental["overrides"] = overrides
        incidental["sent"] = line.sent
        return parse(json.dumps({**found, "incidental": incidental}))

    def _ended(self, line: Line, stream: Stream, frames: wire.Frames) -> BundleError:
        """Say why the stream ended without an answer."""
        found = frames.no_python()
        if found is not None:
            return wire.unfit(self._target.name, found)
        status = stream.finish()
        if frames.open:
            return self._lost(_silence(line) or f"it ended (status {status}); {stream.said}")
        if refused := _sudo(self._target, stream.said):
            return refused
        heard = _heard(frames)
        return self._never_spoke(
            _silence(line) or f"status {status}; it said: {heard or stream.said or 'nothing'}"
        )

    def _never_spoke(self, why: str) -> BundleError:
        return Unreachable(
            f"{self._target.name} let us in, but the agent never spoke",
            why=why,
            fix="its login shell or start-up files may end the session: try "
            f"`ssh {self._target.host.ssh} true`",
        )

    def _lost(self, why: str) -> BundleError:
        name = self._target.name
        if not self._writes:
            return Unreachable(
                f"the line to {name} was lost",
                why=f"{why}; last: {self._last}",
                fix="nothing was going to be changed; run it again",
            )
        return Unreachable(
            f"the line to {name} was lost, and what became of the call is not known",
            why=f"{why}; last: {self._last}",
            fix="run the same command again: it asks first, then finishes or undoes what is "
            "unfinished, and says which",
        )


def parse_ssh(alias: str, *, path: Path | None = None) -> Ssh:
    """Return the carrier of ``ssh:ALIAS``: a host of hosts.yaml, or an alias of ~/.ssh/config."""
    return target(alias, inventory.load(path or inventory.path_of(HERE, os.environ)))


def target(alias: str, known: Inventory, *, config: paramiko.SSHConfig | None = None) -> Ssh:
    return Ssh(
        alias=alias,
        host=known.host(alias),
        pins=known.pins(),
        config=config or load(),
        memory=HERE.cache / "ssh",
    )


def _silence(line: Line) -> str:
    return "nothing moved on the line any more, so it was cut" if line.silent else ""


def _greeting(limits: Limits, frames: wire.Frames) -> str:
    return (
        f"something else still spoke after {limits.greeting:g} s; it said: {_heard(frames)[-400:]}"
    )


def _heard(frames: wire.Frames) -> str:
    """What was said before the agent spoke, made printable."""
    return shown_safely(frames.noise.decode("utf-8", "replace").strip())


def _sudo(target: Ssh, said: str) -> BundleError | None:
    """Tell which of sudo's refusals it is, if it is one."""
    if not target.host.sudo or "sudo:" not in said:
        return None
    tty = "tty" in said or "terminal" in said
    why = "it wants a terminal" if tty and "password" not in said else "it wants a password"
    fix = (
        "allow sudo without a terminal for this user (Defaults !requiretty)"
        if "terminal" in why
        else "allow it without one for this user (NOPASSWD), or log in as root"
    )
    return Unfit(f"sudo refused on {target.name}", why=f"{why}: {said}", fix=fix)


@lru_cache(maxsize=8)
def _agent(path: Path, sha256: str, verbs: frozenset[str]) -> str:  # noqa: ARG001  part of the key
    """Return the agent's sources of a bundle, those that these verbs need, as one JSON text."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.startswith("agent/")]
        texts = {Path(name).stem: archive.read(name).decode() for name in names}
    if "stream" not in texts:
        raise NeedsPerson(
            f"the agent of {path.name} cannot run over a line",
            why="it was packed by a version of this product that did not know how",
            fix="make the bundle again: `./inv bundle`",
        )
    needed = {"__init__"}
    todo = ["stream", *(module for verb, module in _VERB.findall(texts["main"]) if verb in verbs)]
    while todo:
        name = todo.pop()
        if name in texts and name not in needed:
            needed.add(name)
            for module, names in _IMPORT.findall(texts[name]):
                todo += [module] if module else [one.strip() for one in names.split(",")]
    return json.dumps({name: texts[name] for name in sorted(needed)}, sort_keys=True)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Memo:
    """What one target kept when we last spoke; a wrong memory costs one round trip, no more.

    `parts` are digests of job parts in its store. `codes` are those of compiled agents there, by
    the interpreter's tag and version and the agent's digest: code is run only if it has the digest
    that the target told over an authenticated line.
    """

    def __init__(self, target: Ssh) -> None:
        self._path: Path | None = None
        self.parts: set[str] = set()
        self.codes: dict[str, str] = {}
        if target.memory is not None and target.host.state_dir:
            key = json.dumps([target.alias, target.host.ssh, target.host.state_dir])
            self._path = target.memory / f"{_sha(key)[:32]}.json"
            self._read(self._path)

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            self.parts = {str(sha) for sha in found["parts"]}
            self.codes = {str(key): str(sha) for key, sha in found["codes"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.parts, self.codes = set(), {}

    def note(self, stored: Sequence[str], codes: Mapping[str, str]) -> None:
        """Keep what the target says it keeps now."""
        codes = {**self.codes, **codes} if stored else {}
        if self._path is None or (self.parts == set(stored) and self.codes == codes):
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        beside.write_text(json.dumps({"parts": sorted(stored), "codes": codes}, sort_keys=True))
        beside.replace(self._path)


__all__ = ["Ssh", "parse_ssh", "target"]
