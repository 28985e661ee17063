"""The globs of a manifest against a second, slower way of saying what they mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.globs import compiled, first_match, roots


def matches(pattern: list[str], path: list[str]) -> bool:
    """The reference: name by name, trying every number of folders for `**`."""
    if not pattern:
        return not path
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        if not rest:
            return bool(path)
        return any(matches(rest, path[n:]) for n in range(len(path) + 1))
    return bool(path) and name_matches(first, path[0]) and matches(rest, path[1:])


def name_matches(pattern: str, name: str) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(name_matches(pattern[1:], name[n:]) for n in range(len(name) + 1))
    return bool(name) and pattern[0] in ("?", name[0]) and name_matches(pattern[1:], name[1:])


NAMES = st.text("ab.[]\n中", min_size=1, max_size=4)
PARTS = st.one_of(st.just("**"), st.text("ab.*?[]", min_size=1, max_size=4))


@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(NAMES, min_size=1, max_size=5))
def test_a_glob_means_what_the_reference_says(pattern: list[str], path: list[str]) -> None:
    found = compiled("/".join(pattern)).fullmatch("/".join(path)) is not None

    assert found == matches(pattern, path)


@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(NAMES, min_size=1, max_size=5))
def test_every_match_lies_below_a_root(pattern: list[str], path: list[str]) -> None:
    glob, name = "/".join(pattern), "/".join(path)
    if compiled(glob).fullmatch(name):
        assert any(
            root in ("", name) or name.startswith(f"{root}/") for root in roots([glob, "zz/**"])
        )


@pytest.mark.parametrize(
    ("glob", "path", "want"),
    [
        ("vllm/**", "vllm/a.py", True),
        ("vllm/**", "vllm/a/b.py", True),
        ("vllm/**", "vllm", False),
        ("vllm/**", "vllm2/a.py", False),
        ("**/*.so", "k.so", True),
        ("**/*.so", "a/b/k.so", True),
        ("*.py", "a/b.py", False),
        ("a[1].py", "a[1].py", True),
        ("a[1].py", "a1.py", False),
        ("A.py", "a.py", False),
        ("a.py", "a-py", False),
        ("vllm/**", "vllm/new\nline.py", True),
    ],
)
def test_the_meaning_in_examples(glob: str, path: str, *, want: bool) -> None:
    assert (first_match([glob], path) == glob) is want


def test_roots_are_the_folders_that_need_a_look() -> None:
    assert roots(["vllm/**", "vllm/sub/*.py", "csrc/**", "setup.py"]) == (
        "csrc",
        "setup.py",
        "vllm",
    )
    assert roots(["**/*.py", "vllm/**"]) == ("",)
