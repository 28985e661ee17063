"""Who may import what: the seams to the world, and the layers; each with a fault planted."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.layout import HERE

# A library -> the modules that may import it (a package's name means all in it).
_SEAMS = {
    "yaml": ("deploy.document", "deploy.manifest", "deploy.lock"),
    "jinja2": ("deploy.page", "deploy.render", "deploy.report"),
    "docker": ("deploy.carriers.container", "deploy.carriers.image", "deploy.carriers.engine",
               "deploy.carriers.recipe", "deploy.image", "deploy.kernels"),
    "fabric": ("deploy.carriers",),
    "paramiko": ("deploy.carriers",),
    "requests": ("deploy.service", "deploy.image.registry"),
    "elftools": ("deploy.kernels",),
    "invoke": ("deploy.console", "deploy.tasks"),
    "subprocess": ("deploy.agent", "deploy.carriers", "deploy.git", "deploy.kernels",
                   "deploy.series", "deploy.source", "deploy.tasks.develop", "deploy.wheel",
                   "deploy.worktree"),
}  # fmt: skip


def _module(path: Path, top: Path) -> str:
    parts = path.relative_to(top).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[str]:
    """The absolute names that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def _strays(top: Path) -> list[str]:
    """The imports below `top`/deploy that stand outside their seam."""
    found = []
    for path in sorted((top / "deploy").rglob("*.py")):
        module = _module(path, top)
        for name in _imports(path):
            root = name.partition(".")[0]
            homes = _SEAMS.get(root, (module,))
            if root == "tasks" or not any(f"{module}.".startswith(f"{home}.") for home in homes):
                found.append(f"{module} imports {name}")
    return found


def _foreign(top: Path) -> list[str]:
    """What the agent imports beyond itself and the standard library: it travels alone."""
    return [
        f"{_module(path, top)} imports {name}"
        for path in sorted((top / "deploy/agent").rglob("*.py"))
        for name in _imports(path)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not f"{name}.".startswith(("deploy.agent.", "agent."))
    ]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the code, for planting."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE.top / "deploy", tmp_path / "deploy", ignore=ignore)
    shutil.copy(HERE.top / "pyproject.toml", tmp_path)
    shutil.copy(HERE.top / "tasks.py", tmp_path)
    return tmp_path


def test_each_library_is_imported_only_at_its_seam() -> None:
    assert _strays(HERE.top) == []


@pytest.mark.parametrize("library", sorted(_SEAMS))
def test_a_planted_import_outside_its_seam_is_found(library: str, copy: Path) -> None:
    before = _strays(copy)
    with (copy / "deploy/values.py").open("a") as file:
        file.write(f"\ndef late():\n    from {library} import anything\n")

    assert set(_strays(copy)) - set(before) == {f"deploy.values imports {library}"}


def test_the_agent_imports_nothing_but_itself_and_the_standard_library(copy: Path) -> None:
    assert _foreign(HERE.top) == []

    with (copy / "deploy/agent/words.py").open("a") as file:
        file.write("\nimport yaml\nfrom deploy.values import Blob\n")

    assert _foreign(copy) == [
        "deploy.agent.words imports yaml",
        "deploy.agent.words imports deploy.values",
    ]


def _layers(top: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    return subprocess.run(
        command, cwd=top, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.slow
def test_the_layers_are_kept_and_a_planted_import_upward_breaks_them(copy: Path) -> None:
    clean = _layers(copy)
    assert clean.returncode == 0, clean.stdout

    with (copy / "deploy/values.py").open("a") as file:
        file.write("\nfrom deploy import report\n")

    broken = _layers(copy)
    assert broken.returncode == 1
    assert re.search(r"deploy\.values -> deploy\.report", broken.stdout)


@pytest.mark.slow
def test_a_module_that_is_in_no_layer_is_refused(copy: Path) -> None:
    (copy / "deploy/utils.py").write_text("")

    done = _layers(copy)

    assert done.returncode == 1
    assert "utils" in done.stdout


_FAULTS = {
    "ruff": "import os\n",
    "format": "x = {  1:1 }\n",
    "mypy": 'number: int = "text"\n',
    "layers": 'from deploy import errors\n\n__all__ = ["errors"]\n',
}
_SMALL = ("__init__", "commands", "console", "document", "errors", "fields", "layout", "regular",
          "values", "agent/__init__", "agent/words", "tasks/__init__", "tasks/develop")  # fmt: skip


@pytest.mark.slow
def test_lint_names_the_one_check_that_found_a_planted_fault(copy: Path) -> None:
    for path in sorted((copy / "deploy").rglob("*.py")):
        if str(path.relative_to(copy / "deploy").with_suffix("")) not in _SMALL:
            path.unlink()
    (copy / "tasks.py").write_text(
        '"""The tasks of a small copy."""\n\n'
        'from deploy.tasks.develop import lint\n\n__all__ = ["lint"]\n'
    )
    program = "from invoke.main import program; program.run()"
    command = [sys.executable, "-E", "-c", program, "--search-root", copy, "lint"]

    def failed() -> tuple[int, str]:
        done = subprocess.run(
            command, cwd="/", capture_output=True, text=True, check=False, timeout=240
        )
        return done.returncode, "".join(re.findall(r"lint: failed: (.*)", done.stderr))

    assert failed() == (0, "")
    for check, fault in _FAULTS.items():
        (copy / "deploy/agent/planted.py").write_text(f'"""Planted."""\n\n{fault}')
        assert failed() == (1, check)
