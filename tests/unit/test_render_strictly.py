"""Templates: nothing undefined, nothing None, line ends kept, shell words quoted."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.errors import BadValues, Exit
from deploy.render import NotRenderable, render, sh


@dataclass(frozen=True)
class Service:
    port: int = 1
    host: str | None = None

    def found(self) -> None:
        return None


def nothing() -> None:
    return None


@dataclass(frozen=True)
class View:
    root: str = "/srv"
    gap: str | None = None
    empty: str = ""
    words: tuple[str, ...] = ("a", "b c")
    holes: tuple[str | None, ...] = ("a", None)
    svc: Service = field(default_factory=Service)
    nothing: Any = field(default=nothing)
    table: Any = field(default_factory=lambda: {"y": None})


def rendered(folder: Path, template: str | bytes, view: Any = None) -> bytes:
    raw = template if isinstance(template, bytes) else template.encode()
    (folder / "t.j2").write_bytes(raw)
    return render("t.j2", view or View(), folder)


def refusal(folder: Path, template: str | bytes) -> BadValues:
    with pytest.raises(BadValues) as caught:
        rendered(folder, template)
    assert caught.value.exit == Exit.VALUES
    return caught.value


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("rm -rf {{ rot }}/build", "rot"),
        ("--port {{ svc.prot }}", "prot"),
        ("--port {{ svc['prot'] }}", "prot"),
        ("{% if rot %}x{% endif %}", "rot"),
        ("{% for x in rot %}x{% endfor %}", "rot"),
        ("{{ rot | sh }}", "rot"),
        ("{{ 'a' ~ rot }}", "rot"),
        ("{{ words[7] }}", "7"),
        ("{{ rot.deeper }}", "rot"),
        ("{{ words | join(rot) }}", "rot"),
    ],
)
def test_an_undefined_name_stops_with_template_line_and_name(
    tmp_path: Path, template: str, name: str
) -> None:
    found = refusal(tmp_path, f"first\nsecond\n{template}\n")

    assert "t.j2:3" in found.what
    assert name in found.why


@pytest.mark.parametrize(
    "expression",
    [
        *("gap", "svc.host", "svc['host']", "nothing()", "svc.found()", "holes[1]", "[gap]"),
        *("gap | sh", "gap | string", "gap | upper", "gap | e", "gap | replace('N', 'x')"),
        *("'a' ~ gap", "'a' + gap", "'%s' % gap", "'%s' | format(gap)", "'a' ~ nothing()"),
        *(
            "'a' ~ svc.found()",
            "'a' ~ table.get('x')",
            "'a' ~ table.y",
            "'a' ~ (svc | attr('host'))",
        ),
        *(
            "holes | join",
            "[gap] | join",
            "[svc] | map(attribute='host') | join",
            "words | join(gap)",
        ),
        *("none", "None", "'a' ~ none", "[none] | join", "(gap or none) ~ 'a'", "[svc.host] | sh"),
    ],
)
def test_none_never_becomes_text(tmp_path: Path, expression: str) -> None:
    found = refusal(tmp_path, f"x\n{{{{ {expression} }}}}\n")

    assert "t.j2:2" in found.what


@pytest.mark.parametrize("expression", ["words", "table", "root == 'x'", "1.5", "svc", "svc.found"])
def test_a_python_value_is_not_printed_as_python_spells_it(tmp_path: Path, expression: str) -> None:
    assert "t.j2:1" in refusal(tmp_path, f"{{{{ {expression} }}}}").what


@pytest.mark.parametrize("loop", ["gap", "svc.host", "holes", "nothing()"])
def test_none_is_no_list_and_no_item(tmp_path: Path, loop: str) -> None:
    refusal(tmp_path, f"{{% for x in {loop} %}}{{{{ x }}}}{{% endfor %}}")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ('{{ x | default("a") }}', "a\n"),
        ('{{ svc.host | default("a") }}', "a\n"),
        ("{% if svc.host %}x{% else %}y{% endif %}", "y\n"),
        ("{% if svc.host is none %}x{% endif %}", "x\n"),
        ("{% if empty %}x{% else %}y{% endif %}", "y\n"),
        ("{% if x is defined %}x{% else %}y{% endif %}", "y\n"),
        ("--root {{ root | sh }} {{ words | sh }} {{ svc.port | sh }}", "--root /srv a 'b c' 1\n"),
    ],
)
def test_an_explicit_default_and_a_question_still_work(
    tmp_path: Path, template: str, text: str
) -> None:
    assert rendered(tmp_path, template) == text.encode()


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (b"a", b"a\n"),
        (b"a\n", b"a\n"),
        (b"a\n\n\n", b"a\n"),
        (b"\n\na\n", b"\n\na\n"),
        (b"a\r\nb\r\n", b"a\r\nb\r\n"),
        (b"a\r\nb", b"a\r\nb\r\n"),
        (b"{% if root %}\na\n{% endif %}\n", b"a\n"),
        (b"{% if root %}\r\na\r\n{% endif %}\r\n", b"a\r\n"),
        (b"{% for x in words %}\n{{ x }}\n{% endfor %}\n", b"a\nb c\n"),
        ("é 你\n".encode(), "é 你\n".encode()),
    ],
)
def test_line_ends_are_the_templates_and_the_last_line_ends_once(
    tmp_path: Path, template: bytes, text: bytes
) -> None:
    assert rendered(tmp_path, template) == text


@pytest.mark.parametrize("template", [b"a\r\nb\n", b"a\nb\r\n", b"a\rb\n"])
def test_mixed_line_ends_are_refused(tmp_path: Path, template: bytes) -> None:
    assert "it mixes LF and CRLF" in refusal(tmp_path, template).why


def test_a_part_with_other_line_ends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "part.j2").write_bytes(b"x\r\n")

    assert "line ends differ" in refusal(tmp_path, "{% include 'part.j2' %}\n").why


def test_a_part_keeps_the_line_end_it_has(tmp_path: Path) -> None:
    (tmp_path / "part.j2").write_bytes(b"part\n")

    assert rendered(tmp_path, "{% include 'part.j2' %}after\n") == b"part\nafter\n"


def test_a_fault_in_a_part_names_the_part(tmp_path: Path) -> None:
    (tmp_path / "part.j2").write_text("x\n{{ rot }}\n")

    assert "part.j2:2" in refusal(tmp_path, "{% include 'part.j2' %}\n").what


@pytest.mark.parametrize("name", ["absent.j2", "../t.j2", "/etc/passwd", "a/../../t.j2", "."])
def test_a_template_that_is_not_below_the_folder_is_not_there(tmp_path: Path, name: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "t.j2").write_text("x")

    with pytest.raises(BadValues, match="cannot render"):
        render(name, View(), inner)


def test_a_broken_template_is_named_with_its_line(tmp_path: Path) -> None:
    assert "t.j2:2" in refusal(tmp_path, "a\n{% if %}\n").what
    assert "not UTF-8" in refusal(tmp_path, b"\xff\n").why


@settings(deadline=None)
@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))))
def test_a_quoted_word_is_the_word_for_a_shell(word: str) -> None:
    assert shlex.split(sh(word)) == [word]


@pytest.mark.parametrize(
    "word", ["", " ", "a b", "$HOME", "`id`", "a'b", '"', "\\", "\n", "*", "~", "-n", "é", "#", "!"]
)
def test_a_real_shell_agrees(word: str) -> None:
    script = f'for w in {sh((word, "end"))}; do printf "%s\\0" "$w"; done'

    out = subprocess.run(["sh", "-c", script], capture_output=True, check=True, timeout=20).stdout

    assert out == f"{word}\0end\0".encode()


@pytest.mark.parametrize(
    "value", [None, True, False, 1.5, {"a": 1}, {"a"}, b"x", object(), "a\0b", [None]]
)
def test_what_is_no_word_is_refused(value: Any) -> None:
    with pytest.raises(NotRenderable):
        sh(value)


def test_paths_and_numbers_are_words() -> None:
    assert sh(PurePosixPath("/a b")) == "'/a b'"
    assert sh(8001) == "8001"
