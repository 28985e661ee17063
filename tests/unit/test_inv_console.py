"""The wrapper round all tasks, run as a person runs it: `inv` in a child process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from deploy import errors
from deploy.errors import BundleError, Exit
from deploy.layout import HERE

_TASKS = '''
import os, subprocess, sys, time
import deploy.errors as errors
from deploy.console import say, show_json, task

@task(example="./inv fail --kind Refused", help={"kind": "the class of the error"})
def fail(_, kind="Refused", json=False):
    """Fail as asked."""
    raise getattr(errors, kind)("cannot do \\x1b[31mit", why="a reason", fix="a mend")

@task(example="./inv many")
def many(_):
    """Fail with several faults."""
    faults = "demo.yaml: 2 faults\\n  1:1: one\\n  2:1: two"
    raise errors.BadValues(faults, why="because", fix="mend")

@task(example="./inv crash")
def crash(_):
    """Meet a bug."""
    return 1 // 0

@task(example="./inv wait")
def wait(_, json=False):
    """Wait for a signal."""
    say("waiting")
    time.sleep(30)

@task(example="./inv flood")
def flood(_):
    """Print more than a pipe holds."""
    for number in range(200_000):
        print(number)

@task(example="./inv deaf")
def deaf(_):
    """Write to a child that does not read."""
    child = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    child.wait()
    child.stdin.write(b"x" * 1_000_000)
    child.stdin.flush()

@task(example="./inv answer --code 10", help={"code": "the code"})
def answer(_, code=0):
    """Return an exit code."""
    print("\\u6587\\u4ef6")
    return code

@task(example="./inv make", help={"full": "on a full disk", "denied": "where it is denied"})
def make(_, full=False, denied=False):
    """Write to a full disk, where it is denied, or where nobody can mend it."""
    if denied:
        raise PermissionError(13, "Permission denied", "/manifests/x.lock.yaml")
    with open("/dev/full" if full else "/proc/nobody", "w") as file:
        file.write("x")

@task(example="./inv pause --so-long 2", help={"so_long": "seconds"})
def pause(_, so_long=0.0):
    """Say a number."""
    print(so_long)

@task(example="./inv count --most 2", help={"most": "how many"})
def count(_, most=0, json=False):
    """Count."""

@task(example="./inv leave --path FILE", help={"path": "where"})
def leave(_, path=""):
    """Leave a file."""
    with open(path, "w") as file:
        file.write("x")

@task(example="./inv data")
def data(_, json=False):
    """Print data."""
    say("progress")
    show_json({"b": 1, "a": "\\u6587"})
'''


@pytest.fixture
def inv(tmp_path: Path):
    """Run `inv` on the tasks above; returns the finished process."""
    (tmp_path / "tasks.py").write_text(_TASKS)
    script = f"import sys; sys.path.insert(0, {str(HERE.top)!r}); sys.argv[0] = 'inv'\n"
    script += "from invoke.main import program; program.run()"

    def run(*argv: str, start=subprocess.run, **options):
        command = [sys.executable, "-c", script, "--search-root", str(tmp_path), *argv]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if start is subprocess.run:
            pipes["timeout"] = 60
        return start(command, **{**pipes, "encoding": "utf-8", **options})

    return run


_KINDS = sorted(
    n for n, v in vars(errors).items() if isinstance(v, type) and v.__base__ is BundleError
)


@pytest.mark.parametrize("kind", _KINDS)
def test_an_error_becomes_three_lines_and_the_exit_code_of_its_class(inv, kind: str) -> None:
    done = inv("fail", "--kind", kind)

    assert done.returncode == int(getattr(errors, kind).exit)
    assert done.stdout == ""
    assert done.stderr == "cannot do \\x1b[31mit\n  why: a reason\n  fix: a mend\n"


def test_an_error_of_many_lines_keeps_them(inv) -> None:
    done = inv("many")

    assert done.returncode == Exit.VALUES
    assert done.stderr.splitlines()[:3] == ["demo.yaml: 2 faults", "  1:1: one", "  2:1: two"]


def test_with_json_an_error_is_data_on_stdout_too(inv) -> None:
    done = inv("fail", "--json")

    assert done.returncode == Exit.REFUSED
    assert json.loads(done.stdout)["error"]["exit"] == Exit.REFUSED
    assert done.stderr.count("\n") == 3


def test_a_bug_shows_its_traceback_and_is_exit_1(inv) -> None:
    done = inv("crash")

    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" in done.stderr


def test_an_interrupt_is_one_line_and_exit_130(inv) -> None:
    child = inv("wait", start=subprocess.Popen)
    assert child.stderr.readline() == "waiting\n"

    child.send_signal(signal.SIGINT)
    _, rest = child.communicate(timeout=30)

    assert child.returncode == 130
    assert rest == "interrupted\n"


def test_an_interrupt_is_data_too_where_data_was_asked_for(inv) -> None:
    child = inv("wait", "--json", start=subprocess.Popen)
    assert child.stderr.readline() == "waiting\n"

    child.send_signal(signal.SIGINT)
    said, rest = child.communicate(timeout=30)

    assert json.loads(said)["error"]["exit"] == 130
    assert rest == "interrupted\n"


def test_a_reader_that_leaves_early_is_no_error_to_see(inv) -> None:
    child = inv("flood", start=subprocess.Popen)
    assert child.stdout.readline() == "0\n"

    child.stdout.close()
    with child.stderr:
        said = child.stderr.read()

    assert child.wait(30) == 141
    assert said == ""


def test_a_child_that_does_not_read_is_our_bug_and_seen(inv) -> None:
    done = inv("deaf")

    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


def test_a_tasks_exit_code_is_the_calls_exit_code(inv) -> None:
    assert inv("answer", "--code", "10").returncode == 10
    assert inv("answer").returncode == 0


def test_a_terminal_without_the_character_shows_its_escape(inv) -> None:
    done = inv("answer", env={**os.environ, "PYTHONIOENCODING": "ascii"})

    assert done.returncode == 0
    assert done.stdout == "\\u6587\\u4ef6\n"


def test_a_closed_stdout_ends_no_task_with_a_traceback(inv) -> None:
    done = inv("data", preexec_fn=lambda: os.close(1), stdout=None)

    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["data", "flood", "--list", "--help data", "fail --json"])
def test_an_answer_that_was_not_written_needs_a_person(inv, words: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = inv(*words.split(), stdout=full)

    assert done.returncode == Exit.NEEDS_PERSON
    assert done.stderr.splitlines()[-3:-1] == [
        "the answer could not be written",
        "  why: writing to stdout: No space left on device",
    ]
    assert "Traceback" not in done.stderr


def test_progress_that_cannot_be_written_ends_no_task(inv) -> None:
    with Path("/dev/full").open("w") as full:
        done = inv("data", stderr=full)

    assert done.returncode == 0
    assert json.loads(done.stdout) == {"a": "文", "b": 1}


def test_a_full_disk_is_an_unfit_machine(inv) -> None:
    done = inv("make", "--full")

    assert done.returncode == Exit.UNFIT
    assert done.stderr.startswith("cannot use a disk of this machine\n  why: No space left")
    assert done.stderr.count("\n") == 3


def test_a_file_that_may_not_be_written_is_an_unfit_machine(inv) -> None:
    done = inv("make", "--denied")

    assert done.returncode == Exit.UNFIT
    assert done.stderr.startswith("cannot use /manifests/x.lock.yaml\n  why: Permission denied\n")


def test_what_cannot_be_opened_elsewhere_is_our_bug(inv) -> None:
    done = inv("make")

    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of this one where out is a file."""
    top = tmp_path_factory.mktemp("checkout")
    for name in ("deploy", "docker", "kernels", "manifests", "overlay"):
        shutil.copytree(HERE.top / name, top / name)
    shutil.copy(HERE.top / "tasks.py", top)
    (top / "out").touch()
    return top


@pytest.mark.parametrize("words", ["lock", "plan", "bundle", "verify", "render", "report", "gc"])
def test_an_out_that_is_no_folder_is_three_lines_and_no_traceback(checkout, words: str) -> None:
    script = f"import sys; sys.path.insert(0, {str(checkout)!r}); sys.argv[0] = 'inv'\n"
    script += "from invoke.main import program; program.run()"
    argv = [sys.executable, "-c", script, "--search-root", str(checkout), words]

    done = subprocess.run(
        argv, cwd=checkout, capture_output=True, text=True, check=False, timeout=60
    )

    assert "Traceback" not in done.stderr
    if words == "gc":  # nothing is there
        assert done.returncode == 0
    else:
        assert done.returncode == Exit.UNFIT
        assert done.stderr.startswith(f"cannot use {checkout}/out")
        assert done.stderr.count("\n") == 3


@pytest.mark.parametrize(("umask", "mode"), [(0o777, 0o600), (0o022, 0o644), (0, 0o666)])
def test_what_is_made_is_the_owners_to_use_and_nobody_elses_against_the_umask(
    inv, tmp_path: Path, umask: int, mode: int
) -> None:
    assert inv("leave", "--path", str(tmp_path / "left"), umask=umask).returncode == 0

    assert (tmp_path / "left").stat().st_mode & 0o777 == mode


def test_data_goes_to_stdout_and_progress_to_stderr(inv) -> None:
    done = inv("data")

    assert json.loads(done.stdout) == {"a": "文", "b": 1}
    assert done.stdout.isascii()
    assert done.stderr == "progress\n"


def test_help_shows_the_flags_and_an_example(inv) -> None:
    done = inv("--help", "fail")

    assert "Example: ./inv fail --kind Refused" in done.stdout
    assert "the class of the error" in done.stdout
    assert "print one JSON value" in done.stdout


def test_usage_says_what_was_typed() -> None:
    argv = [HERE.top / "inv", "--help", "plan"]

    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.startswith("Usage: ./inv [--core-opts] plan ")


def test_inv_alone_lists_the_tasks() -> None:
    done = subprocess.run(
        [HERE.top / "inv"], capture_output=True, text=True, check=True, timeout=60
    )

    assert "  deploy  " in done.stdout
    assert "--prompt-for-sudo-password" not in done.stdout


@lru_cache  # Invoke gives each flag's help away once
def _every_task() -> dict[str, tuple[str, tuple]]:
    """The name of each task, its docstring and its arguments."""
    import tasks

    every = {name: tasks.namespace[name] for name in tasks.namespace.task_names}
    return {name: (task.__doc__, tuple(task.get_arguments())) for name, task in every.items()}


def test_every_flag_has_a_default_and_a_help_line_and_every_task_an_example() -> None:
    assert _every_task()
    for name, (doc, flags) in _every_task().items():
        assert [f.name for f in flags if f.positional] == [], name
        assert [f.name for f in flags if not f.help] == [], name
        assert "json" in {f.name for f in flags}, name
        assert "Example: ./inv " in doc, name


def test_a_flag_that_takes_a_number_says_so_in_its_help() -> None:
    # Invoke shows a placeholder for texts and whole numbers only.
    numbers = [flag for _, flags in _every_task().values() for flag in flags if flag.kind is float]

    assert numbers
    assert all(flag.help.startswith("NUMBER: ") for flag in numbers)


def test_the_manifest_is_n_and_the_target_is_t_in_every_task() -> None:
    for name, (_, flags) in _every_task().items():
        shorts = {f.name: set(f.names) for f in flags}
        assert "n" in shorts.get("name", "n"), name
        assert "t" in shorts.get("to", "t"), name


def test_every_task_that_takes_a_group_of_hosts_takes_all_of_them_too() -> None:
    flags = {name: {flag.name for flag in every} for name, (_, every) in _every_task().items()}

    assert {name for name, own in flags.items() if "group" in own} >= {"deploy", "hosts.status"}
    assert [name for name, own in flags.items() if "group" in own and "all" not in own] == []


def test_every_text_names_a_task_as_it_is_typed_in_a_fresh_clone() -> None:
    import tasks

    words = "|".join(re.escape(name) for name in tasks.namespace.task_names)
    bare = re.compile(rf"(?<![./\w-])inv (?:{words})\b")
    folders = ("deploy", "docker", "docs", "kernels", "manifests", "changes")
    told = [*HERE.top.glob("*.*"), *(p for name in folders for p in (HERE.top / name).rglob("*.*"))]
    found = [
        f"{path}: {line.strip()}"
        for path in told
        if path.suffix in {".py", ".md", ".j2", ".yaml", ".sh"}
        for line in path.read_text("utf-8").split("\n")
        # The lock's first line is part of what is pinned.
        if bare.search(line) and "# Written by `inv lock`" not in line
    ]

    assert found == []


# Those for developers call other programs, and say how these ended.
_OWN = {"test", "lint", "bench-self"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(_every_task().keys() - _OWN))
def test_every_task_that_cannot_do_it_says_so_as_data(name: str) -> None:
    flags = {flag.name for flag in _every_task()[name][1]}
    wrong = ["--name", "nope"] if "name" in flags else []
    argv = [Path(sys.executable).with_name("inv"), name, *wrong, "--json"]

    done = subprocess.run(
        argv, cwd=HERE.top, capture_output=True, text=True, check=False, timeout=120
    )

    said = json.loads(done.stdout)
    if done.returncode:
        assert said["schema"] == "error/1"
        assert said["error"]["exit"] == done.returncode == Exit.VALUES
        assert done.stderr.count("\n") >= 3
    else:
        assert name in {"gc", "completion", "bench.chunks"}


def test_a_letter_is_one_flag_and_a_flag_one_letter_in_every_task() -> None:
    of_letter: dict[str, set[str]] = {}
    of_flag: dict[str, set[tuple[str, ...]]] = {}
    for _, flags in _every_task().values():
        for flag in flags:
            letters = tuple(name for name in flag.names if len(name) == 1)
            of_flag.setdefault(flag.name, set()).add(letters)
            for letter in letters:
                of_letter.setdefault(letter, set()).add(flag.name)

    assert {letter: names for letter, names in of_letter.items() if len(names) > 1} == {}
    assert {name: letters for name, letters in of_flag.items() if len(letters) > 1} == {}
    assert {"n", "t", "j", "f", "w"} <= of_letter.keys()


def test_listing_the_tasks_imports_nothing_heavy() -> None:
    heavy = {"fabric", "paramiko", "docker", "jinja2", "rich", "pydantic", "requests", "elftools"}
    ask = "import sys, tasks; print(*sys.modules)"

    done = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=HERE.top,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert set(done.stdout.split()) & heavy == set()
    assert "deploy.console" in done.stdout


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("answer", "--code", "1.5"), "--code cannot be used\n  why: it takes a whole number"),
        (("answer", "--code=abc"), "--code cannot be used\n  why: it takes a whole number"),
        (("pause", "--so-long", "abc"), "--so-long cannot be used\n  why: it takes a number"),
    ],
)
def test_a_number_that_is_none_is_a_bad_value_of_three_lines(inv, argv, why: str) -> None:
    done = inv(*argv)

    assert done.returncode == Exit.VALUES
    assert done.stdout == ""
    assert done.stderr.startswith(f"{why}, found {argv[-1].rpartition('=')[2]!r}\n  fix: ")
    assert done.stderr.count("\n") == 3


def test_a_bad_number_is_data_too_where_data_was_asked_for(inv) -> None:
    done = inv("count", "--json", "--most", "abc")

    assert json.loads(done.stdout)["error"]["exit"] == Exit.VALUES
    assert done.stderr.count("\n") == 3


@pytest.mark.parametrize(
    "argv",
    [("--kind", ""), ("--kind=",), ("--kind", " "), ("--kind", ",")],
)
def test_an_empty_value_is_a_bad_value_and_not_the_default(inv, argv) -> None:
    done = inv("fail", *argv)

    assert done.returncode == Exit.VALUES
    assert done.stderr.startswith("--kind cannot be used\n  why: its value is empty")
    assert done.stderr.count("\n") == 3


@pytest.mark.parametrize("flag", ["-n", "-t", "--group", "--replace-drift", "--wait"])
def test_every_flag_of_a_task_refuses_an_empty_value(flag: str) -> None:
    argv = (sys.executable, "-m", "invoke", "deploy", flag, "")
    done = subprocess.run(
        argv, cwd=HERE.top, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == Exit.VALUES
    assert "cannot be used\n  why: its value is empty: ''\n" in done.stderr


@pytest.mark.parametrize(
    ("words", "why", "fix"),
    [
        ("fial", "there is no task 'fial'; did you mean 'fail'?", "./inv --list"),
        ("--help fial", "there is no task 'fial'; did you mean 'fail'?", "./inv --list"),
        ("--bogus", "./inv has no flag --bogus", "./inv --list"),
        ("fail --knid X", "fail has no flag --knid; did you mean '--kind'?", "./inv --help fail"),
        ("fail --kind", "--kind takes a value and was not given one", "./inv --help fail"),
        ("fail --kind --json", "--kind takes a value and was not given one", "./inv --help fail"),
        ("fail X", "'X' is no task, and fail takes nothing but flags", "./inv --help fail"),
    ],
)
def test_words_that_are_not_understood_are_told_in_three_lines(inv, words, why, fix) -> None:
    done = inv(*words.split())

    assert done.returncode == 1
    assert done.stderr.startswith(f"cannot understand the call\n  why: {why}\n  fix: {fix}")
    assert done.stderr.count("\n") == 3
    assert (done.stdout != "") == ("--json" in words)


def test_words_that_are_not_understood_are_data_too_where_data_was_asked_for(inv) -> None:
    done = inv("count", "--mots", "2", "-j")

    said = json.loads(done.stdout)
    assert (said["schema"], said["error"]["exit"], done.returncode) == ("error/1", 1, 1)
    assert said["error"]["why"] in done.stderr


@pytest.mark.parametrize("argv", [[HERE.top / "inv"], [sys.executable, "-m", "invoke"]])
def test_every_way_to_call_a_task_tells_a_misspelt_one_in_three_lines(argv) -> None:
    done = subprocess.run(
        [*argv, "deplyo"], cwd=HERE.top, capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert "  why: there is no task 'deplyo'; did you mean 'deploy'?\n" in done.stderr
    assert done.stderr.count("\n") == 3


@pytest.mark.parametrize("words", ["-t ssh:a", "--recompile", "--all", "--worktree"])
def test_evidence_in_a_file_is_not_judged_beside_what_asks_a_target(tmp_path, words) -> None:
    argv = [HERE.top / "inv", "verify", "--evidence", tmp_path / "e.json", *words.split()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stdout) == (Exit.VALUES, "")
    assert f"--evidence names a file; {words.split()[0]} asks a target" in done.stderr
    assert done.stderr.count("\n") == 3


def test_a_number_arrives_as_one(inv) -> None:
    assert inv("pause", "--so-long", "2.5").stdout == "2.5\n"
    assert inv("pause").stdout == "0.0\n"
