from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.target import BASE_FILES, Target


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """Return a site with a small package, as its base has it."""
    made = Target(tmp_path / "root")
    made.make(BASE_FILES)
    return made
