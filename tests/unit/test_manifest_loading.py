"""manifests/NAME.yaml to frozen values: types, faults with places, a meaning without spelling."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy import fields, manifest
from deploy.agent.words import canonical
from deploy.errors import BadValues, Exit
from deploy.layout import HERE, Layout
from deploy.manifest import Manifest

A, B, SHA = "a" * 40, "b" * 40, "c" * 64

SMALL: dict[str, Any] = {
    "schema": "1",
    "name": "m",
    "base": {"python": "/usr/bin/python3", "site": "/usr/lib/python3/dist-packages"},
    "source": {"git": "../repo", "base": A, "head": B, "package": "vllm"},
    "overlay": {"include": ["vllm/**"]},
}


def with_(**sections: Any) -> str:
    """Return the small manifest's text with sections replaced; YAML's narrow kind is JSON."""
    return json.dumps(SMALL | sections)


def read(text: str) -> Manifest:
    return manifest.parse(text, "m")


def faults(text: str) -> list[str]:
    with pytest.raises(BadValues) as caught:
        read(text)
    assert caught.value.exit == Exit.VALUES
    lines = [line.strip() for line in caught.value.why.split("\n")]
    assert all(line.startswith("manifests/m.yaml:") for line in lines)
    return [line.removeprefix("manifests/m.yaml:") for line in lines]


def fault(text: str) -> str:
    found = faults(text)
    assert len(found) == 1, found
    return found[0]


# --- types --------------------------------------------------------------------------------------


def test_versions_stay_as_typed() -> None:
    text = """
schema: 1
name: m
base:
  python: /usr/bin/python3
  site: /site
  requires: {python: 3.10, dtk: 26.10, vllm: 0.18.1, torch: 2.10}
source: {wheel: {name: v, version: 1.10, sha256: %s, platform: any, python: 3.10},
         series: overlay/x, package: v}
overlay: {include: ["**"]}
"""
    found = read(text % SHA)

    wanted = {"dtk": "26.10", "python": "3.10", "torch": "2.10", "vllm": "0.18.1"}
    assert found.base.requires == wanted
    assert found.source.wheel is not None
    assert found.source.wheel.version == "1.10"
    assert found.source.wheel.python == "3.10"
    assert found.meaning()["base"]["requires"] == wanted


@pytest.mark.parametrize("word", ["no", "off", "on", "y", "~", "1e10", "0644", "null", "12:30:45"])
def test_words_and_numbers_are_text_where_the_field_is_text(word: str) -> None:
    launch = (
        f"{{dir: /w, port: 8000, serve: {{flag: {word}}}, "
        f"env: {{on: {{value: {word}, why: {word}}}, no: {{value: '', why: x}}}}}}"
    )
    text = with_().replace('"overlay"', f'"launch": {launch}, "overlay"')

    found = read(text).launch

    assert found is not None
    assert set(found.env) == {"on", "no"}
    assert (found.env["on"].value, found.env["on"].why) == (word, word)
    assert found.serve == ("--flag", word)


def mount(read_only: str) -> str:
    mounts = f"[{{source: /a, target: /b, read_only: {read_only}}}]"
    inner = f"{{dir: /w, port: 1, container: {{mounts: {mounts}}}}}"
    return with_().replace('"overlay"', f'"launch": {inner}, "overlay"')


@pytest.mark.parametrize(
    ("word", "value"),
    [("yes", True), ("on", True), ("true", True), ("no", False), ("off", False), ("false", False)],
)
def test_a_switch_takes_six_words(word: str, value: bool) -> None:
    found = read(mount(word)).launch

    assert found is not None
    assert found.container.mounts[0].read_only is value


@pytest.mark.parametrize("word", ["y", "n", "Yes", "NO", "1", "0", "True", "~", "''", "ture"])
def test_a_switch_refuses_every_other_word_and_quotes_it(word: str) -> None:
    message = fault(mount(word))

    assert "expected one of true, yes, on, false, no, off, found" in message
    assert word.strip("'") in message


def kernel(**extension: str) -> str:
    inner = ", ".join(f"{name}: {value}" for name, value in ({"ops": "[f]"} | extension).items())
    body = f"{{preset: p, arch: gfx936, extensions: {{_C: {{{inner}}}}}}}"
    return with_().replace('"overlay"', f'"kernels": {body}, "overlay"')


@pytest.mark.parametrize(
    ("typed", "mode"), [("0644", "0644"), ("'0644'", "0644"), ('"0755"', "0755"), ("0755", "0755")]
)
def test_a_mode_is_four_octal_digits_quoted_or_not(typed: str, mode: str) -> None:
    found = read(kernel(mode=typed)).kernels

    assert found is not None
    assert found.extensions["_C"].mode == mode


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("644", "write 0644"),
        ("755", "write 0755"),
        ("0o644", "write 0644 or 0755"),
        ("420", "write 0644 or 0755"),
        ("00644", ""),
        ("0666", ""),
        ("rw-r--r--", ""),
        ("0x1a4", ""),
    ],
)
def test_every_other_spelling_of_a_mode_is_refused_with_a_hint(typed: str, hint: str) -> None:
    message = fault(kernel(mode=typed))

    assert f"expected a file mode, 0644 or 0755, found '{typed}'" in message
    assert hint in message


@pytest.mark.parametrize("commit", ["1" * 40, "61e9540" + "0" * 33, "0" * 40, "e" * 40])
def test_a_commit_is_the_forty_digits_that_were_typed(commit: str) -> None:
    text = with_().replace(f'"{A}"', commit)

    assert read(text).source.base == commit
    assert read(text).meaning()["source"]["base"] == commit


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("1234567", "this one has 7; `git rev-parse 1234567` gives the whole id"),
        ("61e9540", "this one has 7"),
        ("1" * 39, "this one has 39"),
        ("1" * 64, "SHA-256 repository, which is not supported"),
        ("A" * 40, "write it in lower case"),
        ("main", "a branch or tag moves"),
        ("0x" + "1" * 38, ""),
        ("1" * 41, ""),
    ],
)
def test_any_other_length_or_form_of_a_commit_is_refused(typed: str, hint: str) -> None:
    message = fault(with_().replace(f'"{A}"', typed))

    assert "expected a commit id of 40 lower-case hex digits, found" in message
    assert hint in message


def test_a_fault_stands_at_the_place_of_the_value() -> None:
    text = "schema: 1\nname: m\nbase: {python: /p, site: /s}\nsource:\n  git: r\n  base: 123\n"

    assert "6:9: expected a commit id" in "\n".join(faults(text))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            fields.PORT,
            {"1": 1, "8001": 8001, "65535": 65535},
            "None é 0 65536 -1 08001 8_001 8001.0 0x1F 1e3",
        ),
        (fields.COUNT, {"1": 1, "50": 50}, "0 -5 05 5.0 1_0 five"),
        (
            fields.SIZE,
            {"1": 1, "16G": 16 * 2**30, "512M": 512 * 2**20},
            "0 16GB 16g 1.5G -1 G 16_0M",
        ),
        (fields.DURATION, {"90s": 90, "15m": 900, "2h": 7200}, "90 0s 1.5h 15min -1s 1:30 s"),
        (
            fields.SHA256,
            {SHA: SHA, "1" * 64: "1" * 64},
            f"None {'c' * 63} {'C' * 64} {'c' * 65} {A}",
        ),
        (fields.ABSOLUTE, {"/": "/", "/a/b": "/a/b"}, "a /a/../b /a//b /a/ ./a ~/a /. //a"),
        (fields.RELATIVE, {"a": "a", "a/b.c": "a/b.c", "...": "..."}, "/a a/../b .. . a//b a/ ./a"),
        (
            fields.GLOB,
            {"vllm/**": "vllm/**", "**/*.py": "**/*.py", "a?[b]": "a?[b]"},
            "/vllm/** ../x vllm/**.py !tests/** a/ **x",
        ),
        (
            fields.VERSION,
            {"0.18.1": "0.18.1", "2.10": "2.10", "1.0rc1": "1.0rc1"},
            "None é v1 1. .1 latest 1..2",
        ),
        (
            fields.ARCH,
            {"gfx936": "gfx936", "gfx90a": "gfx90a"},
            "gfx936:sramecc+ gfx928,gfx936 936 GFX936",
        ),
        (fields.NAME, {"qwen35-gfx936": "qwen35-gfx936"}, "None Qwen a/b .. -a a- é"),
        (fields.ENV_NAME, {"VLLM_X": "VLLM_X", "a1": "a1"}, "1A A-B A=B é"),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_a_scalar_takes_its_form_and_nothing_near_it(
    kind: fields.Scalar, good: dict[str, Any], bad: str
) -> None:
    assert {text: kind.value(text) for text in good} == good
    first = next(iter(good))
    for text in [*bad.split(), "", f"{first}\n", f"\n{first}", f"{first}\0", f"{first}\x85"]:
        with pytest.raises(ValueError, match="expected "):
            kind.value(text)


@settings(deadline=None)
@given(st.text())
def test_no_text_makes_a_scalar_fail_in_another_way(text: str) -> None:
    for kind in vars(fields).values():
        if isinstance(kind, fields.Scalar):
            try:
                kind.value(text)
            except ValueError as err:
                assert str(err).startswith("expected ")  # noqa: PT017 - the point is the class


@pytest.mark.parametrize("arch", ["gfx936:sramecc+:xnack-", "gfx928;gfx936", "gfx928 gfx936"])
def test_an_arch_that_would_be_dropped_silently_is_refused_with_the_way_out(arch: str) -> None:
    message = fault(kernel().replace("gfx936", f"'{arch}'"))

    assert "expected one bare arch" in message
    assert "write gfx936" in message or "exactly one" in message


# --- faults -------------------------------------------------------------------------------------


def test_all_faults_of_a_file_are_told_at_once_in_file_order() -> None:
    text = (
        "schema: 2\n"
        "name: M\n"
        "bse: {python: /p, site: /s}\n"
        "source:\n  git: r\n  base: 12\n  head: main\n  package: vllm\n  packge: x\n"
        "overlay: {include: vllm}\n"
        "launch: {dir: w, port: 80000}\n"
    )

    found = faults(text)

    assert [f.split(": ")[0] for f in found] == sorted(
        (f.split(": ")[0] for f in found), key=lambda p: [int(n) for n in p.split(":")]
    )
    for part in (
        "1:1: the key 'base' is missing: the target before the overlay",
        "1:9: expected 1, the only schema so far, found '2'",
        "2:7: expected a name of a-z",
        "3:1: unknown key 'bse'; did you mean 'base'?",
        "6:9: expected a commit id",
        "7:9: expected a commit id",
        "9:3: unknown key 'packge'",
        "10:20: expected a list, found 'vllm'",
        "11:15: expected an absolute path, found 'w'",
        "11:24: expected a port (1 to 65535), found '80000'",
    ):
        assert any(f.startswith(part) for f in found), (part, found)


def test_faults_of_yaml_and_of_fields_are_told_together() -> None:
    text = "schema: 1\nname: m\nname: m\nbase: !x {python: 3, site: /s}\nsource: {git: r}\n"

    found = faults(text)

    for part in (
        "1:1: the key 'overlay' is missing",
        "3:1: the key 'name' stands here and in line 2",
        "4:7: the tag '!x'",
        "4:19: expected an absolute path, found '3'",
        "5:9: the key 'package' is missing",
        "5:10: `git:` needs 'base' beside it",
        "5:10: `git:` needs 'head' beside it",
    ):
        assert any(f.startswith(part) for f in found), (part, found)
    assert len(found) == 7


def test_a_key_that_resembles_nothing_gets_the_known_ones() -> None:
    message = fault(with_(zzz="1"))

    assert "unknown key 'zzz'; known are schema, name, base, source, overlay, kernels" in message


@pytest.mark.parametrize("text", ["[]", "x", "- a\n- b\n", "~"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    assert "expected a mapping with schema, name, base, source, overlay" in fault(text)


@pytest.mark.parametrize("section", ["base", "source", "overlay", "kernels", "launch", "bench"])
@pytest.mark.parametrize("value", ["", [], "x", ["a"]])
def test_a_section_that_is_no_mapping_is_refused(section: str, value: Any) -> None:
    assert "expected a mapping" in fault(with_(**{section: value}))


def test_a_missing_key_says_what_it_is_for() -> None:
    base = {"python": "/usr/bin/python3"}

    message = fault(with_(base=base))

    assert "the key 'site' is missing: the folder vLLM is installed in; never guessed" in message


def test_the_name_must_be_the_files() -> None:
    assert "the name must be the file's: 'm'" in fault(with_(name="other"))


WHEEL = {"name": "v", "version": "1.0", "sha256": SHA, "platform": "any"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "say either `git:` with base and head, or `wheel:` with series"),
        (
            {"git": "r", "base": A, "head": B, "wheel": WHEEL, "series": "overlay/x"},
            "say either `git:` with base and head, or `wheel:` with series",
        ),
        ({"git": "r", "base": A}, "`git:` needs 'head' beside it"),
        ({"git": "r", "head": A}, "`git:` needs 'base' beside it"),
        ({"git": "r", "base": A, "head": B, "series": "overlay/x"}, "'series' does not go with"),
        ({"wheel": WHEEL}, "`wheel:` needs 'series' beside it"),
        ({"wheel": WHEEL, "series": "overlay/x", "head": A}, "'head' does not go with `wheel:`"),
        ({"wheel": WHEEL, "series": "x"}, "a series lies below overlay/, found 'x'"),
        ({"wheel": WHEEL, "series": "overlay/../x"}, "no part of it may be empty, '.' or '..'"),
    ],
)
def test_a_source_is_two_commits_or_a_wheel_with_a_series(
    source: dict[str, Any], message: str
) -> None:
    assert message in fault(with_(source=source | {"package": "v"}))


@pytest.mark.parametrize("serve", [["--port=1"], ["--served-model-name", "x"], {"port": "1"}])
def test_flags_that_other_keys_give_are_refused(serve: Any) -> None:
    message = fault(with_(launch={"dir": "/w", "port": "1", "serve": serve}))

    assert "leave it out here" in message


@pytest.mark.parametrize("gate", ["1", "8", "0", "two", "02"])
def test_only_gates_two_to_seven_can_be_not_applicable(gate: str) -> None:
    assert "expected a gate from 2 to 7" in fault(with_(gates={"not_applicable": {gate: "x"}}))


def test_a_gate_is_not_applicable_only_with_a_reason() -> None:
    assert "found nothing" in fault(with_(gates={"not_applicable": {"2": ""}}))


def test_a_list_does_not_hold_one_thing_twice() -> None:
    message = fault(with_(overlay={"include": ["vllm/**", "x", "vllm/**"]}))

    assert "stands in this list twice" in message


def test_an_escape_does_not_bring_in_what_the_reader_refuses() -> None:
    text = with_().replace('"../repo"', r'"a\nb"')

    assert "expected a path, found 'a\\nb'" in fault(text)


# --- meaning ------------------------------------------------------------------------------------


def test_the_meaning_is_json_and_holds_what_was_asked() -> None:
    found = read(with_()).meaning()

    assert found == {
        "schema": 1,
        "name": "m",
        "base": {"python": "/usr/bin/python3", "site": "/usr/lib/python3/dist-packages"},
        "source": {"base": A, "head": B, "package": "vllm"},
        "overlay": {"include": ["vllm/**"]},
    }
    assert json.loads(canonical(found)) == found


EXAMPLE = yaml.load(HERE.manifest("example").read_bytes(), Loader=yaml.BaseLoader)
MEANING = canonical(manifest.load(HERE.manifest("example")).meaning())


def spelled(value: Any, choose: Callable[[int], int], depth: int = 0) -> str:
    """Return a text of `value` with quotes, order, comments and style chosen by `choose(n)`."""
    pad, flow = "  " * depth, choose(4) == 0
    if isinstance(value, str):
        return scalar(value, choose)
    note = "  # a note: {x" if choose(3) == 0 and not flow else ""
    if isinstance(value, dict):
        names = list(value)
        for i in range(len(names) - 1, 0, -1):
            j = choose(i + 1)
            names[i], names[j] = names[j], names[i]
        if flow or not names:
            return json.dumps({name: value[name] for name in names})
        lines = [
            f"{pad}{scalar(name, choose)}: {spelled(value[name], choose, depth + 1)}"
            for name in names
        ]
        return f"{note}\n" + "\n".join(lines)
    if flow or not value:
        return json.dumps(value)
    return f"{note}\n" + "\n".join(f"{pad}- {spelled(item, choose, depth + 1)}" for item in value)


def scalar(text: str, choose: Callable[[int], int]) -> str:
    style = choose(3)
    plain_safe = text and all(c.isalnum() or c in "./_-" for c in text) and text[0] not in "-"
    if style == 0 and plain_safe:
        return text
    return json.dumps(text) if style == 1 else "'" + text.replace("'", "''") + "'"


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_order_quotes_comments_and_style_change_no_meaning(data: st.DataObject) -> None:
    text = "# first\n" + spelled(EXAMPLE, lambda n: data.draw(st.integers(0, n - 1)))

    found = manifest.parse(text, "example")

    assert canonical(found.meaning()) == MEANING


def test_a_default_spelled_out_changes_no_meaning() -> None:
    bare = kernel()
    spelled_out = kernel(module="vllm._C", namespace="_C", target="_C", component="_C", mode="0755")
    spelled_out = spelled_out.replace("preset: p", "preset: p, reproducible: reported, ccache: {}")
    empty = with_(gates={}, overlay={"include": ["vllm/**"], "ignore": {}, "accept": {}})

    assert read(bare).meaning() == read(spelled_out).meaning()
    assert read(empty).meaning() == read(with_()).meaning()


def test_flags_as_a_mapping_and_as_a_list_mean_the_same() -> None:
    launch = {"dir": "/w", "port": "1"}
    as_map = with_(launch=launch | {"serve": {"b": "1", "a": ""}})
    as_list = with_(launch=launch | {"serve": ["--a", "--b", "1"]})
    other_order = with_(launch=launch | {"serve": ["--b", "1", "--a"]})

    assert read(as_map).meaning() == read(as_list).meaning()
    assert read(other_order).meaning() != read(as_list).meaning()


def leaves(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, str):
        return [place]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [found for name, child in items for found in leaves(child, (*place, name))]


def other(text: str) -> str:
    """Return another valid text of the same form."""
    swaps = {"yes": "no", "reported": "required", "same-process": "twin", "prefill": "decode"}
    swaps["0755"] = "0644"
    if text in swaps:
        return swaps[text]
    if text.isdigit() and len(text) < 40:
        return text[:-1] + ("7" if text[-1] != "7" else "8")
    for old, new in (("5G", "6G"), ("16G", "17G"), ("15m", "16m")):
        if text == old:
            return new
    return text[:-1] + ("0" if text[-1] == "1" else "1")


# Where a clone lies counts for nobody; the commit ids pin what it holds.
PLACE = ("source", "git")


def test_a_repository_at_another_place_changes_no_meaning() -> None:
    moved = json.loads(json.dumps(EXAMPLE))
    moved["source"]["git"] = "../elsewhere"

    found = manifest.parse(json.dumps(moved), "example")

    assert found.source.git == "../elsewhere"
    assert canonical(found.meaning()) == MEANING


# The number of the format and the name have one valid value each.
@pytest.mark.parametrize(
    "place",
    [p for p in leaves(EXAMPLE) if p not in (("schema",), ("name",), PLACE)],
    ids=lambda p: ".".join(map(str, p)),
)
def test_every_value_of_the_example_counts_in_the_meaning(place: tuple[Any, ...]) -> None:
    changed = json.loads(json.dumps(EXAMPLE))
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = other(inner[place[-1]]) if inner[place[-1]] else "x"
    if place[:2] == ("overlay", "include"):
        inner[place[-1]] = "vllm/*"
    if place == ("kernels", "sources", 0):
        inner[place[-1]] = "csrc/*"
    if place[:2] == ("launch", "container") and place[2] == "ulimits":
        inner[place[-1]] = "1:1"
    text = json.dumps(changed).replace("**1", "**/1")

    assert canonical(manifest.parse(text, "example").meaning()) != MEANING


def test_the_values_cannot_be_bent() -> None:
    found = read(kernel())
    assert found.kernels is not None

    with pytest.raises(dataclasses.FrozenInstanceError):
        found.name = "x"  # type: ignore[misc]
    with pytest.raises(TypeError):
        found.base.requires["x"] = "1"  # type: ignore[index]
    with pytest.raises(TypeError):
        found.kernels.extensions["_C"].ops["g"] = ""  # type: ignore[index]


def test_the_words_that_start_the_service_come_from_three_sections() -> None:
    launch = {"dir": "/w", "port": "8001", "serve": {"dtype": "bfloat16", "eager": ""}}
    model = {"path": "/root/M", "served_name": "M"}

    found = read(with_(launch=launch, model=model)).serve_argv()

    assert " ".join(found) == (
        "vllm serve /root/M --served-model-name M --port 8001 --dtype bfloat16 --eager"
    )


def test_a_manifest_without_launch_says_so_when_a_start_is_asked() -> None:
    with pytest.raises(BadValues, match="cannot start m"):
        read(with_()).serve_argv()


# --- defaults, example, schema, cost --------------------------------------------------------------


def test_no_default_was_changed() -> None:
    """A default is not part of the meaning: changing one within schema 1 makes locks lie."""
    sizes = {"ccache": {"dir": "", "size": 5368709120}, "shm_size": 17179869184}
    kernels, launch = manifest.Kernels, manifest.Launch
    found = {
        f.name: f.default
        for cls in (kernels, launch, manifest.Extension, manifest.Dispatch, manifest.Profile)
        for f in dataclasses.fields(cls)
        if f.default is not dataclasses.MISSING
    }

    assert dataclasses.asdict(found.pop("ccache")) == sizes["ccache"]
    container = dataclasses.asdict(dataclasses.replace(found.pop("container"), ulimits={}))
    assert container == {
        "devices": (), "mounts": (), "shm_size": sizes["shm_size"], "groups": (), "ulimits": {},
        "capabilities": (), "security": (), "network": "host", "ipc": "host",
    }  # fmt: skip
    assert found == {
        "sources": (
            "csrc/**", "cmake/**", "CMakeLists.txt", "CMakePresets.json", "setup.py",
            "pyproject.toml", "requirements/**",
        ),
        "build_dir": "/root/build", "jobs": 0, "reproducible": False,
        "command": ("vllm", "serve"), "serve": (), "port": 8000, "ready": 900,
        "module": "", "namespace": "", "target": "", "component": "", "mode": "0755",
        "diag": "same-process", "switch": "", "off": "0",
        "tool": "/opt/dtk/bin/hipprof", "library_path": (),
    }  # fmt: skip


def keys(cls: type[Any], prefix: str = "") -> set[str]:
    found = set()
    for spec in dataclasses.fields(cls):
        found.add(prefix + spec.name)
        kind = spec.metadata["kind"]
        while not isinstance(kind, fields.Record):
            kind = getattr(kind, "value", getattr(kind, "item", None))
            if not hasattr(kind, "read") or isinstance(kind, fields.Scalar):
                break
        if isinstance(kind, fields.Record):
            found |= keys(kind.cls, f"{prefix}{spec.name}.")
    return found


def typed_keys(value: Any, cls: type[Any], prefix: str = "") -> set[str]:
    """The keys of a text that are fields; what users name freely is passed over."""
    found = set()
    for spec in dataclasses.fields(cls):
        if spec.name not in value:
            continue
        found.add(prefix + spec.name)
        kind, children = spec.metadata["kind"], [value[spec.name]]
        while isinstance(kind, fields.MapOf | fields.ListOf):
            is_map = isinstance(kind, fields.MapOf)
            children = [c for child in children for c in (child.values() if is_map else child)]
            kind = kind.value if isinstance(kind, fields.MapOf) else kind.item
        if isinstance(kind, fields.Record):
            for child in children:
                found |= typed_keys(child, kind.cls, f"{prefix}{spec.name}.")
    return found


def test_the_example_shows_every_field_but_the_other_source() -> None:
    missing = keys(Manifest) - typed_keys(EXAMPLE, Manifest)

    assert missing == {
        "source.series",
        "source.wheel",
        *(f"source.wheel.{name}" for name in ("name", "version", "sha256", "platform", "python")),
    }


def test_the_other_source_in_the_examples_comment_loads() -> None:
    lines = HERE.manifest("example").read_text(encoding="utf-8").split("\n")
    start = lines.index("#   source:")
    block = "\n".join(line[4:] for line in lines[start : lines.index("source:")])
    block = block.replace("64 hex digits", SHA)
    text = with_()
    small = json.loads(text)
    del small["source"]
    head = "\n".join(f"{name}: {json.dumps(value)}" for name, value in small.items())

    found = read(f"{head}\n{block}\n")

    assert found.source.series == "overlay/demo"


def test_the_exported_schema_is_current() -> None:
    exported = (HERE.manifest("example").parent / "schema.json").read_text(encoding="utf-8")
    run = [sys.executable, "-m", "deploy.manifest", "--schema"]

    printed = subprocess.run(run, cwd=HERE.top, capture_output=True, text=True, check=True).stdout

    assert exported == printed, "run `python -m deploy.manifest --schema > manifests/schema.json`"


def test_the_schema_knows_every_key_and_allows_no_other() -> None:
    schema = json.loads(manifest.schema_text())

    assert list(schema["properties"]) == [f.name for f in dataclasses.fields(Manifest)]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["schema", "name", "base", "source", "overlay"]
    assert schema["properties"]["source"]["additionalProperties"] is False
    assert schema["properties"]["source"]["oneOf"]


def test_importing_the_reader_brings_no_heavy_library() -> None:
    heavy = ("pydantic", "jinja2", "docker", "fabric", "paramiko", "requests", "rich", "difflib")
    code = f"import deploy.manifest, sys; print([m for m in {heavy} if m in sys.modules])"

    run = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE.top, capture_output=True, text=True, check=True
    )

    assert run.stdout.strip() == "[]"


def test_every_manifest_of_this_checkout_loads() -> None:
    for name in (*manifest.names(), "example"):
        assert manifest.load(HERE.manifest(name)).name == name


# --- choosing -----------------------------------------------------------------------------------


def checkout(top: Path, *names: str) -> Layout:
    (top / "manifests").mkdir()
    for name in (*names, "example"):
        (top / "manifests" / f"{name}.yaml").write_text("x")
        (top / "manifests" / f"{name}.lock.yaml").write_text("x")
    return Layout(top)


@pytest.mark.parametrize(
    ("present", "given_", "variable", "chosen"),
    [
        (("a", "b", "demo"), "a", "b", "a"),
        (("a", "b", "demo"), "", "b", "b"),
        (("a", "demo"), "", "", "demo"),
        (("a",), "", "", "a"),
        (("demo",), "", "", "demo"),
        (("a", "b"), "", "b", "b"),
        (("a",), "example", "", "example"),
    ],
)
def test_the_manifest_is_the_given_one_the_variables_the_only_one_or_demo(
    tmp_path: Path, present: tuple[str, ...], given_: str, variable: str, chosen: str
) -> None:
    layout = checkout(tmp_path, *present)

    assert manifest.choose(given_, layout, {"DCU_MANIFEST": variable}) == chosen


@pytest.mark.parametrize(
    ("given_", "variable", "what"),
    [
        ("dmo", "", "there is no manifest 'dmo' (given); did you mean 'demo'?"),
        ("../demo", "", "there is no manifest '../demo' (given)"),
        ("demo.yaml", "", "there is no manifest 'demo.yaml' (given)"),
        ("", "gone", "there is no manifest 'gone' (from DCU_MANIFEST)"),
    ],
)
def test_a_manifest_that_does_not_exist_is_said_with_those_that_do(
    tmp_path: Path, given_: str, variable: str, what: str
) -> None:
    with pytest.raises(BadValues) as caught:
        manifest.choose(given_, checkout(tmp_path, "a", "demo"), {"DCU_MANIFEST": variable})

    assert caught.value.what.startswith(what)
    assert "manifests/ holds a, demo" in caught.value.why


@pytest.mark.parametrize(("present", "why"), [(("a", "b"), "there are a, b"), ((), "holds none")])
def test_without_any_hint_the_choice_is_left_to_the_person(
    tmp_path: Path, present: tuple[str, ...], why: str
) -> None:
    with pytest.raises(BadValues) as caught:
        manifest.choose("", checkout(tmp_path, *present), {})

    assert why in caught.value.why
