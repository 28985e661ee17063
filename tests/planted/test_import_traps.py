"""What decides where the service imports from: each trap is named for what it is, with its mend.

A row plants one trap in the deployed site or in the service's environment. The kind must be the
right one, the mend must name the very thing to mend, and the clean state must be silent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy import report

pytestmark = pytest.mark.slow


def origin(site: Any, place: str = "empty", **env: str) -> tuple[str, str, str]:
    """Where verify says the import comes from: state, why and mend."""
    code, evidence = site.agent("verify", **env)
    found = evidence["origin"][place]
    if found["state"] != "ok":
        assert code == 10
    return found["state"], found["why"], found["mend"]


def traps(site: Any, *options: str, **env: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code, evidence = site.agent("verify", *options, **env)
    return code, {trap["kind"]: trap for trap in evidence["traps"]}


@contextmanager
def package(folder: Path) -> Iterator[Path]:
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text("V = 'shadow'\n")
    try:
        yield folder
    finally:
        shutil.rmtree(folder / "vllm")


@contextmanager
def written(path: Path, text: str) -> Iterator[None]:
    path.write_text(text)
    try:
        yield
    finally:
        path.unlink()


@pytest.fixture(autouse=True)
def silent_when_clean(clean: Any) -> Iterator[None]:
    """No trap and no shadow in the clean state, before and after each row."""
    assert traps(clean) == (0, {})
    yield
    assert traps(clean) == (0, {})


def test_an_editable_pth_is_named_with_the_file(clean: Any, row: Any, tmp_path: Path) -> None:
    pth = clean.site / "__editable__.vllm-0.18.1.pth"
    # The site comes after its own .pth lines only where the line inserts; as in real ones, it
    # appends, so the install lies in wait until the package itself is gone.
    with written(pth, f"{tmp_path}\n"), package(tmp_path):
        code, found = traps(clean)
        aside = clean.site.parent / "vllm"
        (clean.site / "vllm").rename(aside)
        try:
            state, why, mend = origin(clean)
        finally:
            aside.rename(clean.site / "vllm")

    assert (code, found["editable install"]["harm"]) == (0, False)
    assert (
        str(pth) in found["editable install"]["mend"]
        or "pip uninstall" in (found["editable install"]["mend"])
    )
    assert state == "shadowed"
    assert f"an editable install ({pth})" in why
    assert str(pth) in mend
    row("an editable install's .pth", "origin: an editable install (FILE.pth)")


FINDER = """\
import importlib.machinery, importlib.util, sys
MAPPING = {"vllm": %r}
class _EditableFinder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return importlib.util.spec_from_file_location(
                name, MAPPING[name] + "/__init__.py", submodule_search_locations=[MAPPING[name]])
def install():
    sys.meta_path.insert(0, _EditableFinder)
"""


def test_an_editable_finder_is_named_with_module_and_pth(
    clean: Any, row: Any, tmp_path: Path
) -> None:
    module = "__editable___vllm_0_18_1_finder"
    pth = clean.site / "__editable__.vllm-0.18.1.pth"
    with (
        package(tmp_path),
        written(clean.site / f"{module}.py", FINDER % str(tmp_path / "vllm")),
        written(pth, f"import {module}; {module}.install()\n"),
    ):
        state, why, mend = origin(clean)
        shutil.rmtree(clean.site / "__pycache__", ignore_errors=True)

    assert state == "shadowed"
    assert f"finder of an editable install gives {tmp_path}/vllm/__init__.py" in why
    assert module in why
    assert str(pth) in why
    assert "pip uninstall vllm" in mend
    assert str(pth) in mend
    row("an editable install's finder", "origin: a finder of an editable install, and its .pth")


def test_a_pythonpath_that_env_script_sets_is_laid_to_env_script(
    clean: Any, row: Any, tmp_path: Path
) -> None:
    script = clean.root / "opt-env.sh"
    with package(tmp_path), written(script, f"export PYTHONPATH={tmp_path}\n"):
        code, evidence = clean.agent("verify", "--env-script", "/opt-env.sh")
    found = evidence["origin"]["empty"]

    assert (code, found["state"]) == (10, "shadowed")
    assert f"PYTHONPATH puts {tmp_path} first (env_script /opt-env.sh)" in found["why"]
    assert found["mend"] == "take it out of env_script /opt-env.sh"
    row("PYTHONPATH set by env_script", "origin: PYTHONPATH, and who set it")


def test_a_pythonpath_of_the_environment_is_told_from_that(clean: Any, tmp_path: Path) -> None:
    with package(tmp_path):
        _, why, mend = origin(clean, PYTHONPATH=f"{tmp_path}/")
    assert "the environment that the agent was started in" in why
    assert "env_script" not in mend


def test_a_user_site_is_named_as_such(clean: Any, row: Any) -> None:
    ask = "import site; print(site.getusersitepackages())"
    env = {"HOME": str(clean.home), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [clean.python, "-c", ask], env=env, capture_output=True, text=True, check=True
    )
    user = Path(done.stdout.strip())
    with package(user):
        state, why, mend = origin(clean)

    assert state == "shadowed"
    assert f"the user site {user}" in why
    assert "PYTHONNOUSERSITE" in mend
    row("a vllm/ in the user site", "origin: the user site")


def test_a_sitecustomize_that_bends_the_path_is_named(clean: Any, row: Any, tmp_path: Path) -> None:
    """The stand-in interpreter has a sitecustomize of its own; somebody adds a line to it."""
    custom = clean.root / "usr/lib/stand-in/sitecustomize.py"
    was = custom.read_text()
    shadow = tmp_path / "shadow"
    try:
        custom.write_text(was + f"sys.path.insert(0, {str(shadow)!r})\n")
        with package(shadow):
            state, why, mend = origin(clean)
    finally:
        custom.write_text(was)

    assert state == "shadowed"
    assert f"sitecustomize ({custom}) puts {shadow} on sys.path" in why
    assert str(custom) in mend
    row("sitecustomize puts a folder first", "origin: sitecustomize (FILE)")


def test_a_zip_on_the_path_is_named_as_an_archive(clean: Any, row: Any, tmp_path: Path) -> None:
    archive = tmp_path / "dev.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("vllm/__init__.py", "V = 'zipped'\n")

    state, why, mend = origin(clean, PYTHONPATH=str(archive))

    assert state == "shadowed"
    assert f"the zip archive {archive} holds a vllm/" in why
    assert str(archive) in mend
    row("a zip with a vllm/ on PYTHONPATH", "origin: a zip archive")


def test_a_namespace_folder_is_told_from_an_install(clean: Any, row: Any) -> None:
    init, aside = clean.site / "vllm/__init__.py", clean.site.parent / "__init__.py"
    init.rename(aside)
    try:
        state, why, mend = origin(clean)
    finally:
        aside.rename(init)

    assert state == "shadowed"
    assert "namespace package without __init__.py" in why
    assert "install the base anew" in mend
    row("vllm/ is a namespace folder", "origin: a namespace package")


def test_a_second_dist_info_in_the_site_is_harm(clean: Any, row: Any) -> None:
    folder = clean.site / "vllm-0.17.0.dist-info"
    folder.mkdir()
    with written(folder / "METADATA", "Name: vllm\nVersion: 0.17.0\n"):
        code, found = traps(clean)
    folder.rmdir()

    trap = found["second dist-info"]
    assert (code, trap["harm"]) == (10, True)
    assert "vllm-0.17.0.dist-info" in trap["where"]
    row("a second dist-info in the site", "trap: second dist-info")


def test_a_dist_info_in_another_folder_is_harm_only_when_it_comes_first(
    clean: Any, row: Any, tmp_path: Path
) -> None:
    (tmp_path / "vllm-0.17.0.dist-info").mkdir()
    (tmp_path / "vllm-0.17.0.dist-info/METADATA").write_text("Name: vllm\nVersion: 0.17.0\n")
    before = traps(clean, PYTHONPATH=str(tmp_path))
    with written(clean.site / "zz-more.pth", f"{tmp_path}\n"):
        after = traps(clean)

    assert (before[0], before[1]["second dist-info"]["harm"]) == (10, True)
    assert (after[0], after[1]["second dist-info"]["harm"]) == (0, False)
    row("another install's dist-info before the site", "trap: second dist-info")


def test_a_site_by_another_name_is_told_and_is_no_fault(clean: Any, tmp_path: Path) -> None:
    link = tmp_path / "dist-packages"
    link.symlink_to(clean.site)
    code, found = traps(clean, PYTHONPATH=str(link))

    assert (code, found["linked site"]["harm"]) == (0, False)
    assert found["linked site"]["where"] == str(link)


def test_a_pycache_prefix_voids_what_is_proven_of_bytecode(
    clean: Any, row: Any, tmp_path: Path
) -> None:
    script = clean.root / "opt-env.sh"
    with written(script, f"export PYTHONPYCACHEPREFIX={tmp_path}\n"):
        code, found = traps(clean, "--env-script", "/opt-env.sh")

    trap = found["pycache prefix"]
    assert (code, trap["harm"], trap["where"]) == (10, True, str(tmp_path))
    assert "env_script /opt-env.sh" in trap["mend"]
    row("PYTHONPYCACHEPREFIX in the service's environment", "trap: pycache prefix")


def test_bytecode_that_is_not_written_is_told_and_is_no_fault(clean: Any) -> None:
    code, found = traps(clean, PYTHONDONTWRITEBYTECODE="1")
    assert (code, found["no bytecode written"]["harm"]) == (0, False)


def test_what_nobody_has_to_act_on_stands_in_the_json_only() -> None:
    quiet = {"kind": "no bytecode written", "where": "X", "why": "w", "mend": "m", "harm": False}
    told = {**quiet, "kind": "linked site"}

    assert report.import_lines({"traps": [quiet, told]}) == ["  note: linked site: X: w -> m"]


def test_an_egg_link_is_another_record_of_the_package(clean: Any, tmp_path: Path) -> None:
    with written(clean.site / "vllm.egg-link", f"{tmp_path}\n.\n"):
        code, found = traps(clean)
    assert code == 10
    assert "vllm.egg-link" in found["second dist-info"]["where"]


def test_a_launch_folder_that_holds_the_package_is_told_with_its_mend(clean: Any, row: Any) -> None:
    with package(clean.launch):
        state, why, mend = origin(clean, "launch")
    assert state == "shadowed"
    assert "current folder" in why
    assert "another folder" in mend
    row("a vllm/ in the launch folder", "origin: the current folder")
