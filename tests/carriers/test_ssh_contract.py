"""The contract over the carriers, for ssh: a machine behind an sshd and the same as a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.carriers.container import Container
from deploy.carriers.engine import open_engine
from deploy.carriers.ssh import Ssh
from deploy.carriers.ssh_config import load
from deploy.evidence import Evidence
from deploy.inventory import Host
from tests.carriers import dock
from tests.carriers.boxes import Box
from tests.carriers.sshd import make_key

pytestmark = [pytest.mark.docker, pytest.mark.sshd, pytest.mark.slow]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Box, Box]]:
    """Two containers of one image."""
    make_key(tmp_path / "key")
    (tmp_path / "home").mkdir()
    with open_engine() as engine, dock.base_image(engine) as vendor:
        boxes = [Box(name, vendor, tmp_path / "home", tmp_path / "key") for name in "ab"]
        try:
            for box in boxes:
                box.start()
            yield boxes[0], boxes[1]
        finally:
            for box in boxes:
                box.remove()


def shown(evidence: Evidence) -> dict[str, object]:
    """The part in which equal targets are equal."""
    return {key: value for key, value in evidence.raw.items() if key != "incidental"}


def test_over_ssh_and_into_a_container_every_verb_says_the_same(
    pair: tuple[Box, Box], tmp_path: Path
) -> None:
    behind_ssh, container = pair
    config = tmp_path / "ssh_config"
    config.write_text(f"Host *\n  IdentityFile {tmp_path}/key\n")
    over_ssh = Ssh(
        alias="a",
        host=Host(ssh=f"root@127.0.0.1:{behind_ssh.port}"),
        pins={"a": {behind_ssh.fingerprint: "pinned by the test"}},
        config=load([config]),
    )
    made = dock.bundle(tmp_path / "bundle")
    verbs = (Verb.CHECK, Verb.DEPLOY, Verb.DEPLOY, Verb.VERIFY, Verb.STATUS, Verb.RESTORE)

    for verb in verbs:
        request = Request(verb=verb, operator="tester")
        said = [target.deliver(made, request) for target in (over_ssh, Container(container.id))]

        assert said[0].error is None, said[0].error
        assert shown(said[0]) == shown(said[1]), verb
        if verb is Verb.VERIFY:
            assert said[0].tree == made.plan.tree
