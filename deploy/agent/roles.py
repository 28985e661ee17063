"""Say what a command line stands for; a pattern search would find itself, tails and editors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from enum import Enum

_PROFILERS = frozenset({"hipprof", "rocprof", "rocprofv2", "rocprofv3", "rocprof-sys-run"})
_KERNEL_BENCHES = frozenset({"rocblas-bench", "rocblas-gemm-tune", "hipblaslt-bench"})
_SERVER_MODULES = frozenset({"vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"})
_COMMAND_MODULES = frozenset({"vllm", "vllm.entrypoints.cli.main"})
_BENCH_SCRIPTS = frozenset({"benchmark_serving.py", "benchmark_throughput.py", "opencompass"})
_TITLE = re.compile(r"^\w+::(APIServer|EngineCore|Worker|DPCoordinator)")
# comm is cut at 15 characters, so the last letters of a title may be missing there.
_COMM = re.compile(r"^\w+::(APIS|Engi|Work|DPCo)")


class Role(str, Enum):
    """What a process is to a service."""

    SERVER = "api server"
    ENGINE = "engine core"
    WORKER = "worker"
    COORDINATOR = "coordinator"
    SPAWNED = "spawned child"  # of Python's multiprocessing, before it has given itself a title
    BENCH = "bench driver"
    PROFILER = "profiler"
    OTHER = "other"


_TITLES = {
    "APIServer": Role.SERVER,
    "EngineCore": Role.ENGINE,
    "Worker": Role.WORKER,
    "DPCoordinator": Role.COORDINATOR,
}
SERVING = frozenset({Role.SERVER, Role.ENGINE, Role.WORKER, Role.COORDINATOR})


def role_of(argv: tuple[str, ...], comm: str = "") -> Role:
    """Return the role that a command line stands for; a name inside an argument counts nothing."""
    title = _TITLE.match(argv[0]) if argv else None
    if title:
        return _TITLES[title.group(1)]
    for words in _readings(argv):
        role = _command_role(words)
        if role is not Role.OTHER:
            return role
    if not argv and _COMM.match(comm):  # a zombie has lost its command line
        return next(role for title, role in _TITLES.items() if title[:4] == comm.split("::")[1][:4])
    return Role.OTHER


def _readings(argv: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The command line as it stands, and with a title in its first word taken apart."""
    if argv:
        yield argv
        if " " in argv[0].strip():
            yield (*argv[0].split(), *argv[1:])


def _command_role(words: tuple[str, ...]) -> Role:
    name = os.path.basename(words[0])
    if name in _PROFILERS:
        return Role.PROFILER
    if name in _KERNEL_BENCHES:
        return Role.BENCH
    if name == "vllm":
        return _vllm_role(words[1:])
    if name.startswith(("python", "pypy")):
        return _python_role(words[1:])
    return Role.OTHER


def _python_role(words: tuple[str, ...]) -> Role:
    """Read an interpreter's own options as far as its program, then name the program's role."""
    index = 0
    while index < len(words) and words[index].startswith("-"):
        option = words[index]
        rest = words[index + 1 :]
        if option == "-m" and rest:
            return _module_role(rest[0], rest[1:])
        if option == "-c" and rest:
            spawned = "multiprocessing.spawn import spawn_main" in rest[0]
            return Role.SPAWNED if spawned else Role.OTHER
        index += 2 if option in ("-X", "-W") else 1
    if index == len(words):
        return Role.OTHER
    name = os.path.basename(words[index])
    if name in _PROFILERS:
        return Role.PROFILER
    if name in _BENCH_SCRIPTS:
        return Role.BENCH
    return _vllm_role(words[index + 1 :]) if name == "vllm" else Role.OTHER


def _module_role(module: str, rest: tuple[str, ...]) -> Role:
    if module in _SERVER_MODULES:
        return Role.SERVER
    if module.startswith("vllm.benchmarks."):
        return Role.BENCH
    return _vllm_role(rest) if module in _COMMAND_MODULES else Role.OTHER


def _vllm_role(words: tuple[str, ...]) -> Role:
    command = words[0] if words else ""
    return {"serve": Role.SERVER, "bench": Role.BENCH}.get(command, Role.OTHER)
