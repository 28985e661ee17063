"""A server that answers byte by byte: each read is in time, and the whole never is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deploy.agent import health

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 22\r\nConnection: close\r\n\r\n"
BODY = b" " * 20 + b"{}"
SLOW_HEAD = (HEAD[:17], b"X-A: aaaaaaaaaaaaaa\r\n", HEAD[17:] + BODY)
SLOW_BODY = (HEAD, BODY, b"")


@contextmanager
def serving(parts: tuple[bytes, bytes, bytes], pause: float) -> Iterator[int]:
    """Answer one request; `pause` lies before each byte of the middle part."""
    over = threading.Event()

    def answer() -> None:
        with listener.accept()[0] as caller:
            caller.recv(4096)
            try:
                caller.sendall(parts[0])
                for byte in parts[1]:
                    over.wait(pause)
                    caller.sendall(bytes([byte]))
                caller.sendall(parts[2])
            except OSError:
                pass  # the one who asked is gone

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("parts", [SLOW_HEAD, SLOW_BODY], ids=["head", "body"])
@pytest.mark.parametrize(("pause", "error"), [(0.0, ""), (0.3, "no answer: timed out")])
def test_the_limit_of_an_ask_is_for_all_of_it(
    parts: tuple[bytes, bytes, bytes], pause: float, error: str
) -> None:
    with serving(parts, pause) as port:
        asked = health.probe(port, timeout=2.0)

    assert (asked[0].probe, asked[0].error) == ("health", error)
