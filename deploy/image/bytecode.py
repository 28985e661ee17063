"""Bytecode for the layer, made by the image's own Python: the agent's child program, run elsewhere.

The same program that a deploy runs on a live target makes these bytes, so an image and a target
hold the same pycs. It is started in a container; this module only writes its input and reads its
answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deploy.agent import pyc
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
    return pyc.question(
        [("make", f"{site}/{path}", source, b"") for path, source in sources.items()]
    )


def answer(
    sources: Sequence[str], out: bytes, said: bytes
) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return what the interpreter is (tag, version, magic) and the pyc of each module.

    Raises:
        Unfit: the program did not come to an answer; `said` is what it wrote on stderr.
        Refused: a source does not compile; all such sources with their lines.
    """
    _, mark, told = out.partition(MARK)
    last = said.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it said nothing"]
    try:
        info, made = pyc.understood(told, len(sources)) if mark else ({}, [])
    except ValueError as torn:
        mark, last = b"", [f"its answer cannot be read: {torn}"]
    if not mark:
        raise Unfit(
            "the image's Python cannot compile",
            why=last[0],
            fix="base.python must name the interpreter of the service in the base image",
        )
    results = list(zip(sources, made, strict=True))
    failed = [(path, verdict) for path, (verdict, _) in results if verdict != "made"]
    refuse_errors([(path, verdict.removeprefix("error: ")) for path, verdict in failed])
    return info, {path: data for path, (_, data) in results}
