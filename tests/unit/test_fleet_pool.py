"""Many targets at once: nobody waits for the slow one, and nobody's failure is another's."""

from __future__ import annotations

import threading
import time

import pytest

from deploy.agent.words import BundleError, Exit
from deploy.errors import Refused, Unreachable
from deploy.fleet import Tell, each


def name(target: str) -> str:
    return f"ssh:{target}"


def test_results_stand_in_the_order_of_the_targets() -> None:
    def work(target: str, _: Tell) -> str:
        time.sleep(0.2 if target == "a" else 0)
        return target.upper()

    assert each(list("abc"), work, name=name) == ["A", "B", "C"]


def test_an_error_and_a_crash_are_results_of_their_target_alone() -> None:
    def work(target: str, _: Tell) -> str:
        if target == "a":
            raise Refused("a refused", why="w", fix="f")
        if target == "b":
            raise RuntimeError("ours")
        return "done"

    found = each(list("abc"), work, name=name)

    assert isinstance(found[0], Refused)
    assert isinstance(found[1], BundleError)
    assert found[1].exit == Exit.BUG
    assert "RuntimeError: ours" in found[1].why
    assert found[2] == "done"


def test_one_that_hangs_is_given_up_at_its_deadline() -> None:
    release = threading.Event()

    def work(target: str, tell: Tell) -> str:
        tell("hashing")
        if target == "a":
            release.wait(30)
        return "done"

    start = time.monotonic()
    found = each(list("abc"), work, name=name, deadline=0.5)
    release.set()

    assert time.monotonic() - start < 5
    assert isinstance(found[0], Unreachable)
    assert "hashing" in found[0].why
    assert found[1:] == ["done", "done"]


def test_one_that_hangs_does_not_take_the_place_of_others(
    capfd: pytest.CaptureFixture[str],
) -> None:
    release = threading.Event()

    def work(target: str, _: Tell) -> str:
        if target == "a":
            release.wait(30)
        return "done"

    found = each(list("abcdef"), work, name=name, at_once=2, deadline=0.6)
    release.set()

    assert found[1:] == ["done"] * 5
    assert "ssh:f: done" in capfd.readouterr().err


def test_no_more_than_the_limit_are_worked_on_at_once() -> None:
    lock, busy, most = threading.Lock(), [0], [0]

    def work(_: str, __: Tell) -> None:
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        time.sleep(0.02)
        with lock:
            busy[0] -= 1

    each([str(i) for i in range(30)], work, name=name, at_once=4)

    assert 1 < most[0] <= 4


def test_control_characters_of_a_target_do_not_reach_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def work(_: str, tell: Tell) -> None:
        tell("\x1b[2Jgone\n")

    each(["a", "b"], work, name=name)
    each(["a"], work, name=name)

    assert "\x1b" not in capfd.readouterr().err


def test_a_single_target_is_worked_on_in_the_calling_thread() -> None:
    assert each(["a"], lambda _, __: threading.get_ident(), name=name) == [threading.get_ident()]
