"""hosts.yaml: what it may hold, how faults are told, and how a key is pinned in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deploy.errors import BadValues
from deploy.inventory import Host, Inventory, Key, load, section_of, trust
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
    found = trust(path, "me@node:2200", Key(fingerprint=PIN)).inventory

    assert list(found.pins()["gate"]) == [PIN, OTHER]
    assert list(found.jumps["me@node:2200"].keys) == [Key(fingerprint=PIN)]
    assert not found.hosts


def test_pinning_twice_writes_once_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    trust(path, "a", Key(fingerprint=PIN, reason="first"))
    before = path.stat()

    again = trust(path, "a", Key(fingerprint=PIN, reason="again")).done
    same = trust(path, "a", Key(fingerprint=PIN)).done

    assert same == f"already pinned {PIN}; nothing was written"
    assert again == f"{same}: its reason stays 'first' (edit it in hosts.yaml)"
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def test_a_host_that_is_added_is_told_to_be_one_of_all(tmp_path: Path) -> None:
    path = written(tmp_path, "hosts:\n  a:\n    ssh: a\n")

    assert trust(path, "a", Key(fingerprint=PIN)).done == f"pinned {PIN}"
    assert trust(path, "gate", Key(fingerprint=PIN), "jumps").done == f"pinned {PIN}"
    assert trust(path, "box", Key(fingerprint=PIN), "hosts").done == (
        f"pinned {PIN}; added host box to hosts.yaml: --all now includes it"
    )
    assert load(path).chosen(everyone=True) == ("a", "box")


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("a", "hosts"),
        ("gate", "jumps"),
        ("box", "hosts"),
        ("n1.cluster", "hosts"),
        ("me@inner:22", "jumps"),
        ("old", "jumps"),
    ],
)
def test_a_key_goes_where_its_machine_is_known_from(
    tmp_path: Path, name: str, section: str
) -> None:
    text = "hosts:\n  a: {}\njumps:\n  old: {}\n"
    known = load(written(tmp_path, text))
    ways = {"aliases": ("box", "gate", "*.cluster"), "jumps": ("gate", "me@inner:22")}

    assert section_of(known, name, **ways) == section


@pytest.mark.parametrize("name", ["", "zz", "ssh:a", "A", "root@box", "boxx", "cluster"])
def test_a_name_that_nobody_knows_is_refused_with_those_that_are_known(
    tmp_path: Path, name: str
) -> None:
    known = load(written(tmp_path, "hosts:\n  a: {}\n"))

    with pytest.raises(BadValues) as caught:
        section_of(known, name, aliases=("box", "*.cluster"), jumps=("gate",))

    assert "hosts of hosts.yaml: a; aliases of the ssh configuration: *.cluster, box;" in (
        caught.value.why
    )
    assert "jump hosts: gate" in caught.value.why
    assert f"ssh: {name or 'ADDRESS'}" in caught.value.fix


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


def test_the_task_takes_a_name_as_tables_print_it_and_refuses_a_misspelt_one(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "hosts:\n  a:\n    ssh: box\n")
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host box\n  ProxyJump gate\n")

    def pin(name: str) -> tuple[int, str, str]:
        argv = [HERE.top / "inv", "hosts.trust", "-a", name, "--fingerprint", PIN]
        env = {**os.environ, "HOME": str(tmp_path), "DCU_HOSTS": str(path)}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.partition(";")[0], done.stderr

    assert pin("ssh:a")[:2] == (0, f"a: pinned {PIN}")
    assert pin("gate")[:2] == (0, f"gate: pinned {PIN}")
    before = path.read_text()
    code, _, said = pin("zz")

    assert (code, path.read_text()) == (2, before)
    assert said.startswith("no machine is called 'zz'")
    assert list(load(path).pins()) == ["a", "gate"]
