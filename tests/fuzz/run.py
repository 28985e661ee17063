"""Run one target under atheris: python run.py TARGET CORPUS [libFuzzer options].

CORPUS is a folder that grows; it starts with the target's seeds and the cases kept in cases/.
A crash is written to the current folder; kept as cases/TARGET/NAME it stays a test for ever.
"""

from __future__ import annotations

import importlib.util
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


def main(argv: list[str]) -> None:
    import atheris

    name, corpus, *options = argv
    sys.path.insert(0, str(HERE.parents[1]))
    with atheris.instrument_imports(include=["deploy"]):
        target = load(name)
    folder = Path(corpus)
    folder.mkdir(parents=True, exist_ok=True)
    for seed, data in target.seeds().items():
        (folder / f"seed-{seed}").write_bytes(data)
    for path in cases(name):
        (folder / f"case-{path.name}").write_bytes(path.read_bytes())
    scratch = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-", dir="/dev/shm"))
    atheris.Setup([sys.argv[0], corpus, *options], lambda data: target.one(data, scratch))
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
