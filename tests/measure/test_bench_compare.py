"""Whether two runs may be compared: every state that makes a number mean something else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.agent import counters
from deploy.errors import BadValues
from deploy.measure import record
from deploy.measure.compare import compare, differences, result_differences, text_notes
from deploy.measure.record import Run
from deploy.measure.result import faults, of_json
from deploy.measure.stats import Verdict

FIXTURES = Path(__file__).parent / "fixtures"
NAME = "8-16K"
FLAGS = ["--backend", "openai-chat", "--disable-shuffle", "--num-warmups", "2"]
STATE = {"pid": 7, "start_ticks": 70, "boot_id": "b", "faults": []}


def raw_result(speed: float = 1.0) -> dict[str, Any]:
    """The real format, `speed` times as fast."""
    found: dict[str, Any] = json.loads((FIXTURES / "bench_result_ok.json").read_text())
    found["duration"] /= speed
    found["output_throughput"] *= speed
    found["ttfts"] = [t / speed for t in found["ttfts"]]
    found["itls"] = [[t / speed for t in gaps] for gaps in found["itls"]]
    first = found["start_times"][0]
    found["start_times"] = [first + (t - first) / speed for t in found["start_times"]]
    return found


def raw_round(name: str, begun: float, result: dict[str, Any], hits: float = 0) -> dict[str, Any]:
    before = {"vllm:prefix_cache_queries": 0.0, "vllm:prefix_cache_hits": 0.0,
              "vllm:request_success": 0.0}  # fmt: skip
    after = {"vllm:prefix_cache_queries": 40960.0, "vllm:prefix_cache_hits": hits,
             "vllm:request_success": 7.0}  # fmt: skip
    return {
        "round": name, "exit": 0, "begun": begun, "seconds": 33.0, "result": result, "stale": [],
        "before": STATE, "after": STATE, "counters": {"before": before, "after": after},
        "markers": None, "compiled": 0, "compiling": [],
    }  # fmt: skip


def raw_run(speed: float = 1.0, begun: float = 1000.0) -> dict[str, Any]:
    argv = ["vllm", "bench", "serve", "--num-prompts", "5", "--result-dir", f"/r{begun}", *FLAGS]
    locked = {"dataset": "/d.jsonl", "sha256": "a" * 64, "requests": 5}
    return {
        "schema": "bench/1", "flags": FLAGS, "started": begun,
        "locked": {"buckets": {NAME: locked}, "flags": FLAGS},
        "versions": {"transformers": "5.5.0"},
        "buckets": [{
            "bucket": NAME, "sha256": "a" * 64, "requests": 5, "argv": argv,
            "rounds": [raw_round("warm", begun, raw_result(speed)),
                       raw_round("counted", begun + 50, raw_result(speed))],
        }],
    }  # fmt: skip


def run(speed: float = 1.0, begun: float = 1000.0) -> Run:
    return record.parse(raw_run(speed, begun))


def test_two_equal_runs_are_comparable_and_differ_by_noise() -> None:
    found = compare([run()], [run(1.002, 2000.0)])

    assert found.comparable, found.rows[0].faults
    [row] = found.rows
    assert row.claim is not None
    assert row.claim.verdict is Verdict.NOISE
    assert row.notes == ()
    assert found.regressions == ()
    assert [m.name for m in row.metrics if "slowest" in m.name] == [
        "TTFT slowest of 5 (p99)", "TPOT slowest of 4 (p99)", "latency slowest of 5 (p99)",
    ]  # fmt: skip


def test_three_pairs_in_turns_show_a_gain_and_score_it() -> None:
    base = [run(s, t) for s, t in ((1.0, 1000), (1.001, 4000), (0.999, 5000))]
    candidate = [run(s, t) for s, t in ((1.06, 2000), (1.061, 3000), (1.059, 6000))]

    found = compare(base, candidate, coefficient=0.9775)

    assert found.rows[0].claim.verdict is Verdict.GAIN
    assert found.score is not None
    assert found.score.missing == ("4-8K", "16-32K")
    out = found.to_json()
    assert out["score"]["final"] == pytest.approx(found.score.total * 0.9775)


def test_runs_not_made_in_turns_show_no_gain() -> None:
    base = [run(1.0, t) for t in (1000, 2000, 3000)]
    candidate = [run(1.06 + 0.001 * i, t) for i, t in enumerate((4000, 5000, 6000))]

    found = compare(base, candidate).rows[0].claim

    assert found.verdict is Verdict.NOT_SHOWN
    assert "did not take turns" in found.why


def test_a_slower_bucket_is_a_regression_whatever_the_others_gained() -> None:
    base, candidate = raw_run(), raw_run(1.5, 2000.0)
    for raw, speed in ((base, 1.0), (candidate, 0.95)):
        other = copy.deepcopy(raw["buckets"][0])
        other["bucket"] = "4-8K"
        other["rounds"][1]["result"] = raw_result(speed)
        raw["buckets"].append(other)
        raw["locked"]["buckets"]["4-8K"] = raw["locked"]["buckets"][NAME]

    found = compare([record.parse(base)], [record.parse(candidate)])

    assert found.comparable
    assert found.regressions == ("4-8K",)
    assert found.score.total > 0


def test_five_requests_are_said_to_be_too_few() -> None:
    base, candidate = raw_run(), raw_run(1.0, 2000.0)
    result = candidate["buckets"][0]["rounds"][1]["result"]
    result["ttfts"] = [t * f for t, f in zip(result["ttfts"], (0.9, 1.1, 0.95, 1.02, 0.99))]

    [row] = compare([record.parse(base)], [record.parse(candidate)]).rows

    assert any("5 requests are too few for this claim" in note for note in row.notes)


def counted(raw: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = raw["buckets"][0]["rounds"][1]
    return found


def _failed(raw: dict[str, Any]) -> None:
    counted(raw)["result"].update(completed=3, failed=2)


def _no_warm(raw: dict[str, Any]) -> None:
    del raw["buckets"][0]["rounds"][0]


def _warm_failed(raw: dict[str, Any]) -> None:
    raw["buckets"][0]["rounds"][0]["result"]["completed"] = 0


def _warm_later(raw: dict[str, Any]) -> None:
    raw["buckets"][0]["rounds"].reverse()
    raw["buckets"][0]["rounds"][1].update(round="warm", begun=9999.0)
    raw["buckets"][0]["rounds"][0].update(round="counted")


def _restarted(raw: dict[str, Any]) -> None:
    counted(raw)["before"] = counted(raw)["after"] = {**STATE, "pid": 8}


def _second_server(raw: dict[str, Any]) -> None:
    fault = {"what": "listener", "text": "two processes listen on the port", "warning": False}
    counted(raw)["after"] = {**STATE, "faults": [fault]}


def _data_set(raw: dict[str, Any]) -> None:
    raw["buckets"][0]["sha256"] = "b" * 64


def _fewer(raw: dict[str, Any]) -> None:
    raw["buckets"][0]["requests"] = 4


def _of_fewer(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["num_prompts"] = 4


def _shuffled(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["input_lens"].reverse()


def _output(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["output_lens"][0] = 7


def _flags(raw: dict[str, Any]) -> None:
    raw["flags"] = [*FLAGS, "--temperature", "1"]


def _model(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["model_id"] = "another"


def _no_result(raw: dict[str, Any]) -> None:
    counted(raw).update(result=None)


def _old(raw: dict[str, Any]) -> None:
    counted(raw)["stale"] = ["the result file is older than the round: it is of an earlier run"]


def _none(raw: dict[str, Any]) -> None:
    counted(raw).update(result=None, stale=["the client wrote no result"])


def _compiled(raw: dict[str, Any]) -> None:
    counted(raw).update(compiled=1, compiling=["WARNING kernel compiled during inference"])


def _cache(raw: dict[str, Any]) -> None:
    counted(raw)["counters"]["after"]["vllm:prefix_cache_hits"] = 36864.0


def _others(raw: dict[str, Any]) -> None:
    counted(raw)["counters"]["after"]["vllm:request_success"] = 9.0


def _fewer_served(raw: dict[str, Any]) -> None:
    counted(raw)["counters"]["after"]["vllm:request_success"] = 0.0


def _served_to_a_script(raw: dict[str, Any]) -> None:
    raw["buckets"][0]["argv"] = ["sh", "run_throughput.sh", NAME, "5"]
    counted(raw)["counters"]["after"]["vllm:request_success"] = 4.0


def _rate(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["output_throughput"] *= 2


def _half_the_time(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["output_throughput"] *= 2
    counted(raw)["result"]["duration"] /= 2


def _twice_the_time(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["output_throughput"] /= 2
    counted(raw)["result"]["duration"] *= 2


def _no_time(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["duration"] = 0.0


def _starts(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["start_times"] = [-5.0] * 5


def _totals(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["total_output_tokens"] = 99999


def _prompts(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["input_lens"][1] = -1


def _gaps(raw: dict[str, Any]) -> None:
    counted(raw)["result"]["itls"][3] = [0.9, -0.5]


def _blind(raw: dict[str, Any]) -> None:
    counted(raw)["counters"] = {"before": {}, "after": {}}


def _undetailed(raw: dict[str, Any]) -> None:
    del counted(raw)["result"]["itls"]


def _exit(raw: dict[str, Any]) -> None:
    counted(raw)["exit"] = 1


def _preempted(raw: dict[str, Any]) -> None:
    for key, value in (("before", 0.0), ("after", 2.0)):
        counted(raw)["counters"][key]["vllm:num_preemptions"] = value


def _anonymous(raw: dict[str, Any]) -> None:
    counted(raw).update(before=None, after=None)


def _unlocked(raw: dict[str, Any]) -> None:
    raw["locked"] = {}


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (_failed, "candidate: 3 of 5 requests completed, 2 failed"),
        (_no_warm, "the warm round was skipped"),
        (_warm_failed, "the warm round failed"),
        (_warm_later, "the warm round came after"),
        (_restarted, "started anew between the rounds (pids 7, 8)"),
        (_second_server, "after the counted round: two processes listen"),
        (_data_set, "the data set's sha256 is bbbb"),
        (_fewer, "4 requests, the lock has 5: an observation"),
        (_of_fewer, "the result is of 4 requests, 5 were to be sent"),
        (_shuffled, "input lengths are the same in another order"),
        (_output, "output lengths of 1 requests differ: [6, 9, 1, 7, 5] and [7, 9, 1, 7, 5]"),
        (_flags, "the client's flags are not the locked ones"),
        (_model, "the model: 'Qwen3.5-27B' and 'another'"),
        (_old, "of an earlier run"),
        (_no_result, "it has no result, and does not say why"),
        (_none, "the client wrote no result"),
        (_compiled, "something was compiled inside the counted round"),
        (_cache, "the prefix cache gave 0% of the prompt tokens to one side and 90% to the other"),
        (_others, "the server finished 9 requests, 7 were ours"),
        (_fewer_served, "the server finished 0 requests, 7 were ours: another served them"),
        (_served_to_a_script, "the server finished 4 requests, 5 were ours"),
        (_rate, "it says 2.213 tok/s, 28 tokens in 25.300 s are 1.107"),
        (_half_the_time, "it says that it took 12.650 s, its requests took 24.589 s"),
        (_twice_the_time, "it says that it took 50.600 s, its requests took 24.589 s"),
        (_no_time, "it took 0 s"),
        (_starts, "it says that it took 25.300 s, its requests took 6.560 s"),
        (_totals, "it says 99999 output tokens, those of its requests add up to 28"),
        (_prompts, "requests 2 have no prompt"),
        (_gaps, "requests 4 have a gap below 0"),
        (_blind, "the server's counters could not be read"),
        (_undetailed, "it has no lists of requests"),
        (_exit, "the client ended with 1"),
        (_preempted, "2 requests were preempted"),
        (_anonymous, "nothing says which process served it"),
        (_unlocked, "nothing locks this bucket"),
    ],
)
def test_each_planted_state_makes_a_run_not_comparable_for_its_own_reason(
    plant: Callable[[dict[str, Any]], None], why: str
) -> None:
    raw = raw_run(1.3, 2000.0)
    assert compare([run()], [record.parse(raw)]).comparable
    plant(raw)

    found = compare([run()], [record.parse(raw)])

    assert not found.comparable
    assert any(why in text for text in found.rows[0].faults), found.rows[0].faults
    assert found.rows[0].claim is None
    assert found.score is None


def test_a_ramp_waits_for_its_first_request_as_long_as_it_likes() -> None:
    raw = {**raw_result(), "request_rate": "inf"}
    raw["duration"] += 4
    raw["output_throughput"] = sum(raw["output_lens"]) / raw["duration"]
    assert any("its requests took" in text for text in faults(of_json(raw)))

    assert faults(of_json({**raw, "ramp_up_start_rps": 1})) == ()


def test_a_bare_result_is_shown_and_never_compared(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(raw_result()))

    found = compare([record.read(path)], [record.read(path)])

    assert not found.comparable
    assert found.rows[0].base == pytest.approx(0.85132, abs=1e-5)


def test_lengths_of_each_request_decide_and_not_their_sum() -> None:
    """Two pairs from public reports: another total; the same total of other lengths."""
    a, b, c = (
        of_json({"completed": 10, "total_output_tokens": sum(lens), "output_len": lens})
        for lens in ([512] * 10, [43, 427, *[480] * 8], [43, 981, *[512] * 8])
    )

    assert "in all 5120 and 4310" in result_differences(a, b)[0]
    assert "output lengths of 2 requests differ" in result_differences(a, c)[0]
    assert "in all 5120 and 5120" in result_differences(a, c)[0]
    assert result_differences(a, a) == []


def test_other_prompt_lengths_name_the_versions_that_count_tokens() -> None:
    raw = raw_run(1.0, 2000.0)
    counted(raw)["result"]["input_lens"] = [4189] * 5
    raw["versions"] = {"transformers": "5.6.0"}
    one, two = run(), record.parse(raw)

    said = differences((one, one.buckets[NAME]), (two, two.buckets[NAME]))

    assert any("input lengths of 5 requests differ" in text for text in said)
    assert "versions: transformers 5.5.0 and transformers 5.6.0" in said
    totals = result_differences(
        of_json({"total_input_tokens": 40960}), of_json({"total_input_tokens": 41890})
    )
    assert totals == ["input tokens in all: 40960 and 41890"]


def test_texts_that_differ_are_counted_and_placed() -> None:
    raw = raw_result()
    other = {**raw, "generated_texts": [*raw["generated_texts"]]}
    other["generated_texts"][1] = "Two reports agree on the closing date"

    [note] = text_notes(of_json(raw), of_json(other))

    assert (
        "1 of 5 texts differ; the earliest is request 2 from word 6 on, about token 7 of 9" in note
    )
    assert text_notes(of_json(raw), of_json(raw)) == []
    assert "closing" not in note


def test_counters_are_added_up_over_their_labels() -> None:
    text = (
        '# HELP vllm:request_success_total x\n# TYPE vllm:request_success_total counter\n'
        'vllm:request_success_total{engine="0",finished_reason="stop"} 3.0\n'
        'vllm:request_success_total{engine="0",finished_reason="length"} 2.0\n'
        'vllm:request_success_created{engine="0"} 1.7e9\n'
        'vllm:prefix_cache_hits_total{engine="0"} 1.2e+03\nother_total 5\nvllm:prompt_tokens NaN\n'
    )  # fmt: skip

    assert counters.parse(text) == {"vllm:request_success": 5.0, "vllm:prefix_cache_hits": 1200.0}


@pytest.mark.parametrize(
    "raw",
    [{}, [], {"schema": "bench/1"}, {"schema": "bench/2", "buckets": []},
     {"schema": "bench/1", "buckets": [{"bucket": "x"}]}],
)  # fmt: skip
def test_what_is_no_record_is_said(raw: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(raw))

    with pytest.raises(BadValues, match=r"no (record|result)"):
        compare([record.read(path)], [record.read(path)])


def test_sides_that_have_nothing_in_common_are_refused() -> None:
    other = raw_run()
    other["buckets"][0]["bucket"] = "4-8K"

    with pytest.raises(BadValues, match="nothing to compare"):
        compare([run()], [record.parse(other)])
    with pytest.raises(BadValues, match="cannot be paired"):
        compare([run(), run()], [run()])


def _cut(raw: dict[str, Any]) -> None:
    del raw["buckets"]


def _no_words(raw: dict[str, Any]) -> None:
    del raw["buckets"][0]["argv"]


def _other_kind(raw: dict[str, Any]) -> None:
    raw["buckets"][0]["requests"] = "five"


def _no_pid(raw: dict[str, Any]) -> None:
    counted(raw)["before"] = {"start_ticks": 1, "boot_id": "b"}


def _no_round(raw: dict[str, Any]) -> None:
    raw["buckets"][0]["rounds"][0] = None


def _nothing_locked(raw: dict[str, Any]) -> None:
    del raw["locked"]["buckets"][NAME]["requests"]


RESULT_2 = "the result of round 2 of bucket 1: "
HUGE = int("9" * 400)  # an integer that no float can hold


def _put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def damage(raw: dict[str, Any]) -> None:
        place: Any = raw
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return damage


def _in_bucket(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    return _put("buckets", 0, *path, value=value)


def _in_round(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    return _in_bucket("rounds", 1, *path, value=value)


def _second_bucket(raw: dict[str, Any]) -> None:
    """A slow one first, a fast one last: nobody knows which of them would count."""
    raw["buckets"].append(raw_run(1.5, 3000.0)["buckets"][0])


def _second_round(raw: dict[str, Any]) -> None:
    raw["buckets"][0]["rounds"].append(raw_round("counted", 3000.0, raw_result(1.5)))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_cut, "it has no 'buckets'"),
        (_no_words, "bucket 1 has no 'argv'"),
        (_other_kind, "'requests' of bucket 1 is not a whole number"),
        (_no_pid, "'before' in round 2 of bucket 1 has no 'pid'"),
        (_no_round, "round 1 of bucket 1 is no object"),
        (_nothing_locked, "the locked bucket 8-16K has no 'requests'"),
        (_second_bucket, "it has the bucket 8-16K twice"),
        (_second_round, "bucket 1 has the round counted twice"),
        (_put("buckets", value={}), "'buckets' of it is not a list"),
        (_put("flags", value=5), "'flags' of it is not a list of texts"),
        (_put("locked", value=[1]), "'locked' of it is not an object"),
        (_put("locked", "flags", value=5), "'flags' of what was locked is not a list"),
        (_put("gates", value=[7]), "gate 1 is no object"),
        (
            _in_bucket("requests", value=float("inf")),
            "'requests' of bucket 1 is not a whole number",
        ),
        (
            _in_bucket("argv", value=["--num-prompts", "5", "--num-warmups", "abc"]),
            "'argv' of bucket 1 has 'abc' behind --num-warmups, which is no number",
        ),
        (_in_round("exit", value="0"), "'exit' of round 2 of bucket 1 is not a whole number"),
        (_in_round("begun", value="now"), "'begun' of round 2 of bucket 1 is not a number"),
        (_in_round("begun", value=HUGE), "'begun' of round 2 of bucket 1 is not a number"),
        (_in_round("stale", value=5), "'stale' of round 2 of bucket 1 is not a list of texts"),
        (
            _in_round("after", value={**STATE, "faults": ["x"]}),
            "a fault of 'after' in round 2 of bucket 1 is no object",
        ),
        (
            _in_round("counters", "after", value={"vllm:request_success": "x"}),
            "'after' of the counters of round 2 of bucket 1 is not an object of numbers",
        ),
        (
            _in_round("markers", value={"markers": [], "pids": 5}),
            "'pids' of the markers of round 2 of bucket 1 is not a list of whole numbers",
        ),
        (_in_round("result", value=5), "'result' of round 2 of bucket 1 is not an object"),
        (
            _in_round("result", "duration", value=HUGE),
            f"{RESULT_2}a number of more than 18 digits is no finite number",
        ),
        (
            _in_round("result", "ttfts", value=[HUGE] * 5),
            f"{RESULT_2}ttfts: a number of more than 18 digits is no finite number",
        ),
        (
            _in_round("result", "errors", value="abcde"),
            f"{RESULT_2}errors: 'abcde' is no list",
        ),
        (
            _in_round("result", "texts", value=[{}] * 5),
            f"{RESULT_2}texts: 'sha256' of a text is None",
        ),
    ],
)
def test_a_damaged_record_is_told_with_its_file_and_the_key(
    damage: Callable[[dict[str, Any]], None], why: str, tmp_path: Path
) -> None:
    raw = raw_run()
    damage(raw)
    path = tmp_path / "base.json"
    path.write_text(json.dumps(raw))

    with pytest.raises(BadValues) as caught:
        record.read(path)

    assert caught.value.what == f"{path} is no record of a measured run"
    assert caught.value.why == why


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of a record; of a list the first two entries stand for all."""
    rows = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for key, child in rows:
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from places(child, (*path, key))


@pytest.mark.parametrize("value", [None, {}, "x", HUGE], ids=["null", "empty", "text", "huge"])
def test_whatever_is_damaged_ends_in_words_and_not_in_a_traceback(value: Any) -> None:
    base, refused = run(), 0
    for path in places(raw_run()):
        damaged = copy.deepcopy(raw_run(1.0, 2000.0))
        _put(*path, value=value)(damaged)
        try:
            compare([base], [record.parse(damaged)]).to_json()
        except BadValues:
            refused += 1

    assert refused > 5


def test_all_that_is_damaged_is_told_at_once() -> None:
    raw = raw_run()
    for damage in (
        _put("flags", value=5),
        _in_bucket("requests", value="five"),
        _in_round("exit", value="0"),
    ):
        damage(raw)

    with pytest.raises(BadValues) as caught:
        record.parse(raw)

    assert caught.value.why == (
        "'flags' of it is not a list of texts; 'requests' of bucket 1 is not a whole number;"
        " 'exit' of round 2 of bucket 1 is not a whole number"
    )


def test_figures_that_were_rounded_are_the_clients_own() -> None:
    raw = raw_run(1.0, 2000.0)
    result = counted(raw)["result"]
    result["duration"] = round(result["duration"], 2)
    result["output_throughput"] = round(result["output_throughput"], 2)

    found = compare([run()], [record.parse(raw)])

    assert found.comparable, found.rows[0].faults
