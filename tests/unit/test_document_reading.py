"""YAML text to nodes: what is typed stays, what is ambiguous is refused with its place."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from deploy import document
from deploy.document import List, Map, Node, Text
from deploy.errors import BadValues, Exit
from tests.table import Found, plants


def nodes(text: str | bytes) -> Node:
    """Read a text that must be faultless."""
    root, faults = document.parse(text if isinstance(text, bytes) else text.encode(), "m.yaml")
    faults.raise_any()
    return root


def values(node: Node) -> object:
    """Return nodes without their places."""
    if isinstance(node, Map):
        return {name: values(child) for name, (_, child) in node.entries.items()}
    if isinstance(node, List):
        return [values(child) for child in node.items]
    return node.value


def refusal(text: str | bytes) -> list[str]:
    """Read a text that must be refused; return its faults, one an item."""
    with pytest.raises(BadValues) as caught:
        nodes(text)
    assert caught.value.exit == Exit.VALUES
    return [line.strip() for line in caught.value.why.split("\n")]


# What YAML readers turn into numbers, truth values, dates, null or nothing.
# fmt: off
SURPRISES = (
    "3.10", "26.10", "1.10", "1e10", "1_000", "0644", "0o644", "0x1F", "0b1", "+1", ".inf", ".nan",
    "12:30:45", "2026-01-02", "~", "null", "Null", "=", "61e9540", "1234567", "1" * 40,
    "no", "No", "NO", "off", "on", "y", "n", "yes", "true", "True",
)
# fmt: on


@pytest.mark.parametrize("word", SURPRISES)
def test_a_scalar_stays_what_was_typed_as_value_and_as_key(word: str) -> None:
    assert values(nodes(f"key: {word}\nlist: [{word}]\n? {word}\n: x\n")) == {
        "key": word,
        "list": [word],
        word: "x",
    }


@pytest.mark.parametrize("word", SURPRISES)
def test_quotes_do_not_change_a_scalar(word: str) -> None:
    assert values(nodes(f"a: \"{word}\"\nb: '{word}'\n")) == {"a": word, "b": word}


def test_a_node_knows_where_it_stands() -> None:
    root = nodes("a: 1\nb:\n  - x\n  - {c: 你好, d: y}\n")

    assert isinstance(root, Map)
    items = root.entries["b"][1]
    assert isinstance(items, List)
    inner = items.items[1]
    assert isinstance(inner, Map)
    key, value = inner.entries["d"]
    assert (key.at.line, key.at.column) == (4, 13)
    assert (value.at.line, value.at.column) == (4, 16)


def test_every_duplicate_key_is_refused_with_both_lines() -> None:
    text = (
        "base: &b {port: 1}\nsvc:\n  <<: *b\n  port: 8000\n"
        "commit: aaaaaaa\ncommit: bbbbbbb\nimg: {tag: x, tag: y}\nlist: [{k: 1, 'k': 2}]\n"
    )

    assert refusal(text) == [
        "m.yaml:6:1: the key 'commit' stands here and in line 5; keep one",
        "m.yaml:7:15: the key 'tag' stands here and in line 7; keep one",
        "m.yaml:8:15: the key 'k' stands here and in line 8; keep one",
    ]


def test_a_key_beside_a_merge_wins_over_it_whichever_stands_first() -> None:
    text = (
        "b: &b {port: 1, host: h}\n"
        "after:\n  <<: *b\n  port: 8000\nbefore:\n  port: 8000\n  <<: *b\n"
    )

    found = values(nodes(text))

    assert isinstance(found, dict)
    assert found["after"] == found["before"] == {"port": "8000", "host": "h"}


def test_of_several_merged_mappings_the_first_wins() -> None:
    found = values(nodes("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}\n"))

    assert isinstance(found, dict)
    assert found["c"] == {"x": "1", "y": "2"}


def test_a_quoted_merge_sign_is_an_ordinary_key() -> None:
    assert values(nodes('a: {"<<": x}\n')) == {"a": {"<<": "x"}}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: {<<: 1}\n", "m.yaml:1:5: << takes a mapping, or a list of mappings"),
        ("a: {<<: [{b: 1}, 2]}\n", "m.yaml:1:5: << takes a mapping, or a list of mappings"),
        (
            "a: {<<: {b: 1}, <<: {c: 1}}\n",
            "m.yaml:1:17: the key '<<' stands here and in line 1; keep one",
        ),
        ("a: 1\n---\nb: 2\n", "m.yaml:2:1: a second document; one file holds one"),
        ("a: *b\n", "m.yaml:1:4: the alias *b has no anchor before it"),
        ("a: &b [*b]\n", "m.yaml:1:8: the alias *b stands inside what it names"),
        ("a: &b {<<: *b}\n", "m.yaml:1:12: the alias *b stands inside what it names"),
        ("? [a]\n: b\n", "m.yaml:1:3: a key must be text"),
        ("", "m.yaml:1:1: the file is empty"),
        ("# nothing\n", "m.yaml:1:1: the file is empty"),
        ("a:\n\t- b\n", 'm.yaml:2:1: a tab; use spaces, or "\\t" inside double quotes'),
        ("a: b\t# x\n", 'm.yaml:1:5: a tab; use spaces, or "\\t" inside double quotes'),
        ("\ufeffa: 1\n", "m.yaml:1:1: a byte order mark; save the file as UTF-8 without BOM"),
        (b"ok: 1\na: \xe4\n", "m.yaml:2:4: byte 0xe4 is not UTF-8; save the file as UTF-8"),
        (b"\xff\xfea\x00", "m.yaml:1:1: byte 0xff is not UTF-8; save the file as UTF-8"),
        ("a: [1\nb: 2\n", "m.yaml:2:2: not YAML: expected ',' or ']', but got ':'"),
        ("a: b: c\n", "m.yaml:1:5: not YAML: mapping values are not allowed here"),
        ('a: "\\U00110000"\n', "m.yaml:1:7: not YAML: a number too large"),
        ('a: b\nc: "\\ud83d\\ude00"\n', "m.yaml:2:4: half a character"),
        ('"\\udfff": 1\n', "m.yaml:1:1: half a character"),
        (b"a: \xed\xa0\x80\n", "m.yaml:1:4: byte 0xed is not UTF-8"),
        (f"{'k' * 501}: 1\n", "m.yaml:1:1: a key of more than 500 characters"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_at_its_place(text: str | bytes, fault: str) -> None:
    assert refusal(text)[0].startswith(fault)


@pytest.mark.parametrize("digits", [50, 5000])
def test_a_version_of_many_digits_is_refused(digits: int) -> None:
    assert "not YAML" in refusal(f"%YAML {'9' * digits}.1\n---\na: 1\n")[0]


@pytest.mark.parametrize(
    "tag", ["!x", "!!str", "!!python/object/apply:os.system", "!<tag:x,1:y>", "!"]
)
@pytest.mark.parametrize("form", ["a: {} 1\n", "a: {} [1]\n", "a: {} {{b: 1}}\n", "{} a: 1\n"])
def test_every_tag_is_refused(tag: str, form: str) -> None:
    faults = refusal(form.format(tag))

    assert any("tags are not used here" in fault for fault in faults)


@pytest.mark.parametrize(
    "point", [0x00, 0x01, 0x07, 0x0B, 0x1B, 0x7F, 0x85, 0x2028, 0x202E, 0x200B]
)
def test_what_cannot_be_seen_is_refused_and_named(point: int) -> None:
    assert f"U+{point:04X}" in refusal(f"a: 1\nb: x{chr(point)}y\n")[0]
    assert refusal(f"a: 1\nb: x{chr(point)}y\n")[0].startswith("m.yaml:2:5: ")


def test_a_lone_carriage_return_is_refused_and_crlf_is_a_line_end() -> None:
    assert "U+000D" in refusal("a: 1\rb: 2\n")[0]
    assert values(nodes("a: 1\r\nb: x\r\n")) == {"a": "1", "b": "x"}


def test_characters_of_any_script_are_text() -> None:
    assert values(nodes("名: 你好 \U0001f600 é\n")) == {"名": "你好 \U0001f600 é"}


def alias_flood(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


@plants("an alias flood")
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (alias_flood(30), "more than 20,000 values, aliases counted as what they name"),
        ("a: " + "[x, " * 32, "more than 32 levels deep"),
        ("[" * 100_000, "more than 32 levels deep"),
        ("{a: " * 50_000, "more than 32 levels deep"),
        pytest.param(
            "- x\n" * 20_001,
            "more than 20,000 values, aliases counted as what they name",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["alias flood", "just too deep", "lists", "mappings", "many values"],
)
def test_a_flood_is_refused_before_it_costs_anything(text: str, fault: str, found: Found) -> None:
    tracemalloc.start()
    try:
        assert fault in refusal(text)[0]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * 2**20
    found("exit 2: a bound on values and depth", "below the bound, aliases are read")


def test_aliases_below_the_bound_are_shared_and_read() -> None:
    found = values(nodes(alias_flood(4)))

    assert isinstance(found, dict)
    assert found["a1"] == [["x"] * 9] * 9


def test_depth_up_to_the_bound_is_read() -> None:
    assert values(nodes("[" * 32 + "]" * 32)) is not None


def test_a_huge_file_is_refused_without_being_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    with path.open("wb") as file:
        file.truncate(100 * 1000 * 1000)
    tracemalloc.start()
    try:
        with pytest.raises(BadValues) as caught:
            document.read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert "100,000,000 bytes, more than the 262,144 allowed" in caught.value.why
    assert peak < 2 * 2**20


def test_a_file_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(b"a: 1\n" + b"#" * (document.SIZE_LIMIT - 5))

    root, _ = document.read(path)

    assert values(root) == {"a": "1"}


@pytest.mark.parametrize("kind", ["absent", "folder", "fifo", "link to nothing"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to nothing":
        path.symlink_to("nowhere")

    with pytest.raises(BadValues) as caught:
        document.read(path)

    assert "m.yaml" in caught.value.what


def test_faults_are_listed_in_file_order_and_a_flood_of_them_is_cut() -> None:
    faults = refusal("".join(f"k: {i}\n" for i in range(200)))

    assert faults[0].startswith("m.yaml:2:1: ")
    assert len(faults) == document.SHOWN_LIMIT + 1
    assert faults[-1] == "and 149 more"


def test_a_message_holds_no_control_characters() -> None:
    faults = refusal('"a\\e[31m": 1\n"a\\e[31m": 2\n')

    assert "\x1b" not in "".join(faults)


def test_a_path_below_the_current_folder_is_shown_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert document.shown(tmp_path / "manifests" / "m.yaml") == "manifests/m.yaml"
    assert document.shown(Path("/nowhere/m.yaml")) == "/nowhere/m.yaml"


def test_the_reader_keeps_the_key_node_for_messages() -> None:
    root = nodes("a: 1\n")

    assert isinstance(root, Map)
    assert root.entries["a"][0] == Text(document.Place(1, 1), "a")
