"""hosts.yaml: what it may hold, how faults are told, and how a key is pinned in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.errors import BadValues
from deploy.inventory import Host, Inventory, Key, load, trust
from deploy.layout import HERE

PIN = "SHA256:" + "A" * 43
OTHER = "SHA256:" + "B" * 42 + "/"


def written(folder: Path, text: str) -> Path:
    path = folder / "hosts.yaml"
    path.write_text(text)
    return path


def test_the_tracked_example_is_a_valid_inventory() -> None:
    found = load(HERE.top / "hosts.example.yaml")

    assert found.hosts["a"].keys[0].reason.startswith("read in the container's")
    assert found.groups["contest"] == ("a", "b")
    assert list(found.pins()) == ["a", "b", "gate.example"]


def test_without_a_file_any_alias_of_ssh_config_is_a_host(tmp_path: Path) -> None:
    found = load(tmp_path / "hosts.yaml")

    assert found.host("box") == Host(ssh="box")


def test_a_listed_host_without_ssh_is_reached_by_its_alias(tmp_path: Path) -> None:
    found = load(written(tmp_path, "hosts:\n  box:\n    site: /srv/site\n"))

    assert found.host("box").ssh == "box"
    assert found.host("box").overrides() == {"site": "/srv/site"}


def test_every_fault_is_told_at_its_place(tmp_path: Path) -> None:
    text = "hosts:\n  a:\n    shh: x\n    site: rel\n    keys:\n      - fingerprint: MD5:x\n"

    with pytest.raises(BadValues) as caught:
        load(written(tmp_path, text))

    for place in ("hosts.yaml:3:5", "hosts.yaml:4:11", "hosts.yaml:6:22"):
        assert place in caught.value.why
    assert "did you mean 'ssh'" in caught.value.why


def test_a_group_of_an_unknown_host_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(BadValues, match="1 fault") as caught:
        load(written(tmp_path, "hosts:\n  node1: {}\ngroups:\n  g: [nod1]\n"))

    assert "did you mean 'node1'" in caught.value.why


def test_a_group_and_all_choose_hosts_and_an_unknown_group_is_refused(tmp_path: Path) -> None:
    found = load(written(tmp_path, "hosts:\n  b: {}\n  a: {}\ngroups:\n  g: [b]\n"))

    assert found.chosen(group="g") == ("b",)
    assert found.chosen(everyone=True) == ("a", "b")
    with pytest.raises(BadValues, match="no group 'h'") as unknown:
        found.chosen(group="h")
    with pytest.raises(BadValues, match="no hosts") as empty:
        Inventory().chosen(everyone=True)

    # What is pasted must not copy the example over a file with pinned keys.
    assert unknown.value.fix == "give --group with one of g, or name hosts: -t ssh:a,ssh:b"
    assert "`cp -n hosts.example.yaml hosts.yaml`" in empty.value.fix


@pytest.mark.parametrize(
    "text",
    [
        "hosts:\n  b:\n    ssh: b\n",
        "hosts:\n  a: # the first\n    # how\n    ssh: a  # by alias\n  b:\n    ssh: b\n",
        "hosts:\n    a:\n        ssh: a\n        keys:\n        - fingerprint: OTHER\n",
        "groups: {}\nhosts:\n  a:\n    keys:\n      - fingerprint: OTHER\n        reason: x\n",
        "# my machines\ngroups: {}\n",
    ],
)
def test_a_pin_is_added_and_every_other_line_stays(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text.replace("OTHER", OTHER))
    before = path.read_text().splitlines()

    trust(path, "a", Key(fingerprint=PIN, since="2026-01-31", reason='rebuilt: "new" # key'))

    found = load(path).hosts["a"].keys
    assert found[0] == Key(fingerprint=PIN, since="2026-01-31", reason='rebuilt: "new" # key')
    assert [k.fingerprint for k in found[1:]] == ([OTHER] if "OTHER" in text else [])
    assert [line for line in path.read_text().splitlines() if line in before] == before


def test_a_jump_host_is_pinned_below_jumps(tmp_path: Path) -> None:
    path = written(tmp_path, "jumps:\n  gate:\n    keys:\n      - fingerprint: " + OTHER + "\n")

    trust(path, "gate", Key(fingerprint=PIN))
    found = trust(path, "me@node:2200", Key(fingerprint=PIN))

    assert list(found.pins()["gate"]) == [PIN, OTHER]
    assert list(found.jumps["me@node:2200"].keys) == [Key(fingerprint=PIN)]
    assert not found.hosts


def test_pinning_twice_writes_once(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    trust(path, "a", Key(fingerprint=PIN))
    before = path.stat()

    trust(path, "a", Key(fingerprint=PIN, reason="again"))

    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def test_a_file_that_lines_cannot_be_added_to_is_left_alone(tmp_path: Path) -> None:
    path = written(tmp_path, "hosts: {a: {ssh: a}}\n")

    with pytest.raises(BadValues) as caught:
        trust(path, "a", Key(fingerprint=PIN))

    assert path.read_text() == "hosts: {a: {ssh: a}}\n"
    assert f'- fingerprint: "{PIN}"' in caught.value.fix
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "SHA256:short", PIN + "=", "MD5:" + "a" * 47, PIN + "\n"])
def test_what_is_no_fingerprint_is_not_pinned(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadValues):
        trust(tmp_path / "hosts.yaml", "a", Key(fingerprint=text))

    assert not (tmp_path / "hosts.yaml").exists()
