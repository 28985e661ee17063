"""What several of these files need and what takes long to make."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.ground import base_image


@pytest.fixture(scope="session")
def image() -> Iterator[str]:
    """An engine's image with the vendor's package, the stand-in server and a model."""
    with base_image() as made:
        yield made
