"""What a person reads of a service, where there is none, and where it has died."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.ground import Checkout, local_place
from tests.service.test_service_verbs import own_processes

pytestmark = pytest.mark.slow
Inv = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    return local_place(tmp_path / "place")


@pytest.fixture
def inv(tmp_path: Path, place: dict[str, str]) -> Iterator[Inv]:
    """A task as it is typed: its exit code, and what it prints on stdout."""
    with own_processes() as inside:
        checkout = Checkout(tmp_path / "checkout", inside=inside, **place)

        def run(*words: str) -> tuple[int, list[str]]:
            done = subprocess.run(
                checkout.argv(*words, "-t", "local:/"), cwd=checkout.top,
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, check=False,
            )  # fmt: skip
            return done.returncode, done.stdout.splitlines()

        yield run


def test_a_clean_machine_says_what_was_looked_at(inv: Inv, place: dict[str, str]) -> None:
    code, said = inv("serve.status")

    assert code == 0
    looked = next(line for line in said if "looked at " in line)
    assert int(looked.split("looked at ")[1].split()[0]) >= 1
    assert looked.endswith(
        f"none serves, measures, profiles or holds a card; port {place['port']} is free"
    )
    assert any(line.startswith("  device files: ") for line in said)


@pytest.mark.parametrize(
    "lives", ["", "sleep 2; "], ids=["before it is recorded", "while it is waited for"]
)
def test_a_server_that_dies_is_told_with_its_last_words(
    inv: Inv, place: dict[str, str], lives: str
) -> None:
    assert inv("deploy")[0] == 0
    Path(place["program"]).write_text(f"#!/bin/sh\n{lives}echo the card is gone; exit 3\n")

    code, said = inv("serve.start")

    assert code == 10
    assert "the card is gone" in [line.strip() for line in said]
    assert "started nothing" not in "\n".join(said)
    assert max(map(len, said)) < 400
