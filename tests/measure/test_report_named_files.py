"""What `./inv report` is told to read is read, or is an error: never passed over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deploy import reporting
from deploy.errors import BadValues
from deploy.layout import HERE, Layout
from deploy.measure import accuracy
from tests.measure.test_bench_compare import raw_run


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout(tmp_path)
    found.manifest("tiny").parent.mkdir()
    shutil.copy(HERE.manifest("tiny"), found.manifest("tiny"))
    return found


def test_a_baseline_that_is_not_there_is_an_error_without_a_run_too(layout: Layout) -> None:
    with pytest.raises(BadValues):
        reporting.write("tiny", base="nope", layout=layout)


def test_a_baseline_without_a_run_to_hold_against_it_is_an_error(layout: Layout) -> None:
    base = layout.top / "base.json"
    base.write_text(json.dumps(raw_run()))

    with pytest.raises(BadValues, match="no run to hold the baseline against"):
        reporting.write("tiny", base=str(base), layout=layout)

    assert not (layout.out_of("tiny") / "report.json").exists()


def test_without_a_baseline_a_report_needs_no_run(layout: Layout) -> None:
    _, paths = reporting.write("tiny", layout=layout)

    assert [path.name for path in paths] == ["report.json", "report.md", "report.html"]


def test_reports_of_two_targets_lie_beside_each_other(layout: Layout) -> None:
    out = layout.out_of("tiny")
    out.mkdir(parents=True)
    root = f"local:{(out / 'root').resolve()}"
    stems = {"ssh:a": "-ssh-a", "ssh:b": "-ssh-b", root: ""}
    for target, stem in stems.items():
        said = {"verb": "verify", "target": target, "plan": "", "gates": [], "files": []}
        (out / f"evidence{stem}.json").write_text(json.dumps(said))

    for target, stem in stems.items():
        found, paths = reporting.write("tiny", to=target, layout=layout)

        assert found["target"] == target
        assert [p.name for p in paths] == [
            f"report{stem}.{kind}" for kind in ("json", "md", "html")
        ]
    for target, stem in stems.items():
        assert json.loads((out / f"report{stem}.json").read_text())["target"] == target


@pytest.mark.parametrize("sides", [{"accuracy_base": "a.md"}, {"accuracy_candidate": "a.md"}])
def test_accuracy_of_one_side_is_an_error(layout: Layout, sides: dict[str, str]) -> None:
    with pytest.raises(BadValues, match="nothing to compare"):
        reporting.write("tiny", layout=layout, **sides)


def test_accuracy_without_a_baseline_that_it_could_count_for_is_an_error(layout: Layout) -> None:
    table = layout.top / "scores.json"
    table.write_text(json.dumps(dict.fromkeys(accuracy.TASKS, 50)))

    with pytest.raises(BadValues, match="no score"):
        reporting.write(
            "tiny", accuracy_base=str(table), accuracy_candidate=str(table), layout=layout
        )
