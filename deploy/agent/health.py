"""Ask a running server whether it works: health, model, and one real generation.

Health answers 200 while nothing can be generated, so only a generation proves readiness. The
connection is made straight to where it listens: a proxy of the environment must not stand
between (an image may preset one, and it answers 503).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import ports

if TYPE_CHECKING:
    import socket
    import threading

_MOST = 1 << 20  # bytes of an answer that are read
PROMPT = "1 2 3 4"
_FIRST_ID = 32  # ids from here on are plain tokens in every vocabulary we know of


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One probe. `status` is 0 when there was no answer, `error` says why it does not pass."""

    probe: str
    status: int = 0
    error: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.error

    def to_json(self) -> dict[str, Any]:
        return {
            "probe": self.probe,
            "status": self.status,
            "error": self.error,
            "detail": self.detail,
        }


def probe(
    port: int, served_name: str = "", *, host: str = "127.0.0.1", timeout: float = 60.0
) -> tuple[Answered, ...]:
    """Ask for health, models and one generation, in this order; the first failure ends it."""
    address = (host, port)
    asked = [_health(address, timeout)]
    if asked[-1].passed:
        name, models = _models(address, served_name, timeout)
        asked.append(models)
    if asked[-1].passed and len(asked) == 2:
        asked.append(_generation(address, name, timeout))
    return tuple(asked)


def wait(port: int, served_name: str, seconds: float, alive: Any) -> tuple[Answered, ...]:
    """Probe until all pass, the time is over, or `alive()` is false; return the last answers."""
    limit = time.monotonic() + seconds
    while True:
        left = limit - time.monotonic()
        host = ports.host(port)  # it does not listen from the start
        answered = probe(port, served_name, host=host, timeout=max(1.0, min(60.0, left)))
        if len(answered) == 3 and answered[-1].passed:
            return answered
        if left <= 0 or not alive():
            return answered
        time.sleep(min(1.0, max(0.0, left)))


def generate(
    port: int, name: str, tokens: int, *, salt: int = 0, output: int = 8, timeout: float = 600.0
) -> dict[str, Any]:
    """Send one prompt of exactly so many tokens; return what came back, or why it does not count.

    A server that counts other tokens has computed other steps than were asked for.

    The prompt is given as token ids, so that no template and no tokenizer changes its length. Its
    first tokens follow from `salt`: with another salt no cached prefix fits.
    """
    ids = [_FIRST_ID + (salt >> (3 * i)) % 8 for i in range(21)]
    ids = (ids + [_FIRST_ID + i % 64 for i in range(tokens)])[:tokens]
    body = {
        "model": name,
        "prompt": ids,
        "max_tokens": output,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": True,
    }
    address = (ports.host(port), port)
    status, raw, error, _ = _ask(address, "POST", "/v1/completions", timeout, body)
    raw = raw if isinstance(raw, dict) else {}
    usage = raw.get("usage") or {}
    choices = raw.get("choices") or [{}]
    counted = usage.get("prompt_tokens")
    if not error and not usage.get("completion_tokens"):
        error = "it made no token"
    elif not error and counted != tokens:
        error = f"it counted {counted} tokens of the prompt, sent were {tokens}"
    return {
        "status": status,
        "error": error,
        "prompt_tokens": counted,
        "completion_tokens": usage.get("completion_tokens"),
        "text": choices[0].get("text", ""),
    }


def _health(address: tuple[str, int], timeout: float) -> Answered:
    status, _, error, seconds = _ask(address, "GET", "/health", timeout)
    return Answered(probe="health", status=status, error=error, seconds=seconds)


def _models(address: tuple[str, int], wanted: str, timeout: float) -> tuple[str, Answered]:
    status, raw, error, seconds = _ask(address, "GET", "/v1/models", timeout)
    rows = raw.get("data") if isinstance(raw, dict) else None
    rows = [row for row in rows or () if isinstance(row, dict)]
    names = [str(row.get("id")) for row in rows]
    if not error and not names:
        error = "it lists no model"
    elif not error and wanted and wanted not in names:
        error = f"it serves {', '.join(names)}, not {wanted}"
    name = wanted or (names[0] if names else "")
    root = next((str(row.get("root", "")) for row in rows if row.get("id") == name), "")
    answered = Answered(probe="models", status=status, error=error, detail=root, seconds=seconds)
    return name, answered


def _generation(address: tuple[str, int], name: str, timeout: float) -> Answered:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "seed": 0}
    status, raw, error, seconds = _ask(address, "POST", "/v1/completions", timeout, body)
    if not error:
        usage = raw.get("usage") if isinstance(raw, dict) else None
        made = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if not made:
            error = "it answered without a token"
        elif raw.get("model") != name:
            error = f"the answer is of {raw.get('model')}, not of {name}"
    return Answered(probe="generation", status=status, error=error, seconds=seconds)


def _ask(
    address: tuple[str, int], method: str, path: str, timeout: float, body: Any = None
) -> tuple[int, Any, str, float]:
    """Return status, JSON (or None), why it is no answer, and how long it took in seconds.

    `timeout` is for all of it: an answer that comes byte by byte would never meet a socket's own.
    """
    import http.client
    import threading

    begun = time.monotonic()
    connection = http.client.HTTPConnection(*address, timeout=timeout)
    ended = threading.Event()
    ender = None
    try:
        connection.connect()
        ender = threading.Timer(timeout, _end, (connection.sock, ended))
        ender.start()
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read(_MOST)
        status = response.status
        if ended.is_set():
            raise TimeoutError
    except (OSError, http.client.HTTPException) as err:
        late = ended.is_set() or isinstance(err, TimeoutError)
        why = "timed out" if late else str(err) or type(err).__name__
        return 0, None, f"no answer: {why}", time.monotonic() - begun
    finally:
        if ender is not None:
            ender.cancel()
        connection.close()
    seconds = time.monotonic() - begun
    try:
        raw = json.loads(text) if text else {}
    except ValueError:
        return status, None, f"status {status} and no JSON", seconds
    return status, raw, "" if status == 200 else f"status {status}", seconds


def _end(connected: socket.socket, ended: threading.Event) -> None:
    """End a connection that somebody reads from: the read returns at once."""
    import socket

    ended.set()
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended already
