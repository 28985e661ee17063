"""Which host keys are trusted. Nothing here adds one: `./inv hosts.trust` does, typed by a person.

A pin is the fingerprint that ``ssh-keygen -lf`` prints. The inventory's pins of a host decide
alone; only a host without any falls back to the user's known_hosts files, which are read, never
written.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import paramiko

from deploy.agent.words import printable
from deploy.carriers.ssh_config import Hop
from deploy.errors import Unreachable


class _Key(Protocol):
    def asbytes(self) -> bytes: ...
    def get_name(self) -> str: ...


def fingerprint(key: _Key) -> str:
    """Return ``SHA256:`` and 43 base64 characters, as OpenSSH prints it."""
    return _fingerprint(key.asbytes())


def _fingerprint(blob: bytes) -> str:
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The keys that one host may show: fingerprint -> where that is written.

    `types` are the key types to ask for first, so that a host with several keys shows one we know.
    """

    name: str  # as the operator calls the host; the argument of hosts.trust
    address: str  # host, or [host]:port
    known: Mapping[str, str] = field(default_factory=dict)
    revoked: frozenset[str] = frozenset()
    types: tuple[str, ...] = ()

    def check(self, key: _Key) -> None:
        """Raise Unreachable unless this key is pinned; both fingerprints are in the message."""
        shown = fingerprint(key)
        if shown in self.revoked:
            self._refuse("its host key is marked @revoked", key)
        if shown not in self.known:
            self._refuse("its host key " + ("changed" if self.known else "is unknown"), key)

    def _refuse(self, what: str, key: _Key) -> NoReturn:
        shown = fingerprint(key)
        trusted = "; ".join(f"{pin} ({where})" for pin, where in sorted(self.known.items()))
        raise Unreachable(
            f"refused to talk to {self.name}: {what}",
            why=f"{self.address} shows {shown} ({key.get_name()}); trusted: {trusted or 'none'}",
            fix="read the fingerprint on the target itself (ssh-keygen -lf /etc/ssh/"
            "ssh_host_ed25519_key.pub in its web terminal); a name that neither hosts.yaml nor"
            " your ssh configuration has is added there first; if it is this one: "
            f"./inv hosts.trust -a {self.name} --fingerprint {shown}",
        )


class Pinned(paramiko.MissingHostKeyPolicy):
    """Paramiko's door to `Trust`: its client knows no key file, so every key comes here."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:  # noqa: ARG002
        self._trust.check(key)


def trust_of(name: str, hop: Hop, pins: Mapping[str, str]) -> Trust:
    """Return what is trusted of one hop: its pins, else what its known_hosts files say."""
    address = hop.host if hop.port == 22 else f"[{hop.host}]:{hop.port}"
    if pins:
        return Trust(name=name, address=address, known=dict(pins))
    known: dict[str, str] = {}
    types: list[str] = []
    revoked: set[str] = set()
    for path in hop.known_hosts:
        for marker, key_type, blob, line in _entries(path, hop.key_alias or address):
            if marker == "@revoked":
                revoked.add(_fingerprint(blob))
            elif not marker:
                known.setdefault(_fingerprint(blob), f"{path}:{line}")
                types.append(key_type)
    return Trust(
        name=name,
        address=address,
        known=known,
        revoked=frozenset(revoked),
        types=tuple(dict.fromkeys(types)),
    )


def _entries(path: Path, name: str) -> Iterable[tuple[str, str, bytes, int]]:
    """Yield (marker, key type, key, line number) of the lines of a known_hosts file for `name`.

    Paramiko's own reader drops marked lines, a revocation among them.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or not _names(words[0], name):
            continue
        try:
            yield marker, words[1], base64.b64decode(words[2], validate=True), number
        except ValueError:
            continue


def _names(patterns: str, name: str) -> bool:
    """True when a known_hosts name field, plain or hashed, names this host."""
    for pattern in patterns.split(","):
        if pattern.startswith("|1|"):
            if paramiko.HostKeys.hash_host(name, pattern) == pattern:
                return True
        elif pattern == name:
            return True
    return False


def type_order(trust: Trust, offered: Iterable[str]) -> list[str]:
    """Return the key types to ask for, the known ones first; RSA's signatures count as ssh-rsa."""
    names = {t.removesuffix("-cert-v01@openssh.com") for t in trust.types}
    if "ssh-rsa" in names:
        names |= {"rsa-sha2-512", "rsa-sha2-256"}
    ordered = list(offered)
    return [t for t in ordered if t in names] + [t for t in ordered if t not in names]


def shown_safely(text: str) -> str:
    """Return what a stranger sent, cut and made printable, for an error message."""
    return printable(text if len(text) <= 400 else text[:400] + "...")
