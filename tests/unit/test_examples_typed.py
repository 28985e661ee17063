"""The example of each task's --help, typed as it stands in a checkout that has reproduced."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.layout import HERE

_FOLDERS = ("deploy", "docker", "docs", "kernels", "manifests", "overlay")
# They need the tests or a rival's tools, take minutes, and are run by CI as they are.
_DEVELOP = {"test", "lint", "bench-self"}
# It would move the demo's tag in an engine that others use; tests/carriers builds its own images.
_NEEDS_ENGINE = {"build-image"}
_FIRST, _LAST = ("lock", "reproduce"), ("restore",)


def _examples() -> dict[str, tuple[str, str]]:
    """The command line of each task's example, and what is said below it."""
    import tasks

    found = {}
    for name in tasks.namespace.task_names:
        _, _, told = tasks.namespace[name].__doc__.rpartition("Example: ")
        command, _, below = told.partition("\n")
        found[name] = (command, below)
    return found


def _as_they_stand() -> dict[str, str]:
    return {name: command for name, (command, below) in _examples().items() if not below}


class Checkout:
    """A copy of this checkout, with an `inv` that needs no .venv of its own."""

    def __init__(self, top: Path) -> None:
        self.top = top
        for name in _FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(HERE.top / name, top / name, ignore=ignored)
        shutil.copy(HERE.top / "tasks.py", top)
        inv = top / "inv"
        inv.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -I -m invoke --search-root "{top}" "$@"\n'
        )
        inv.chmod(0o755)
        if (HERE.cache / "wheels").is_dir():
            shutil.copytree(HERE.cache / "wheels", top / "out/cache/wheels")

    def typed(self, command: str) -> str:
        """Type a line; return nothing where it ended with 0, else the code and what was said."""
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("DCU_", "PYTHON"))}
        done = subprocess.run(
            ("bash", "-c", command),
            cwd=self.top, env={**ours, "HOME": str(self.top)},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        return f"exit {done.returncode}: {done.stderr}" if done.returncode else ""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    made = Checkout(tmp_path_factory.mktemp("examples") / "checkout")
    yield made
    shutil.rmtree(made.top)


def test_an_example_names_what_only_its_reader_has_and_nothing_else_that_is_not_there() -> None:
    for name, (command, below) in _examples().items():
        own = re.findall(r"\b[A-Z]{2,}\b", command)
        assert below == (f"{', '.join(dict.fromkeys(own))}: yours" if own else ""), name
        assert not re.search(r"(ssh|container|image):[a-z]", command), name
        paths = [word for word in command.split() if word.startswith("docs/")]
        assert [path for path in paths if not (HERE.top / path).is_file()] == [], name


def test_the_examples_of_the_samples_work_in_a_fresh_clone(tmp_path: Path) -> None:
    commands = [command for command in _as_they_stand().values() if "docs/samples/" in command]
    fresh = Checkout(tmp_path / "fresh")

    assert len(commands) == 3
    assert {command: said for command in commands if (said := fresh.typed(command))} == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_example_works_as_it_stands_after_a_reproduction(checkout: Checkout) -> None:
    left = set(_as_they_stand()) - {*_DEVELOP, *_NEEDS_ENGINE, *_FIRST, *_LAST}
    commands = [_as_they_stand()[name] for name in (*_FIRST, *sorted(left), *_LAST)]

    failed = {command: said for command in commands if (said := checkout.typed(command))}

    assert len(commands) > 15
    assert failed == {}
