"""A proposed command names the manifest and the target it is about: what is pasted does that."""

from __future__ import annotations

import re
import shlex

import invoke
import pytest
from invoke import Collection, Task

import tasks
from deploy import commands, console, report
from deploy.agent.words import BundleError
from deploy.commands import pasteable
from deploy.errors import Exit
from deploy.gates import Visit
from deploy.layout import HERE


def known_tasks() -> dict[str, set[str]]:
    """Every task as it is typed, with the flags it takes."""
    space: Collection = tasks.namespace
    found: dict[str, Task] = {name: space[name] for name in space.task_names}
    return {name: {flag.name for flag in one.get_arguments()} for name, one in found.items()}


def test_the_lists_are_those_of_the_tasks() -> None:
    flags = known_tasks()

    assert {name for name, own in flags.items() if "name" in own} == commands.OF_MANIFEST
    # What reproduce takes with -t is no target.
    with_target = {name for name, own in flags.items() if "to" in own} - {"reproduce"}
    assert with_target == commands.ON_TARGET


@pytest.mark.parametrize(
    ("said", "is_now"),
    [
        ("start one: `./inv bench.run`", "start one: `./inv bench.run -n mine -t ssh:a`"),
        ("`./inv bundle`, or upload", "`./inv bundle -n mine`, or upload"),
        ("./inv serve.stop, or end it", "./inv serve.stop -n mine -t ssh:a, or end it"),
        ("`./inv bench.status --follow`", "`./inv bench.status -n mine -t ssh:a --follow`"),
        ("`./inv deploy -t ssh:ALIAS` or", "`./inv deploy -n mine -t ssh:ALIAS` or"),
        ("`./inv deploy -n b -t ssh:b`", "`./inv deploy -n b -t ssh:b`"),
        ("`./inv files -n NAME -t TARGET`", "`./inv files -n mine -t TARGET`"),
        ("`./inv gc`; ./inv --help TASK", "`./inv gc`; ./inv --help TASK"),
        ("`./inv verify`; `./inv lock`", "`./inv verify -n mine -t ssh:a`; `./inv lock -n mine`"),
    ],
)  # fmt: skip
def test_what_is_not_said_is_put_in_and_what_is_said_stays(said: str, is_now: str) -> None:
    assert pasteable(said, "mine", "ssh:a") == is_now
    assert pasteable(is_now, "mine", "ssh:a") == is_now


def test_nothing_is_put_in_that_is_not_known() -> None:
    assert pasteable("`./inv verify`", "", "") == "`./inv verify`"
    assert pasteable("`./inv verify`", "mine", "evidence.json") == "`./inv verify -n mine`"


def test_a_target_with_a_blank_is_one_word_to_a_shell() -> None:
    said = pasteable("./inv verify", "mine", "local:/a b/$HOME")

    assert shlex.split(said) == ["./inv", "verify", "-n", "mine", "-t", "local:/a b/$HOME"]


def test_a_report_names_the_manifest_and_so_do_its_commands() -> None:
    error = BundleError("w", why="y", fix="ask `./inv verify`")

    said = report.visit_text(Visit(target="ssh:a", error=error, name="mine"))

    assert said.startswith("mine on ssh:a: ")
    assert "fix: ask `./inv verify -n mine -t ssh:a`" in said


def test_an_error_of_a_task_is_about_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    @console.task(example="")
    def fails(_: object, name: str = "", to: str = "") -> int:
        raise BundleError("w", why="y", fix="start one: `./inv bench.run`", exit=Exit.VALUES)

    with pytest.raises(invoke.Exit) as caught:
        fails.body(None, name="mine", to="ssh:a,ssh:b")

    assert caught.value.code == 2
    assert "fix: start one: `./inv bench.run -n mine -t ssh:a,ssh:b`" in capsys.readouterr().err


def test_every_command_that_the_product_proposes_is_a_task() -> None:
    known = known_tasks()
    proposed = {
        (path.name, task)
        for path in sorted((HERE.top / "deploy").rglob("*.py"))
        for task in re.findall(r"`\./inv ([a-z][a-z.-]*)", path.read_text())
    }

    assert len(proposed) > 40
    assert [one for one in proposed if one[1].rstrip(".") not in known] == []
