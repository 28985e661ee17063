"""Run the benchmark's client on the target: its words, its environment, its result.

What the caller's shell happens to hold must not change what is measured: proxies, vLLM's and
Python's variables and those that the site's script reads are cleared, and their names are recorded.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .texts import digested

# What run_throughput.sh reads: set by us where it is used, cleared where it is not.
SCRIPT_NAMES = (
    "CUSTOM_OUTPUT_LEN", "MAX_CONCURRENCY", "MODEL_DIR", "NUM_WARMUPS", "REQUEST_RATE",
    "RESULT_ROOT", "SERVED_MODEL_NAME", "VLLM_HOST", "VLLM_PORT",
)  # fmt: skip
_STRAY = re.compile(r"^(VLLM_|PYTHON|HF_|OPENAI_|(https?|all|ftp|no)_proxy$)", re.IGNORECASE)
_HERE = "127.0.0.1,localhost,::1"
RESULT = "result.json"
_MOST = 1 << 28  # bytes of a result that are read
# After sourcing, once more: an image's script may set a proxy. Its own other variables stay.
_SHELL = (
    '[ -z "$1" ] || . "$1"\nshift\n'
    "unset http_proxy https_proxy all_proxy ftp_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY FTP_PROXY\n"
    f"export NO_PROXY={_HERE} no_proxy={_HERE}\n"
    'exec "$@"\n'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One call of the client: words, folder, variables of its own, and where its result will be."""

    argv: tuple[str, ...]
    folder: str
    result: str
    env_script: str = ""
    extra: Mapping[str, str] | None = None


def environment(found: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return what a client may see of an environment, and the names that were cleared."""
    stray = [name for name in found if _STRAY.match(name) or name in SCRIPT_NAMES]
    kept = {name: value for name, value in found.items() if name not in stray}
    return kept, sorted(stray)


def argv(
    manifest: Mapping[str, Any],
    bucket: Mapping[str, Any],
    *,
    model: str,
    host: str,
    port: int,
    folder: str,
) -> tuple[str, ...]:
    """Return the words of one round. The data set's path must stand behind its kind."""
    launch = dict(manifest.get("launch") or {})
    command = tuple(launch.get("command") or ("vllm", "serve"))
    client = (
        (*command[:-1], "bench", "serve")
        if command[-1:] == ("serve",)
        else (("vllm", "bench", "serve"))
    )
    name = dict(manifest.get("model") or {}).get("served_name", "")
    return (
        *client, "--host", host, "--port", str(port), "--model", str(name),
        "--tokenizer", model, *flags(manifest),
        "--dataset-name", "custom", "--dataset-path", str(bucket["dataset"]),
        "--num-prompts", str(bucket["requests"]),
        "--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", RESULT,
    )  # fmt: skip


def flags(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(word) for word in dict(manifest.get("bench") or {}).get("flags", ()))


def run(
    work: Work, log: str, env: Mapping[str, str], patience: float, tick: Callable[[], None]
) -> tuple[int, float, float]:
    """Run it to its end; return its exit status, when it began (epoch) and how long it took (s).

    It gets a session of its own, which is ended whole when it takes longer than `patience` seconds,
    or when we are asked to end. `tick` is called every few seconds.
    """
    begun, clock = time.time(), time.monotonic()
    with open(log, "ab") as output:
        child = subprocess.Popen(
            ("/bin/sh", "-c", _SHELL, "sh", work.env_script, *work.argv),
            cwd=work.folder,
            env={**env, **(work.extra or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while True:
            try:
                code = child.wait(5.0)
                break
            except subprocess.TimeoutExpired:
                tick()
            if time.monotonic() - clock > patience:
                raise TimeoutError(f"the client did not end within {patience:g} s")
    except BaseException:
        _end(child)
        raise
    return code, begun, time.monotonic() - clock


def read(path: str, begun: float) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a result without its texts, and why it is none of this round."""
    try:
        found = os.stat(path)
        with open(path, "rb") as file:
            raw = json.loads(file.read(_MOST))
    except FileNotFoundError:
        return None, ["the client wrote no result"]
    except (OSError, ValueError) as err:
        return None, [f"the result cannot be read: {err}"]
    if not isinstance(raw, dict):
        return None, ["the result is no JSON object"]
    said = list(_stale(raw, found.st_mtime, begun))
    texts = raw.pop("generated_texts", None)
    if isinstance(texts, list):
        raw["texts"] = [digested(str(text)) for text in texts]
    if isinstance(raw.get("errors"), list):  # tracebacks, maybe with addresses: their last line
        raw["errors"] = [_last_line(str(text)) for text in raw["errors"]]
    return raw, said


def _stale(raw: Mapping[str, Any], written: float, begun: float) -> Sequence[str]:
    said = []
    if written < begun - 2:
        said.append("the result file is older than the round: it is of an earlier run")
    date = str(raw.get("date") or "")
    try:
        dated = time.mktime(time.strptime(date, "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        said.append(f"the result has no date that can be read: {date!r}")
    else:
        if dated < int(begun) - 1:
            said.append(f"the result is dated {date}, before the round began: an earlier run's")
    return said


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:500] if lines else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(10)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
