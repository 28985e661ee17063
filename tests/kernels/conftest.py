"""Fixtures of the kernel tests: the real toolchain, a repository, and one build that all share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.kernels import build as builds
from deploy.kernels.request import Build, BuildRequest
from tests.kernels.mini_room import Checkout, Tools, own_toolchain, provisioned, request_for


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    """Give this session a toolchain of its own: a test changes one of its files for a while."""
    found = provisioned()
    if not found.env_script.exists() or not found.python.exists():
        why = "no HIP toolchain: run tests/provision.sh start hip"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return own_toolchain(found, tmp_path_factory.mktemp("tools") / "toolchain")


@dataclass(frozen=True)
class Built:
    """A finished build of the mini tree; tests read it and leave it as it is."""

    checkout: Checkout
    request: BuildRequest
    build: Build

    @property
    def ccache(self) -> Path:
        assert self.request.ccache_dir is not None
        return self.request.ccache_dir


@pytest.fixture(scope="session")
def built(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> Built:
    room = tmp_path_factory.mktemp("built")
    checkout = Checkout(room / "checkout")
    request = request_for(tools, checkout, room)
    return Built(checkout, request, builds.build(request))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder for one build; removed at once, as a build takes tens of megabytes."""
    folder = tmp_path / "room"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
