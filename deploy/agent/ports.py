"""Say who listens on a port, from the kernel's own tables: ss and lsof are often not there.

vLLM lets several sockets share a port (SO_REUSEPORT), so a second server starts without an error
and the kernel deals the connections out between them: every listener counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .proc import blind, text

_LISTEN = "0A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One listening socket. `pids` is empty when its owner is not to be seen from here."""

    address: str
    port: int
    inode: int
    pids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"address": self.address, "port": self.port, "pids": list(self.pids)}


def listening(port: int) -> tuple[Listener, ...]:
    """Return the listening sockets of the port in this network namespace, IPv4 before IPv6."""
    found: list[Listener] = []
    tables = 0
    for table in ("tcp", "tcp6"):
        try:
            rows = list(_sockets(table, port, _LISTEN))
        except FileNotFoundError:
            continue  # a kernel without IPv6 has no tcp6
        except OSError as err:
            raise blind(f"who listens on port {port}", err) from err
        tables += 1
        found.extend(Listener(address=a, port=port, inode=inode) for a, inode in rows)
    if not tables:
        raise blind(f"who listens on port {port}", FileNotFoundError("/proc/net/tcp"))
    return tuple(found)


def reach(listeners: Sequence[Listener]) -> str:
    """Return the address at which a server of this machine answers: its own, loopback for any."""
    address = listeners[0].address if listeners else "127.0.0.1"
    if address == "::" and _has_loopback6():
        return "::1"
    return "127.0.0.1" if address in ("0.0.0.0", "::") else address  # noqa: S104


def host(port: int) -> str:
    """Return the address at which whoever listens on a port of this machine answers now."""
    return reach(listening(port))


def _has_loopback6() -> bool:
    """True where ::1 is an address of this machine: many containers switch it off."""
    try:
        return "0" * 31 + "1 " in text("/proc/net/if_inet6")
    except OSError:
        return False


def _sockets(table: str, port: int, state: str = "") -> Iterator[tuple[str, int]]:
    """Yield address and inode of the sockets with this local port, of one state or of all."""
    ending = f":{port:04X}"
    for line in text(f"/proc/net/{table}").split("\n")[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[1].endswith(ending) and (not state or fields[3] == state):
            yield _address(fields[1][: -len(ending)]), int(fields[9])


def _address(raw: str) -> str:
    """Turn the kernel's hexadecimal address (words in the machine's order) into the usual text."""
    import socket

    words = [bytes.fromhex(raw[i : i + 8]) for i in range(0, len(raw), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def bound(port: int) -> bool:
    """True when somebody holds the port without listening yet: no table of /proc shows that.

    vLLM binds minutes before it listens. Connections of an earlier server still in their waiting
    time also keep a port from being bound, and are no holder.
    """
    import socket

    for kind, name, address in (
        (socket.AF_INET, "tcp", "0.0.0.0"),  # noqa: S104 - the wildcard conflicts with every address
        (socket.AF_INET6, "tcp6", "::"),
    ):
        try:
            with socket.socket(kind, socket.SOCK_STREAM) as probe:
                if kind == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as err:
            if err.errno == 98 and not any(True for _ in _sockets(name, port)):  # EADDRINUSE
                return True
    return False
