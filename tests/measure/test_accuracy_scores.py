"""Accuracy tables as the suite prints them, and the factor they give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import measuring
from deploy.agent.accuracy import outputs
from deploy.errors import BadValues, Differs
from deploy.layout import HERE
from deploy.measure.accuracy import compare, of_record, parse
from tests.measure.test_bench_compare import raw_run

MARKDOWN = """\
| dataset | version | metric | mode | Qwen3.5-27B-vLLM |
|----- | ----- | ----- | ----- | -----|
| LongBench_hotpotqa | 6b5293 | score | gen | 77.96 |
| LongBench_gov_report | 54c5b0 | score | gen | 32.96 |
| ruler_retrieval_multi_point_32k | - | score | gen | 0.00 |
| ruler_aggregation_keyword_aggregation | - | score | gen | 0.00 |
"""
RESCORED = MARKDOWN.replace("0.00", "100.00")
BASE = {"hotpotqa": 77.96, "gov_report": 32.96, "retrieval_multi_point": 100.0,
        "aggregation_keyword_aggregation": 100.0}  # fmt: skip


def test_the_suites_table_is_read_by_its_official_tasks() -> None:
    assert parse(RESCORED) == BASE
    assert parse(MARKDOWN + RESCORED) == BASE
    table = "dataset,version,metric,mode,M\nhotpotqa,a,score,gen,77.96\n"
    assert parse(table) == {"hotpotqa": 77.96}
    assert parse('{"hotpotqa": 77.96, "x": 3}') == {"hotpotqa": 77.96, "x": 3.0}


def test_a_zero_that_would_have_been_scored_again_is_not_believed() -> None:
    with pytest.raises(BadValues) as caught:
        parse(MARKDOWN)

    assert "scores it again" in caught.value.why


@pytest.mark.parametrize(
    "text", ["", "no output dir generated\n", "a,b\n1,2\n", "{", "| a | b |\n"]
)
def test_a_text_without_scores_is_said(text: str) -> None:
    with pytest.raises(BadValues, match="gives no accuracy"):
        parse(text)


def test_two_scores_of_one_task_are_a_question_for_a_person() -> None:
    with pytest.raises(BadValues) as caught:
        parse(RESCORED + RESCORED.replace("77.96", "70.00"))

    assert "hotpotqa has 77.96 and 70" in caught.value.why


def test_each_task_gives_its_factor_and_the_mean_counts() -> None:
    lost = {"hotpotqa": 0.4, "gov_report": 1.6, "retrieval_multi_point": 2.5,
            "aggregation_keyword_aggregation": 0.0}  # fmt: skip
    candidate = {name: BASE[name] * (1 - lost[name] / 100) for name in BASE}

    found = compare(BASE, candidate)

    assert [task.factor for task in found.tasks] == [1.00, 0.97, 0.94, 1.00]
    assert found.factor == pytest.approx(0.9775)


def test_a_missing_task_leaves_no_factor() -> None:
    found = compare(BASE, {"hotpotqa": 77.0})

    assert found.factor is None
    assert "gov_report" in found.missing


def test_a_score_that_is_no_percentage_is_refused() -> None:
    with pytest.raises(BadValues):
        compare(BASE, {**BASE, "hotpotqa": 779.6})


def test_what_else_a_table_holds_thins_no_loss_out() -> None:
    lost = {**BASE, "gov_report": 16.48}
    more = {"average": 77.0, **{f"other {n}": 50.0 for n in range(40)}}

    found = compare({**BASE, **more}, {**lost, **more})

    assert found.factor == pytest.approx(0.75)
    assert len(found.tasks) == len(BASE) + len(more)


def test_a_task_that_fell_below_one_percent_is_no_fraction() -> None:
    assert compare(BASE, {**BASE, "hotpotqa": 0.5}).factor < 1


@pytest.mark.parametrize("flip", [False, True])
def test_fractions_are_not_held_against_percent(flip: bool) -> None:
    fractions = {name: score / 100 for name, score in BASE.items()}
    sides = (BASE, fractions) if flip else (fractions, BASE)

    with pytest.raises(BadValues) as caught:
        compare(*sides)

    assert "in fractions, the other in percent" in caught.value.why
    assert compare(fractions, fractions).factor == 1


def test_true_is_no_score() -> None:
    with pytest.raises(BadValues) as caught:
        parse('{"hotpotqa": true}')

    assert caught.value.why == "hotpotqa is true, which is no score"


@pytest.mark.parametrize(
    "text", [RESCORED, "dataset,version,metric,mode,M\nhotpotqa,a,score,gen,7\n", '{"hotpotqa": 7}']
)
def test_a_byte_order_mark_is_no_part_of_a_table(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_text(text, encoding="utf-8-sig")

    assert measuring.scores(path) == parse("\ufeff" + text) == parse(text)


def test_a_table_of_several_models_does_not_say_whose_scores_are_meant() -> None:
    with pytest.raises(BadValues) as caught:
        parse("dataset,version,metric,mode,base,ours\nhotpotqa,v,m,gen,60,30\n")

    assert "several models: base, ours" in caught.value.why


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, str]:
    """Three tables of scores: the baseline's, an equal one, and one that lost half of a task."""
    rows = {"base": BASE, "same": BASE, "lost": {**BASE, "gov_report": 16.48},
            "some": {"hotpotqa": 77.96}}  # fmt: skip
    for name, scores in rows.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(scores))
    return {name: str(tmp_path / f"{name}.json") for name in rows}


@pytest.mark.parametrize(
    ("base", "candidate", "why"),
    [
        ("base", "", "--accuracy-candidate is not given"),
        ("", "base", "--accuracy-base is not given"),
        ("base,lost", "same", "--accuracy-base names 2 files"),
        ("base", "same,lost", "--accuracy-candidate names 2 files"),
    ],
)
def test_accuracy_is_of_one_run_against_one_other(
    base: str, candidate: str, why: str, tables: dict[str, str]
) -> None:
    sides = [
        ",".join(tables[name] for name in text.split(",") if name) for text in (base, candidate)
    ]

    with pytest.raises(BadValues) as caught:
        measuring.factor(*sides)

    assert why in caught.value.why
    assert measuring.factor("", "") is None
    assert measuring.factor(tables["base"], tables["same"]) == 1
    assert measuring.factor(tables["base"], tables["lost"]) == pytest.approx(0.75)
    with pytest.raises(Differs, match="gives no factor"):
        measuring.factor(tables["base"], tables["some"])


@pytest.mark.parametrize(("candidate", "code"), [("same", 0), ("lost", 10), ("some", 10)])
def test_lost_accuracy_exits_as_a_regression_does(
    candidate: str, code: int, tables: dict[str, str], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    record.write_text(json.dumps(raw_run()))
    alone = typed("bench.accuracy", "--base", tables["base"], "--candidate", tables[candidate])
    compared = typed(
        "bench.compare", "--base", str(record), "--candidate", str(record),
        "--accuracy-base", tables["base"], "--accuracy-candidate", tables[candidate],
    )  # fmt: skip

    assert (alone.returncode, compared.returncode) == (code, code), (alone, compared)


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "invoke", "--search-root", str(HERE.top), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_a_run_that_wrote_nothing_has_no_scores_whatever_it_printed() -> None:
    with pytest.raises(BadValues) as caught:
        of_record({"tables": [], "said": RESCORED})

    assert "earlier run" in caught.value.why


def test_tables_of_one_run_must_agree() -> None:
    tables = [{"path": "a.md", "text": RESCORED}, {"path": "b.csv", "text": "no table"}]
    assert of_record({"tables": tables}) == BASE
    tables.append({"path": "c.md", "text": RESCORED.replace("77.96", "60.00")})
    with pytest.raises(BadValues):
        of_record({"tables": tables})


def test_only_tables_are_taken_for_output(tmp_path: Any) -> None:
    folder = tmp_path / "output" / "20260101_000000" / "summary"
    folder.mkdir(parents=True)
    (folder / "summary_20260101.csv").write_text("x")
    (folder / "predictions.bin").write_text("x")

    assert [name.rsplit("/", 1)[1] for name in outputs(str(tmp_path))] == ["summary_20260101.csv"]
