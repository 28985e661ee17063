"""Without ssh: a bundle run by hand, its evidence pasted back and judged against the lock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import flow
from deploy.agent.words import Exit
from deploy.errors import BadValues, Differs
from deploy.layout import HERE, Layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """The demo's manifest with a lock of its own, deployed into a root by `reproduce`."""
    top = tmp_path_factory.mktemp("checkout")
    (top / "out").mkdir()
    (top / "manifests").mkdir()
    (top / "manifests" / "demo.yaml").write_bytes(HERE.manifest("demo").read_bytes())
    (top / "overlay").symlink_to(HERE.top / "overlay")
    HERE.cache.mkdir(parents=True, exist_ok=True)
    (top / "out" / "cache").symlink_to(HERE.cache)
    made = Layout(top)
    flow.lock("demo", made)
    flow.reproduce("demo", made)
    return made


def by_hand(layout: Layout, verb: str) -> str:
    _, made = flow.bundle("demo", layout)
    root = layout.out_of("demo") / "root"
    argv = [sys.executable, "-I", "-S", str(made.path), verb, "--root", str(root)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False).stdout


def test_evidence_with_a_terminal_around_it_is_judged(layout: Layout, tmp_path: Path) -> None:
    pasted = tmp_path / "pasted.txt"
    pasted.write_text(
        f"root@node:~# python3 demo.pyz verify\n{by_hand(layout, 'verify')}root@node:~# "
    )

    visit = flow.judge_file("demo", pasted, layout)

    assert visit.exit == Exit.OK
    assert visit.gates[0].verdict.value == "passed"


def wrapped(text: str, columns: int, end: str = "\n") -> str:
    """Return the text as a terminal gives it away that breaks every line, also within a word."""
    return end.join(text[at : at + columns] for at in range(0, len(text), columns))


@pytest.mark.parametrize(("columns", "end"), [(200, "\n"), (80, "\r\n"), (7, "\n")])
def test_evidence_that_a_terminal_wrapped_is_the_same_evidence(
    layout: Layout, tmp_path: Path, columns: int, end: str
) -> None:
    said = by_hand(layout, "verify")
    pasted = tmp_path / "pasted.txt"
    pasted.write_bytes(f"$ verify{end}{wrapped(said.strip(), columns, end)}{end}$ ".encode())

    visit = flow.judge_file("demo", pasted, layout)

    assert visit.exit == Exit.OK
    assert visit.evidence is not None
    assert visit.evidence.raw == json.loads(said)


@pytest.mark.parametrize("key", ["plan", "tree"])
def test_evidence_that_was_wrapped_is_judged_as_strictly(
    layout: Layout, tmp_path: Path, key: str
) -> None:
    found = json.loads(by_hand(layout, "verify"))
    pasted = tmp_path / "pasted.txt"
    pasted.write_text(wrapped(json.dumps({**found, key: found[key][:-1]}), 200))
    with pytest.raises(BadValues, match="is no evidence of an agent") as caught:
        flow.judge_file("demo", pasted, layout)
    assert f"{key} is no sha256" in caught.value.why

    pasted.write_text(wrapped(json.dumps({**found, key: "0" * 64}), 200))
    if key == "plan":
        with pytest.raises(Differs):
            flow.judge_file("demo", pasted, layout)
    else:
        assert flow.judge_file("demo", pasted, layout).exit == Exit.DIFFERS


def test_evidence_that_was_cut_off_is_told_with_its_place(layout: Layout, tmp_path: Path) -> None:
    said = by_hand(layout, "verify").strip()
    belled = f"{said[:450]}\x07{said[450:]}"
    pasted = tmp_path / "pasted.txt"
    texts = {
        "": "it holds no JSON: there is no { in it",
        "{": "line 1 column 1 begins with {, and no } ends it: it is cut off",
        "$ python3 demo.pyz verify\n  {\n": "line 2 column 3 begins with {, and no } ends it",
        f"$ verify\n{belled}": "it is no JSON at line 2 column 451: ",
        f"$ verify\n{wrapped('{;' + said, 200)}": "it is no JSON at line 2 column 2: Expecting",
        f"$ verify\n{wrapped(belled, 200)}": "it is no JSON at line 4 column 51: ",
    }
    for text, why in texts.items():
        pasted.write_text(text)
        with pytest.raises(BadValues) as caught:
            flow.judge_file("demo", pasted, layout)

        assert caught.value.what == f"{pasted} is no evidence of an agent"
        assert why in caught.value.why
        assert "breaks lines" in caught.value.fix


def test_evidence_of_a_faulty_target_fails_its_gate(layout: Layout, tmp_path: Path) -> None:
    found = json.loads(by_hand(layout, "verify"))
    found["files"][0]["state"] = "changed"
    (tmp_path / "e.json").write_text(json.dumps(found))

    assert flow.judge_file("demo", tmp_path / "e.json", layout).exit == Exit.DIFFERS


@pytest.mark.parametrize("key", ["plan", "inputs", "agent"])
def test_evidence_that_answers_something_else_is_refused(
    layout: Layout, tmp_path: Path, key: str
) -> None:
    found = {**json.loads(by_hand(layout, "verify")), key: "0" * 64}
    (tmp_path / "e.json").write_text(json.dumps(found))

    with pytest.raises(Differs) as caught:
        flow.judge_file("demo", tmp_path / "e.json", layout)

    assert "./inv bundle" in caught.value.fix


def test_evidence_of_another_manifest_names_that_manifest(layout: Layout, tmp_path: Path) -> None:
    found = {**json.loads(by_hand(layout, "verify")), "plan": "0" * 64, "name": "other"}
    (tmp_path / "e.json").write_text(json.dumps(found))

    with pytest.raises(Differs, match="another plan") as caught:
        flow.judge_file("demo", tmp_path / "e.json", layout)

    assert "-n other" in caught.value.fix


def test_only_a_verify_proves(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(by_hand(layout, "check"))

    with pytest.raises(BadValues, match="evidence of a check"):
        flow.judge_file("demo", tmp_path / "e.json", layout)


@pytest.mark.parametrize("text", ["", "{", "no braces", "{}", '{"schema": "evidence/1"}'])
def test_what_is_no_evidence_is_told_so(layout: Layout, tmp_path: Path, text: str) -> None:
    (tmp_path / "e.json").write_text(text)

    with pytest.raises(BadValues):
        flow.judge_file("demo", tmp_path / "e.json", layout)
