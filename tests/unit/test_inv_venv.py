"""./inv in real checkouts: how .venv is made, kept, made again and refused.

The checkouts hold the real `inv` with a small lock (Invoke and one more package of the real lock),
so that each venv takes seconds. One test at the end clones the whole and installs the whole lock.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.errors import Exit
from deploy.layout import HERE

pytestmark = pytest.mark.slow

_TASKS = '''
import os
from invoke import task

@task
def where(_):
    """Say where we are, and what a child would inherit."""
    print(os.getcwd(), os.environ.get("PYTHONPATH", "-"))
'''


def _lock_of(*names: str) -> str:
    """The blocks of the real lock that pin these packages."""
    text = (HERE.top / "requirements.lock").read_text()
    return "".join(
        re.search(rf"(?m)^{name}==.*\n(?: +--hash.*\n)+", text).group() for name in names
    )


class Checkout:
    """A folder that holds inv, a small lock and a task."""

    def __init__(self, top: Path) -> None:
        self.top = top
        top.mkdir(parents=True)
        shutil.copy(HERE.top / "inv", top / "inv")
        (top / "tasks.py").write_text(_TASKS)
        self.lock("invoke", "iniconfig")

    def lock(self, *names: str) -> None:
        (self.top / "requirements.lock").write_text(_lock_of(*names))

    @property
    def venv(self) -> Path:
        return self.top / ".venv"

    def has(self, package: str) -> bool:
        return any(self.venv.glob(f"lib/python*/site-packages/{package}"))

    def start(self, *argv: str, inv: Path | None = None, **options) -> subprocess.Popen[str]:
        env = {**os.environ, "INV_PYTHON": sys.executable, **options.pop("env", {})}
        return subprocess.Popen(
            [inv or self.top / "inv", *(argv or ("where",))],
            env={name: value for name, value in env.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, *argv: str, **options) -> subprocess.CompletedProcess[str]:
        child = self.start(*argv, **options)
        out, err = child.communicate(timeout=240)
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def _wrapped(path: Path, program: str | Path) -> Path:
    """A script that is `program`; no link, since an interpreter finds its library by its path."""
    path.write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose venv was made; for tests that leave it as it is."""
    top = tmp_path_factory.mktemp("inv")
    checkout = Checkout(top / "a folder 文件夹")
    python = _wrapped(top / "a python", sys.executable)  # such a path is one word
    first = checkout.run(env={"INV_PYTHON": str(python)})
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{os.getcwd()} -\n"
    assert "making .venv" in first.stderr
    assert "ready" in first.stderr
    return checkout


@pytest.fixture
def fresh(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "fresh")


@pytest.fixture
def own(made: Checkout, tmp_path: Path) -> Iterator[Checkout]:
    """The made checkout for a test that harms it: put back from a copy afterwards."""
    shutil.copytree(made.top, tmp_path / "kept", symlinks=True)
    yield made
    shutil.rmtree(made.top)
    shutil.copytree(tmp_path / "kept", made.top, symlinks=True)


def _stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    rows = {path: path.lstat() for path in sorted(folder.rglob("*"))}
    return {str(p): (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for p, s in rows.items()}


def _three_lines(stderr: str) -> list[str]:
    lines = stderr.splitlines()[-3:]
    assert [line[:7] for line in lines[1:]] == ["  why: ", "  fix: "], stderr
    return lines


# --- when nothing is to do -----------------------------------------------------------------------


def test_a_venv_that_fits_is_used_as_it_is_and_in_silence(made: Checkout) -> None:
    made.run()
    before = _stamps(made.top)

    done = made.run()

    assert done.returncode == 0
    assert done.stderr == ""
    assert _stamps(made.top) == before


def test_any_cwd_and_a_symlink_lead_to_the_same_checkout(made: Checkout, tmp_path: Path) -> None:
    (tmp_path / "first").symlink_to(made.top / "inv")
    (tmp_path / "second").symlink_to("first")

    done = made.run(inv=tmp_path / "second", cwd="/")

    assert (done.returncode, done.stdout, done.stderr) == (0, "/ -\n", "")


def test_a_module_of_invokes_name_in_the_way_is_not_imported(
    made: Checkout, tmp_path: Path
) -> None:
    (tmp_path / "invoke.py").write_text("raise SystemExit('the wrong invoke')")

    done = made.run(cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path} {tmp_path}\n"  # children still inherit the variable


# --- when the venv no longer fits ----------------------------------------------------------------


def test_a_changed_lock_is_installed_and_what_it_dropped_is_gone(own: Checkout) -> None:
    own.lock("invoke", "pluggy")

    done = own.run()

    assert done.returncode == 0, done.stderr
    assert "installing 2 locked packages" in done.stderr
    assert own.has("pluggy")
    assert not own.has("iniconfig")
    assert own.run().stderr == ""


def test_an_install_that_was_killed_is_done_again(own: Checkout) -> None:
    own.lock("invoke", "pluggy")
    child = own.start()
    log = own.venv / "install.log"
    before = log.stat().st_mtime_ns
    deadline = time.monotonic() + 60
    while log.stat().st_mtime_ns == before and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate(timeout=30)
    assert not (own.venv / "stamp.lock").exists()

    done = own.run()

    assert done.returncode == 0, done.stderr
    assert own.has("pluggy")
    assert own.run().stderr == ""


def test_a_checkout_that_was_moved_gets_a_new_venv(own: Checkout, tmp_path: Path) -> None:
    shutil.copytree(own.top, tmp_path / "moved", symlinks=True)

    done = own.run(inv=tmp_path / "moved" / "inv")

    assert done.returncode == 0, done.stderr
    assert "making .venv" in done.stderr
    script = (tmp_path / "moved/.venv/bin/inv").read_bytes()
    assert str(tmp_path / "moved").encode() in script


def test_a_venv_whose_python_was_removed_is_made_again(own: Checkout) -> None:
    for link in own.venv.glob("bin/python*"):
        link.unlink()
        link.symlink_to("/usr/bin/python-that-was-removed")

    done = own.run()

    assert done.returncode == 0, done.stderr
    assert "making .venv" in done.stderr


def test_a_venv_whose_python_became_another_version_is_made_again(
    own: Checkout, pythons: dict[str, Path]
) -> None:
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    others = [path for version, path in pythons.items() if version != here]
    if not others:
        pytest.skip("there is one Python version on this machine")
    python = own.venv / "bin/python"
    python.unlink()
    python.symlink_to(others[-1])

    done = own.run()

    assert done.returncode == 0, done.stderr
    assert "making .venv" in done.stderr


def test_two_calls_at_once_make_one_venv(fresh: Checkout) -> None:
    calls = [fresh.start(), fresh.start()]

    said = [call.communicate(timeout=240)[1] for call in calls]

    assert [call.returncode for call in calls] == [0, 0], said
    assert sorted("making .venv with" in text for text in said) == [False, True]
    assert sorted("waiting" in text for text in said) == [False, True]


# --- when it cannot be made ----------------------------------------------------------------------


def test_a_package_with_other_bytes_than_locked_is_refused(fresh: Checkout) -> None:
    lock = fresh.top / "requirements.lock"
    lock.write_text(re.sub(r"sha256:[0-9a-f]{4}", "sha256:0000", lock.read_text()))

    done = fresh.run()

    assert done.returncode == Exit.STALE
    assert "not the one that was locked" in _three_lines(done.stderr)[1]
    assert not (fresh.venv / "stamp.lock").exists()


def test_without_a_package_index_it_says_so(fresh: Checkout) -> None:
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(fresh.top), "PIP_CONFIG_FILE": os.devnull}

    done = fresh.run(env=nothing)

    assert done.returncode == Exit.UNREACHABLE
    assert "install.log" in _three_lines(done.stderr)[1]


def _only(folder: Path, **programs: str | Path) -> str:
    """A PATH that holds what ./inv calls and these `programs` (a path, or a script's text)."""
    folder.mkdir()
    for tool in ("sh", "readlink", "cmp", "grep", "rm", "cp", "mv", "tail"):
        (folder / tool).symlink_to(shutil.which(tool))
    for name, program in programs.items():
        script = _wrapped(folder / name, program)
        if isinstance(program, str):
            script.write_text(program)
    return str(folder)


def test_a_python_that_is_too_old_is_named_and_nothing_is_made(
    fresh: Checkout, pythons: dict[str, Path], tmp_path: Path
) -> None:
    old = [version for version in ("3.6", "3.7", "3.8", "3.9") if version in pythons]
    if not old:
        pytest.skip("no Python below 3.10 is on this machine")
    for version in old:
        path = _only(tmp_path / version, python3=pythons[version])

        done = fresh.run(env={"PATH": path, "INV_PYTHON": None})

        assert done.returncode == Exit.UNFIT
        assert f"python3 is {version}" in _three_lines(done.stderr)[1]
        assert not fresh.venv.exists()


def test_without_any_python_it_says_what_to_install(fresh: Checkout, tmp_path: Path) -> None:
    done = fresh.run(env={"PATH": _only(tmp_path / "bin"), "INV_PYTHON": None})

    assert done.returncode == Exit.UNFIT
    assert "apt-get install python3 python3-venv" in _three_lines(done.stderr)[2]


# A stand-in for Debian's python3 without python3-venv, which is a Python that lacks ensurepip.
_BARE = """#!/bin/sh
case "$*" in *ensurepip*) exit 1 ;; esac
exec "{python}" "$@"
"""


def test_a_python_without_its_venv_module_names_the_package(
    fresh: Checkout, tmp_path: Path
) -> None:
    path = _only(tmp_path / "bin", python3=_BARE.format(python=sys.executable))

    done = fresh.run(env={"PATH": path, "INV_PYTHON": None})

    assert done.returncode == Exit.UNFIT
    assert "apt-get install python3-venv" in _three_lines(done.stderr)[2]
    assert not fresh.venv.exists()


def test_a_shim_that_does_not_start_is_passed_over(fresh: Checkout, tmp_path: Path) -> None:
    shim = "#!/bin/sh\necho 'version 3.99 is not installed' >&2\nexit 127\n"
    name = "python3.13"  # whatever its version, it is found under a later name than python3
    path = _only(tmp_path / "bin", **{"python3": shim, name: Path(sys.executable)})

    done = fresh.run(env={"PATH": path, "INV_PYTHON": None})

    assert done.returncode == 0, done.stderr
    assert f"making .venv with {name}" in done.stderr


# --- the whole -----------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_a_fresh_clone_installs_the_whole_lock_and_lists_its_tasks(
    version: str, pythons: dict[str, Path], tmp_path: Path
) -> None:
    if version not in pythons:
        pytest.skip(f"no Python {version} is on this machine")
    clone = tmp_path / "克隆 of it"
    subprocess.run(["git", "clone", "-q", HERE.top, clone], check=True, timeout=120)
    env = {**os.environ, "INV_PYTHON": str(pythons[version])}

    done = subprocess.run(
        [clone / "inv", "--list"],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "bench-self" in done.stdout
    python = clone / ".venv/bin/python"
    subprocess.run([python, "-m", "pip", "check"], check=True, timeout=120)
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == version


@pytest.mark.timeout(600)
def test_an_editable_install_brings_a_plain_inv(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", HERE.top, clone], check=True, timeout=120)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python = tmp_path / "venv/bin/python"
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-e", clone], check=True, timeout=400)

    inside = subprocess.run(
        [tmp_path / "venv/bin/inv", "--list"],
        cwd=clone / "docs", capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert inside.returncode == 0, inside.stderr
    assert "bench-self" in inside.stdout
