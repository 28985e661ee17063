"""The morning after: three containers, one rebuilt, one edited by hand, one as it was left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import flow, inventory, report
from deploy.agent.words import Exit, Verb
from deploy.carriers import Request
from deploy.carriers.ssh import Ssh, target
from deploy.carriers.ssh_config import load
from deploy.errors import Unreachable
from deploy.gates import Visit
from deploy.inventory import Key
from deploy.layout import HERE, Layout
from tests.carriers.boxes import SITE, Box, boxes

pytestmark = [pytest.mark.sshd, pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Box]]:
    with boxes(tmp_path_factory.mktemp("boxes"), *NAMES) as made:
        yield made


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A checkout's manifest of the demo, with a lock of its own."""
    top = tmp_path / "checkout"
    (top / "out").mkdir(parents=True)
    for name in ("manifests", "overlay"):
        (top / name).symlink_to(HERE.top / name) if name == "overlay" else (top / name).mkdir()
    (top / "manifests" / "demo.yaml").write_bytes(HERE.manifest("demo").read_bytes())
    (top / "out" / "cache").symlink_to(HERE.cache)
    made = Layout(top)
    flow.lock("demo", made)
    return made


def write_hosts(folder: Path, fleet: dict[str, Box]) -> Path:
    """Write hosts.yaml and a home of the operator's."""
    path = folder / "hosts.yaml"
    lines = ["hosts:"]
    for name, box in fleet.items():
        lines += [
            f"  {name}:",
            f"    ssh: root@127.0.0.1:{box.port}",
            f"    site: {SITE}  # the wheel was installed for another Python",
            "    state_dir: /home/shared/.dcu-bundle",
        ]
    path.write_text("\n".join([*lines, "groups:", f"  night: [{', '.join(fleet)}]", ""]))
    for name, box in fleet.items():
        inventory.trust(path, name, Key(fingerprint=box.fingerprint, reason="first start"))
    return path


def test_the_morning_after(
    fleet: dict[str, Box], layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = write_hosts(tmp_path, fleet)
    ssh = tmp_path / "home" / ".ssh"
    ssh.mkdir(parents=True)
    (ssh / "config").write_text(f"Host *\n  IdentityFile {fleet['a']._key}\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DCU_HOSTS", str(hosts))
    everyone = flow.chosen("", group="night", layout=layout)
    deploy = Request(verb=Verb.DEPLOY, operator="night shift")

    def status() -> list[Visit]:
        return flow.run("demo", everyone, Request(verb=Verb.CHECK), layout)

    # In the evening all three are deployed.
    evening = flow.deploy("demo", everyone, deploy, layout)
    assert [visit.exit for visit in evening] == [Exit.OK] * 3, report.visits_json(evening)
    plans = {visit.evidence.raw["plan"] for visit in evening if visit.evidence}
    assert len(plans) == 1

    # Over night one is rebuilt, and in another somebody edits a file.
    fleet["a"].rebuild()
    edited = next(f.path for f in flow.plan("demo", layout).plan.files if f.compiled)
    touched = f"{SITE}/{edited}"
    fleet["b"].sh(f"echo '# tried something' >> {touched}")
    untouched = fleet["c"].stamps()

    # The rebuilt one shows a new host key: refused, with both, until it is pinned.
    morning = status()
    assert [visit.exit for visit in morning] == [Exit.UNREACHABLE, Exit.REFUSED, Exit.OK]
    assert morning[0].error is not None
    assert fleet["a"].fingerprint in morning[0].error.fix
    inventory.trust(hosts, "a", Key(fingerprint=fleet["a"].fingerprint, reason="rebuilt"))

    # Now the three are told apart, and looking changed nothing.
    morning = status()
    assert [visit.met for visit in morning] == ["rebuilt since", "drifted", "deployed"]
    told = report.fleet_text(morning)
    assert "ssh:b" in told
    assert edited in told
    assert fleet["c"].stamps() == untouched

    # One is mended without a byte of content, one refuses with the list, one is left alone.
    mended = flow.deploy("demo", everyone, deploy, layout, if_needed=True)
    assert [visit.exit for visit in mended] == [Exit.OK, Exit.REFUSED, Exit.OK]
    assert [visit.met for visit in mended] == ["rebuilt since", "drifted", "deployed"]
    assert mended[1].error is not None
    assert edited in mended[1].error.why
    assert fleet["c"].stamps() == untouched
    assert "tried something" in fleet["b"].sh(f"tail -n 1 {touched}")
    assert {visit.evidence.raw["plan"] for visit in mended if visit.evidence} == plans

    # The evidence of the mended one is on file, says what the host overrides, and proves the tree.
    assert mended[0].evidence is not None
    filed = json.loads((layout.out_of("demo") / "evidence-ssh-a.json").read_text())
    assert filed["incidental"]["overrides"] == {"site": SITE}
    assert filed["incidental"]["sent"] < 30_000
    assert filed["tree"] == evening[0].evidence.tree if evening[0].evidence else False


def test_a_container_rebuilt_in_the_middle_of_a_deploy_is_told_and_mended(
    fleet: dict[str, Box], layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = fleet["a"]
    box.rebuild()
    hosts = write_hosts(tmp_path, {"a": box})
    hosts.write_text(hosts.read_text().replace("/home/shared/.dcu-bundle", "/root/.dcu-bundle"))
    monkeypatch.setenv("DCU_HOSTS", str(hosts))
    found, made = flow.bundle("demo", layout)
    config = tmp_path / "ssh_config"
    config.write_text(f"Host *\n  IdentityFile {box._key}\n")

    def carrier() -> Ssh:
        return target("a", inventory.load(hosts), config=load([config]))

    def strike(line: str) -> None:
        if line.startswith("sending"):
            box.rebuild()

    with pytest.raises(Unreachable, match="not known"):
        carrier().deliver_in_turn(made, [Request(verb=Verb.DEPLOY)], tell=strike)
    inventory.trust(hosts, "a", Key(fingerprint=box.fingerprint, reason="rebuilt meanwhile"))
    said = carrier().deliver_in_turn(made, [Request(verb=Verb.DEPLOY)], tell=lambda _: None)

    assert said[0].exit == Exit.OK
    assert said[0].raw["met"] == "first contact"
    assert said[0].answers(found.plan)
