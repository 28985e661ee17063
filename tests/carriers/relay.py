"""A TCP relay for tests: holds every byte for a fixed time, and can cut, stall or count a line.

Delay is by a queue for each direction, not by sleeping between reads: throughput stays the line's
own, only the round trip grows, as on a long wire.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from types import TracebackType


class Relay:
    """Listens on a free port of 127.0.0.1 and passes each connection on to `port`.

    `delay` is seconds one way. A connection is closed once `cut_after` bytes went up (to the
    server), or `cut_down_after` came down. `turns` counts how often bytes went up after some had
    come down: the round trips that somebody waited for.
    """

    def __init__(
        self,
        port: int,
        *,
        delay: float = 0.0,
        cut_after: int | None = None,
        cut_down_after: int | None = None,
    ) -> None:
        self._target = port
        self.delay = delay
        self.limits = {"up": cut_after, "down": cut_down_after}
        self.up = self.down = self.connections = self.turns = 0
        self._last_way = "down"
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._flowing = threading.Event()
        self._flowing.set()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def passed(self, way: str, count: int) -> None:
        """Note that bytes were passed on."""
        if way == "up" and self._last_way == "down":
            self.turns += 1
        if count:
            self._last_way = way
        setattr(self, way, getattr(self, way) + count)

    def stall(self) -> None:
        """Keep every connection open and pass nothing on, as a dead network does."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Close every connection at once."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self._flowing.set()
        self._listener.close()
        self.cut()
        for sock in self._open:
            sock.close()

    def __enter__(self) -> Relay:  # noqa: PYI034  Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._keep(self._listener.accept()[0])
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        # Over a real distance nobody could send before the handshake had come back.
        time.sleep(2 * self.delay)
        with contextlib.suppress(OSError):
            far = self._keep(socket.create_connection(("127.0.0.1", self._target), timeout=10))
            far.settimeout(None)
            self.connections += 1
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Direction(self, near, far, "up").start()
            _Direction(self, far, near, "down").start()
            return
        near.close()

    def _keep(self, sock: socket.socket) -> socket.socket:
        """Note a socket for the end; one that comes after the end is closed at once."""
        self._open.append(sock)
        if self._closed:
            sock.close()
        return sock


class _Direction:
    """One way of one connection: a thread that reads and one that writes what has waited enough."""

    def __init__(self, relay: Relay, source: socket.socket, sink: socket.socket, way: str) -> None:
        self._relay, self._source, self._sink, self._way = relay, source, sink, way
        self._queue: deque[tuple[float, bytes]] = deque()
        self._some = threading.Condition()
        self._passed = 0

    def start(self) -> None:
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        while True:
            data = b""
            with contextlib.suppress(OSError):
                data = self._source.recv(1 << 16)
                # A wire acknowledges nothing by itself, so it must not hold that back either.
                self._source.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            self._put(data)
            if not data:
                return

    def _put(self, data: bytes) -> None:
        with self._some:
            self._queue.append((time.monotonic() + self._relay.delay, data))
            self._some.notify()

    def _write(self) -> None:
        while True:
            with self._some:
                while not self._queue:
                    self._some.wait()
                due, data = self._queue.popleft()
            time.sleep(max(0.0, due - time.monotonic()))
            self._relay._flowing.wait()
            if not self._pass_on(data):
                return

    def _pass_on(self, data: bytes) -> bool:
        limit = self._relay.limits[self._way]
        if limit is not None and self._passed + len(data) > limit:
            data = data[: max(0, limit - self._passed)]
        try:
            if data:
                self._sink.sendall(data)
            self._passed += len(data)
            self._relay.passed(self._way, len(data))
            if limit is not None and self._passed >= limit:
                self._source.shutdown(socket.SHUT_RDWR)
                self._sink.shutdown(socket.SHUT_RDWR)
                return False
            if not data:
                self._sink.shutdown(socket.SHUT_WR)
                return False
        except OSError:
            with contextlib.suppress(OSError):
                self._source.shutdown(socket.SHUT_RDWR)
            return False
        return True
