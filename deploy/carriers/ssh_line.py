"""One authenticated connection to one machine, over any number of hops, that cannot hang.

`Line.start` is the seam: a command in, two byte streams out. Three things keep a dead network from
holding us: socket options (the kernel gives up on silence), time-outs of Paramiko's own phases, and
a watch that cuts the line when nothing has moved for a while, whatever it was that hung.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import fabric
import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST

from deploy.carriers.ssh_config import Hop, resolve, split
from deploy.carriers.ssh_keys import Pinned, Trust, shown_safely, trust_of, type_order
from deploy.errors import BadValues, Unreachable

# Small enough that even a line of 4 kB/s shows a sign of life between two slices.
_SLICE = 64 * 1024
_WINDOW = 4 << 20
_MOST_HOPS = 8
# Its tracebacks go nowhere: what went wrong with a line is said once, by our own errors.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)
# GCM is one pass over the data where counter mode and a MAC are two; measured about a third faster.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long each thing may take, in seconds; `silence` is the longest time without a byte.

    `greeting` bounds what a login shell says before the agent speaks: each byte of it ends a
    silence, so that one which never stops would hold us for ever.

    `attempts` counts tries of the first phase only, where a busy sshd drops connections
    (MaxStartups) before anything was asked of it.
    """

    connect: float = 10.0
    banner: float = 15.0
    login: float = 20.0
    channel: float = 15.0
    silence: float = 20.0
    greeting: float = 30.0
    attempts: int = 5
    pause: float = 0.5


class Watch:
    """Calls `cut` once when `touch` has not been called for `limit` seconds."""

    def __init__(self, limit: float, cut: Callable[[], None]) -> None:
        self._limit, self._cut = limit, cut
        self._last = time.monotonic()
        self._done = threading.Event()
        self.fired = False
        threading.Thread(target=self._run, name="ssh-watch", daemon=True).start()

    def touch(self) -> None:
        self._last = time.monotonic()

    def stop(self) -> None:
        self._done.set()

    def _run(self) -> None:
        while not self._done.wait(min(0.25, self._limit / 4)):
            if time.monotonic() - self._last > self._limit:
                self.fired = True
                self._cut()
                return


class Stream:
    """The two byte streams of one remote command. Every call is bounded by the line's watch."""

    def __init__(self, channel: paramiko.Channel, watch: Watch) -> None:
        self._channel, self._watch = channel, watch
        self._noise = b""

    def send(self, data: bytes | bytearray) -> None:
        """Send all of `data`, in slices (one huge send starves the other lines of this process).

        Raises OSError when the far side is gone.
        """
        view = memoryview(data)
        for start in range(0, len(view), _SLICE):
            piece = bytes(view[start : start + _SLICE])
            self._channel.sendall(piece)
            self._watch.touch()

    def receive(self) -> bytes:
        """Return some bytes of the command's stdout; nothing at its end or when the line is cut."""
        piece = self._channel.recv(1 << 16)
        self._watch.touch()
        self._drain()
        return piece

    def finish(self) -> int:
        """Close our sending side and return the exit status; -1 when it is not known."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()
        if not self._channel.status_event.wait(5):
            return -1
        self._drain()
        return self._channel.exit_status

    @property
    def said(self) -> str:
        """The last words of the command's stderr, made printable."""
        return shown_safely(self._noise[-400:].decode("utf-8", "replace").strip())

    def close(self) -> None:
        self._channel.close()

    def _drain(self) -> None:
        while self._channel.recv_stderr_ready():
            self._noise = (self._noise + self._channel.recv_stderr(1 << 16))[-4096:]


class Line:
    """An open connection; a context manager. Make one with `connect`."""

    def __init__(self, limits: Limits) -> None:
        self._hops: list[fabric.Connection] = []
        self._sockets: list[Any] = []
        self._limits = limits
        self._watch: Watch | None = None

    def log_in(self, hop: Hop, trust: Trust) -> None:
        """Go one hop further; retry only what a busy sshd drops before it has said its name.

        Raises:
            Unreachable: which hop, and why.
        """
        pause = self._limits.pause
        for attempt in range(1, self._limits.attempts + 1):
            try:
                self._hops.append(self._open(hop, trust))
                return
            except (OSError, EOFError, paramiko.SSHException) as err:
                if attempt == self._limits.attempts or not _dropped_early(err):
                    raise _unreachable(hop, err, attempt) from err
                time.sleep(pause * (0.5 + random.random()))  # noqa: S311  spreads the retries
                pause *= 2

    def _open(self, hop: Hop, trust: Trust) -> fabric.Connection:
        sock = _socket(hop, self._hops[-1] if self._hops else None, self._limits)
        self._sockets.append(sock)
        connection = _connection(hop, sock, trust, self._limits)
        connection.open()
        connection.transport.set_keepalive(5)
        return connection

    @property
    def transport(self) -> paramiko.Transport:
        found: paramiko.Transport = self._hops[-1].transport
        return found

    @property
    def sent(self) -> int:
        """Bytes that went out on this line, those of the login and of the encryption included."""
        first = self._sockets[0]
        return first.sent if isinstance(first, _Socket) else 0

    @property
    def silent(self) -> bool:
        """True when the line was cut because nothing moved any more."""
        return self._watch is not None and self._watch.fired

    def start(self, command: str, head: bytes = b"") -> Stream:
        """Start a command and send it `head`, without waiting for the server's word in between.

        Raises:
            Unreachable: no channel could be opened.
        """
        if self._watch is not None:
            self._watch.stop()
        self._watch = Watch(self._limits.silence, self.cut)
        try:
            channel = self.transport.open_session(_WINDOW, timeout=self._limits.channel)
            _exec(channel, command)
            stream = Stream(channel, self._watch)
            self._send_head(stream, head)
        except (OSError, EOFError, paramiko.SSHException) as err:
            raise Unreachable(
                "cannot start a command on the target",
                why=f"{type(err).__name__}: {shown_safely(str(err))}",
                fix="nothing was asked of it yet; try again, and look at the target's sshd",
            ) from err
        return stream

    def _send_head(self, stream: Stream, head: bytes) -> None:
        try:
            stream.send(head)
        except OSError:
            if not self.transport.is_active():
                raise
            # The command has ended already, and said why: that is read next.

    def cut(self) -> None:
        """Drop the line at once; whoever waits on it wakes up. Safe from any thread."""
        for sock in reversed(self._sockets):
            with contextlib.suppress(OSError, EOFError):
                if isinstance(sock, socket.socket):
                    sock.shutdown(socket.SHUT_RDWR)
        for hop in reversed(self._hops):
            with contextlib.suppress(OSError, EOFError, AttributeError):
                hop.transport.packetizer.close()
        self.close()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        for hop in reversed(self._hops):
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                hop.close()
        for sock in reversed(self._sockets):
            with contextlib.suppress(OSError, EOFError):
                sock.close()

    def __enter__(self) -> Line:  # noqa: PYI034  Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def connect(
    target: str,
    *,
    config: paramiko.SSHConfig,
    pins: Mapping[str, Mapping[str, str]],
    label: str = "",
    limits: Limits | None = None,
) -> Line:
    """Log in to `target` (alias or user@host:port) over the hops that ssh_config names.

    `pins` holds, by the name of a host or jump host, fingerprint -> where it was pinned; `label` is
    the target's name in it.

    Raises:
        Unreachable: which hop, in which phase, and why.
    """
    limits = limits or Limits()
    hops = route(target, config)
    line = Line(limits)
    try:
        for hop in hops:
            name = label if label and hop is hops[-1] else hop.name
            line.log_in(hop, trust_of(name, hop, pins.get(name, {})))
    except BaseException:
        line.close()
        raise
    return line


def route(target: str, config: paramiko.SSHConfig) -> list[Hop]:
    """Return the hops to `target` in the order of travel, the target last.

    As in OpenSSH, the first jump host is reached by its own configuration, each later one through
    the one before it.
    """
    hops = [resolve(target, config)]
    while hops[0].jumps:
        way = [resolve(name, config) for name in hops[0].jumps]
        if (way[0].host, way[0].port) == (hops[0].host, hops[0].port):
            break  # a wildcard `Host` made a machine its own jump host
        hops = way + hops
        if len(hops) > _MOST_HOPS:
            raise BadValues(
                f"the way to {target} has no end",
                why=" -> ".join(hop.name for hop in hops[:4]) + " -> ...",
                fix="a ProxyJump of your ssh configuration leads in a circle; mend it",
            )
    return hops


def _connection(hop: Hop, sock: Any, trust: Trust, limits: Limits) -> fabric.Connection:
    connection = fabric.Connection(
        hop.host,
        user=hop.user,
        port=hop.port,
        # Given outright, so that neither ~/.fabric.* nor Fabric's own idea of the way is read.
        config=fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True),
        gateway=False,
        forward_agent=False,
        connect_timeout=int(limits.connect),
        connect_kwargs={
            "sock": sock,
            "key_filename": list(hop.identity),
            "look_for_keys": not hop.identity,
            "allow_agent": _agent_answers(),
            "banner_timeout": limits.banner,
            "auth_timeout": limits.login,
            "channel_timeout": limits.channel,
            "transport_factory": _factory(trust),
        },
    )
    connection.client.set_missing_host_key_policy(Pinned(trust))
    return connection


def _factory(trust: Trust) -> Callable[..., paramiko.Transport]:
    def make(sock: Any, **options: Any) -> paramiko.Transport:
        transport = paramiko.Transport(sock, default_window_size=_WINDOW, **options)
        wanted = transport.get_security_options()
        wanted.key_types = type_order(trust, wanted.key_types)
        known = tuple(wanted.ciphers)
        fast = tuple(name for name in _CIPHERS if name in known)
        wanted.ciphers = fast + tuple(name for name in known if name not in fast)
        return transport

    return make


def _socket(hop: Hop, before: fabric.Connection | None, limits: Limits) -> Any:
    if before is not None:
        return before.transport.open_channel(
            "direct-tcpip", (hop.host, hop.port), ("", 0), timeout=limits.connect
        )
    if hop.command and hop.command.lower() != "none":
        return _command_socket(hop.command)
    plain = socket.create_connection((hop.host, hop.port), timeout=limits.connect)
    _notice_silence(plain, limits)
    sock = _Socket(fileno=plain.detach())
    sock.settimeout(limits.connect)
    return sock


def _notice_silence(sock: socket.socket, limits: Limits) -> None:
    """Let the kernel end a connection whose other side is gone; SSH keepalives alone never do."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_USER_TIMEOUT", int(limits.silence * 750)),
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):  # TCP_USER_TIMEOUT is Linux's
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Socket(socket.socket):
    """A socket that counts what goes out."""

    sent = 0

    def send(self, data: Any, flags: int = 0) -> int:
        count = super().send(data, flags)
        self.sent += count
        return count

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        if self.family != socket.AF_UNIX and hasattr(socket, "TCP_QUICKACK"):
            # The server's next small packet waits for our acknowledgement of the last one, which
            # the kernel would hold back for 40 ms. The option wears off, so it is set every time.
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return data


class _CommandSocket(_Socket):
    """A socket whose other end is a ProxyCommand's stdin and stdout.

    Paramiko's own ProxyCommand spins for ever when the command ends, and cannot be timed out.
    """

    child: subprocess.Popen[bytes]

    def close(self) -> None:
        super().close()
        if self.child.poll() is None:
            self.child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(2)
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()


def _command_socket(command: str) -> socket.socket:
    ours, theirs = socket.socketpair()
    # The user's own text of ~/.ssh/config, given to a shell as OpenSSH does.
    argv = ("/bin/sh", "-c", f"exec {command}")
    with theirs:
        child = subprocess.Popen(
            argv,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    sock = _CommandSocket(fileno=ours.detach())
    sock.child = child
    return sock


def _exec(channel: paramiko.Channel, command: str) -> None:
    """Ask for `command` without waiting for the answer, which would cost a round trip.

    What `Channel.exec_command` sends, but with want-reply off (RFC 4254, 6.5). A refused exec shows
    as an end of the stream without the magic.
    """
    transport = channel.get_transport()
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exec")
    message.add_boolean(False)  # noqa: FBT003
    message.add_string(command)
    transport._send_user_message(message)  # type: ignore[attr-defined]  # noqa: SLF001


def _agent_answers() -> bool:
    """True when an ssh-agent is there and alive: a stale socket would hang the login for ever."""
    path = os.environ.get("SSH_AUTH_SOCK")
    if not path:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(2)
            sock.connect(path)
            sock.sendall(b"\0\0\0\1\x0b")  # SSH_AGENTC_REQUEST_IDENTITIES
            return len(sock.recv(5)) > 0
    except OSError:
        return False


def _dropped_early(err: BaseException) -> bool:
    """True for what MaxStartups looks like: the connection ends before the server's banner."""
    if isinstance(err, paramiko.AuthenticationException):
        return False
    if isinstance(err, paramiko.ChannelException):
        return False
    if isinstance(err, OSError):
        return err.errno in (errno.ECONNRESET, errno.EPIPE)
    return isinstance(err, EOFError) or "banner" in str(err)


def _unreachable(hop: Hop, err: BaseException, attempts: int) -> Unreachable:
    said = f"{type(err).__name__}: {shown_safely(str(err))}"
    if isinstance(err, paramiko.AuthenticationException):
        keys = ", ".join(hop.identity) or "those of the ssh-agent and ~/.ssh"
        return Unreachable(
            f"{hop.name} did not let us in",
            why=f"{said}; user {hop.user}, keys tried: {keys}",
            fix=f"see that `ssh {hop.name}` works without a password (locked keys: in an agent)",
        )
    if _dropped_early(err):
        return Unreachable(
            f"{hop.name} drops connections before it says its name",
            why=f"{said}, {attempts} times",
            fix="its sshd may be at its limit (MaxStartups) or not yet up; try fewer hosts at once",
        )
    return Unreachable(
        f"cannot reach {hop.name}",
        why=f"{said} ({hop.host} port {hop.port})",
        fix=f"see that `ssh {hop.name}` works; after a rebuild, correct the address in hosts.yaml "
        "or ~/.ssh/config",
    )


__all__ = ["Limits", "Line", "Stream", "Watch", "connect", "route", "split"]
