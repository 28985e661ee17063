"""A relay before the engine's socket that holds back the answers to chosen requests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def slow_socket(folder: Path, word: str, seconds: float) -> Iterator[str]:
    """The relay's URL, for the time of the block."""
    relay = _Relay(folder, word, seconds)
    relay.start()
    try:
        yield relay.url
    finally:
        relay.stop()


class _Relay:
    """Listens at `url`. The answer to a request whose first line holds `word` waits `seconds`."""

    def __init__(self, folder: Path, word: str, seconds: float) -> None:
        self._path = folder / "slow.sock"
        self._word, self._seconds = word.encode(), seconds
        self.url = f"unix://{self._path}"

    def start(self) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._path))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                engine = socket.socket(socket.AF_UNIX)
                engine.connect("/var/run/docker.sock")
                slow = [False]
                for one, other, asks in ((client, engine, True), (engine, client, False)):
                    argv = (one, other, slow, asks)
                    threading.Thread(target=self._copy, args=argv, daemon=True).start()

    def _copy(
        self, source: socket.socket, target: socket.socket, slow: list[bool], asks: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if asks and piece.startswith((b"GET ", b"POST ", b"DELETE ")):
                    slow[0] = self._word in piece.split(b"\r\n", 1)[0]
                elif not asks and slow[0]:
                    time.sleep(self._seconds)
                target.sendall(piece)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
