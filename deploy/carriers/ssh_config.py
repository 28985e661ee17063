"""What the user's ~/.ssh/config says of a name: address, user, keys, and the way there.

Read with Paramiko's parser, which knows neither `Include` nor the order of several jump hosts; both
are mended here. Agent forwarding and StrictHostKeyChecking are not read: the first is never wanted,
and the second would let a file switch off the inventory's pins.
"""

from __future__ import annotations

import getpass
import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko

from deploy.errors import BadValues

_INCLUDE = re.compile(r"^\s*include(?:\s+|\s*=\s*)(.+?)\s*$", re.IGNORECASE)
_DEEPEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One machine on the way, the target included, as ssh_config resolved it."""

    name: str  # as it was written: the alias, or user@host:port
    host: str
    port: int
    user: str
    identity: tuple[str, ...] = ()
    jumps: tuple[str, ...] = ()  # ProxyJump, the first one to be reached first
    command: str = ""  # ProxyCommand
    known_hosts: tuple[Path, ...] = ()
    key_alias: str = ""


class _Config(paramiko.SSHConfig):
    _config: list[dict[str, Any]]

    def get_hostnames(self) -> set[str]:
        # Paramiko's own ends with a KeyError at a Match block.
        return {pattern for entry in self._config for pattern in entry.get("host", ())}


def load(files: Sequence[Path] | None = None) -> paramiko.SSHConfig:
    """Return the parsed configuration of the user and, after it, of the machine."""
    if files is None:
        files = (Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config"))
    config = _Config()
    for path in files:
        if path.is_file():
            config.parse(_expanded(path, path.parent).splitlines())
    return config


def _expanded(path: Path, base: Path, depth: int = 0) -> str:
    """Return the text of a file with its Include lines replaced by the files that they name."""
    if depth > _DEEPEST:
        raise BadValues(
            f"cannot read {path}",
            why=f"its Include lines are nested more than {_DEEPEST} deep",
            fix="take the circle out of your ssh configuration",
        )
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        found = _INCLUDE.match(line)
        if found is None:
            lines.append(line)
            continue
        for pattern in found.group(1).split():
            where = Path(pattern.strip('"')).expanduser()
            names = sorted(glob.glob(str(base / where)))
            lines += [_expanded(Path(name), base, depth + 1) for name in names]
    return "\n".join(lines)


def resolve(name: str, config: paramiko.SSHConfig) -> Hop:
    """Return the hop that ``ssh NAME`` would reach; NAME is ``[user@]host-or-alias[:port]``.

    Raises:
        BadValues: the name is not of that form.
    """
    user, host, port = split(name)
    found = config.lookup(host)
    jump = str(found.get("proxyjump", ""))
    return Hop(
        name=name,
        host=str(found.get("hostname", host)),
        port=port or int(found.get("port", 22)),
        user=user or str(found.get("user", getpass.getuser())),
        identity=tuple(str(Path(p).expanduser()) for p in _list(found.get("identityfile"))),
        jumps=() if jump in ("", "none") else tuple(jump.split(",")),
        command=str(found.get("proxycommand") or ""),
        known_hosts=_known_hosts(found),
        key_alias=str(found.get("hostkeyalias", "")),
    )


def aliases(config: paramiko.SSHConfig) -> tuple[str, ...]:
    """Return the patterns of Host lines, but for those that match whatever is typed."""
    return tuple(sorted(p for p in _patterns(config) if p.strip("*?")))


def jumps(config: paramiko.SSHConfig, more: Iterable[str] = ()) -> frozenset[str]:
    """Return the jump hosts on the way to any alias or one of `more`, as ProxyJump names them."""
    todo, found = [*_patterns(config), *more], set[str]()
    while todo:
        try:
            new = set(resolve(todo.pop(), config).jumps) - found
        except BadValues:  # a line that nobody can use, for a machine that nobody asked about
            continue
        found |= new
        todo += new
    return frozenset(found)


def _patterns(config: paramiko.SSHConfig) -> list[str]:
    return [pattern for pattern in config.get_hostnames() if not pattern.startswith("!")]


def split(name: str) -> tuple[str, str, int]:
    """Return (user or "", host, port or 0) of ``user@host:port``; IPv6 stands in brackets."""
    form = r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^@:\s\[\]]+))"
    found = re.fullmatch(form + r"(?::(?P<port>[0-9]{1,5}))?", name)
    host = (found["six"] or found["host"]) if found else ""
    port = int(found["port"] or 0) if found else 0
    if found is None or host.startswith("-") or port > 65535:
        raise BadValues(
            f"{name!r} is no ssh target",
            why="it must be an alias of ~/.ssh/config or [user@]host[:port]",
            fix="correct it in hosts.yaml or in -t; an IPv6 address stands in brackets",
        )
    return found["user"] or "", host, port


def _list(value: Any) -> Sequence[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _known_hosts(found: Mapping[str, Any]) -> tuple[Path, ...]:
    own = str(found.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"))
    names = [*own.split(), "/etc/ssh/ssh_known_hosts"]
    return tuple(Path(name).expanduser() for name in names if name != "none")
