"""Run one target under atheris: python run.py TARGET CORPUS [libFuzzer options].

CORPUS is a folder that grows; it starts with the target's seeds and the cases kept in cases/.
A crash is written to the current folder; kept as cases/TARGET/NAME it stays a test for ever.
A target may know more than `seeds` and `one`: `words`, which its readers look for, and `mutate`,
which changes an input such that the first check of a reader does not end it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
TARGETS = ("bundle", "said", "series", "yaml")


def load(name: str) -> ModuleType:
    """Import tests/fuzz/target_NAME.py from beside this file."""
    spec = importlib.util.spec_from_file_location(f"target_{name}", HERE / f"target_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(name: str) -> list[Path]:
    """What fuzzing found once, and what is worth to begin with."""
    return sorted((HERE / "cases" / name).glob("*"))


def main(argv: list[str]) -> int:
    """Fuzz in a child, since libFuzzer ends its process at once and would leave `scratch` behind.

    `scratch` lies in memory: a target writes one file there again and again.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm") as scratch:
        child = os.fork()
        if not child:
            _fuzz(argv, Path(scratch))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _fuzz(argv: list[str], scratch: Path) -> None:
    import atheris

    name, corpus, *options = argv
    sys.path.insert(0, str(HERE.parents[1]))
    with atheris.instrument_imports(include=["deploy"]):
        target = load(name)
    _begin(target, name, Path(corpus))
    if hasattr(target, "words"):
        told = scratch / "words"
        told.write_text("".join(f"{_quoted(word)}\n" for word in target.words()))
        options = [f"-dict={told}", *options]
    own = {}
    if hasattr(target, "mutate"):
        own["custom_mutator"] = lambda data, most, seed: target.mutate(
            data, most, seed, atheris.Mutate
        )
    argv = [sys.argv[0], corpus, *options]
    atheris.Setup(argv, lambda data: target.one(data, scratch), **own)
    atheris.Fuzz()


def _begin(target: ModuleType, name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, data in target.seeds().items():
        (folder / f"seed-{seed}").write_bytes(data)
    for path in cases(name):
        (folder / f"case-{path.name}").write_bytes(path.read_bytes())


def _quoted(word: str) -> str:
    return '"' + "".join(f"\\x{byte:02x}" for byte in word.encode()) + '"'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
