"""Bytecode for the layer, made by the image's own Python: the agent's child program, run elsewhere.

The same program that a deploy runs on a live target makes these bytes, so an image and a target
hold the same pycs. It is started in a container; this module only writes its input and reads its
answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from deploy.agent.pyc import MARK, WORK, refuse_errors
from deploy.errors import Unfit

# The image's own environment must not reach the compile: a set's order, and with it the bytes,
# follows from the hash seed, and PYTHONPATH may hide the standard library.
_CLEAN = (
    "import os, sys; "
    "os.execve(sys.executable, [sys.executable, '-S', '-s', '-c', sys.argv[1]], "
    "{'PYTHONHASHSEED': '0'})"
)


def program(python: str) -> tuple[str, ...]:
    """The command line that compiles in an image whose interpreter is `python`."""
    return (python, "-I", "-S", "-c", _CLEAN, f"MARK = {MARK!r}\n{WORK}")


def question(site: str, sources: Mapping[str, bytes]) -> bytes:
    """The program's input: sources by module path, named as the service will see them."""
    jobs = [["make", f"{site}/{path}", len(source), 0] for path, source in sources.items()]
    return json.dumps(jobs).encode() + b"\n" + b"".join(sources.values())


def answer(
    sources: Sequence[str], out: bytes, said: bytes
) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return what the interpreter is (tag, version, magic) and the pyc of each module.

    Raises:
        Unfit: the program did not come to an answer; `said` is what it wrote on stderr.
        Refused: a source does not compile; all such sources with their lines.
    """
    _, mark, rest = out.partition(MARK)
    if not mark:
        last = said.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise Unfit(
            "the image's Python cannot compile",
            why=last[0],
            fix="base.python must name the interpreter of the service in the base image",
        )
    head, _, bodies = rest.partition(b"\n")
    told = json.loads(head)
    pycs: dict[str, bytes] = {}
    failed: list[tuple[str, str]] = []
    for path, item in zip(sources, told["answers"], strict=True):
        if item[0] == "error":
            failed.append((path, f"{item[1]}, line {item[2]}: {item[3]}"))
            continue
        pycs[path], bodies = bodies[: item[1]], bodies[item[1] :]
    refuse_errors(failed)
    return {key: str(value) for key, value in told["python"].items()}, pycs
