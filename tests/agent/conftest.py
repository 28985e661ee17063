from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.target import BASE_FILES, Target, assert_usable
from tests.table import item_of


@pytest.fixture(scope="session")
def base_is_usable(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Show once that the state which every test begins with passes."""
    made = Target(tmp_path_factory.mktemp("base") / "root")
    made.make(BASE_FILES)
    assert_usable(made)


@pytest.fixture
def target(
    request: pytest.FixtureRequest, tmp_path: Path, base_is_usable: None
) -> Iterator[Target]:
    """Return a site with a small package, as its base has it.

    A test that plants something leaves it so that the same deploy passes as before.
    """
    made = Target(tmp_path / "root")
    made.make(BASE_FILES)
    yield made
    if item_of(request.node):
        assert_usable(made)
