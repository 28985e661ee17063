"""Each planted stale state is found by the gate that should find it, and by no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.conftest import Built
from tests.kernels.mini_room import Tools
from tests.kernels.planted import PLANTED, World, rows

pytestmark = [pytest.mark.hip, pytest.mark.slow, pytest.mark.timeout(900)]


def test_eleven_planted_states_are_found_and_a_clean_one_is_not(
    tools: Tools, built: Built, room: Path
) -> None:
    table = list(rows(World(tools, room, built.ccache)))

    assert len(PLANTED) == 11
    assert [row for row in table if not row.right] == []
    assert [row.state for row in table[1:]] == [p.__name__.replace("_", " ") for p, _ in PLANTED]
