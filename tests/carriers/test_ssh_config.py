"""What is read of ~/.ssh/config, and which way it leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.carriers.ssh_config import aliases, jumps, load, resolve, split
from deploy.carriers.ssh_line import route
from deploy.errors import BadValues


def config(folder: Path, text: str):  # type: ignore[no-untyped-def]
    (folder / "config").write_text(text)
    return load([folder / "config"])


def test_an_alias_gives_address_user_port_and_keys(tmp_path: Path) -> None:
    text = "Host box\n HostName 10.0.0.9\n Port 2222\n User me\n IdentityFile /keys/a\n"

    hop = resolve("box", config(tmp_path, text))

    assert (hop.host, hop.port, hop.user) == ("10.0.0.9", 2222, "me")
    assert hop.identity == ("/keys/a",)


def test_what_the_file_knows_is_its_aliases_and_every_jump_host_on_the_way(tmp_path: Path) -> None:
    text = (
        "Host box\n ProxyJump gate,me@inner:22\nHost inner\n ProxyJump deep\n"
        "Host *.cluster !bad.cluster\n ProxyJump head\nHost torn\n ProxyJump a:b:c\n"
        "Host *\n Port 22\nMatch user nobody\n ProxyJump never\n"
    )
    found = config(tmp_path, text)

    assert aliases(found) == ("*.cluster", "box", "inner", "torn")
    assert jumps(found) == {"gate", "me@inner:22", "deep", "head", "a:b:c"}
    assert jumps(config(tmp_path, "Host *.far\n ProxyJump gate\n"), ["n1.far"]) == {"gate"}


def test_what_is_typed_wins_over_the_file(tmp_path: Path) -> None:
    hop = resolve("you@box:9", config(tmp_path, "Host box\n Port 2222\n User me\n"))

    assert (hop.user, hop.host, hop.port) == ("you", "box", 9)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("box", ("", "box", 0)),
        ("me@10.0.0.1:22", ("me", "10.0.0.1", 22)),
        ("me@[fe80::1]:22", ("me", "fe80::1", 22)),
    ],
)
def test_a_target_is_split_into_user_host_and_port(text: str, parts: tuple[str, str, int]) -> None:
    assert split(text) == parts


@pytest.mark.parametrize("text", ["", "a b", "-oProxyCommand=x", "me@", "box:99999", "a@b@c"])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(BadValues):
        split(text)


def test_included_files_are_read_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "one").write_text("Host box\n Port 77\n")

    hop = resolve("box", config(tmp_path, "Include conf.d/*\nHost box\n Port 88\n HostName h\n"))

    assert (hop.port, hop.host) == (77, "h")


def test_a_circle_of_includes_is_an_error_and_no_hang(tmp_path: Path) -> None:
    with pytest.raises(BadValues, match="cannot read"):
        config(tmp_path, "Include config\n")


def test_jump_hosts_are_travelled_in_the_order_written(tmp_path: Path) -> None:
    text = (
        "Host gate\n HostName gate.example\nHost node\n HostName node.example\n"
        "Host box\n HostName box.example\n ProxyJump gate,me@node:2200\n"
    )

    way = route("box", config(tmp_path, text))

    assert [(hop.host, hop.port) for hop in way] == [
        ("gate.example", 22),
        ("node.example", 2200),
        ("box.example", 22),
    ]


def test_the_first_jump_host_may_have_one_of_its_own(tmp_path: Path) -> None:
    text = "Host gate\n ProxyJump front\nHost box\n ProxyJump gate\n"

    way = route("box", config(tmp_path, text))

    assert [hop.name for hop in way] == ["front", "gate", "box"]


def test_a_wildcard_jump_host_does_not_jump_through_itself(tmp_path: Path) -> None:
    way = route("box", config(tmp_path, "Host *\n ProxyJump gate\n"))

    assert [hop.name for hop in way] == ["gate", "box"]


def test_a_circle_of_jump_hosts_is_an_error(tmp_path: Path) -> None:
    text = "Host a\n ProxyJump b\nHost b\n ProxyJump a\n"

    with pytest.raises(BadValues, match="no end"):
        route("a", config(tmp_path, text))
