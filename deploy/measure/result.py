"""One result of `vllm bench serve`: parse it, and say why it is none.

The client ends with 0 and writes a file even when every request failed, and an engine's error in
the middle of a stream looks like a completed request of no tokens. So nothing but the lists and
the counts decides. `parse` reads, `faults` judges one result alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.agent.texts import digested
from deploy.errors import BadValues

# Per request, one entry each; written with --save-detailed only.
LISTS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a client measured. Times are in seconds; a list that was not written is None.

    `asked` and `completed` are None where the file does not say.
    """

    asked: int | None
    completed: int | None
    failed: int | None
    duration: float
    throughput: float  # output tokens a second over `duration`, as the client prints it
    input_lens: tuple[int, ...] | None = None
    output_lens: tuple[int, ...] | None = None
    start_times: tuple[float, ...] | None = None
    ttfts: tuple[float, ...] | None = None
    itls: tuple[tuple[float, ...], ...] | None = None
    errors: tuple[str, ...] | None = None
    texts: tuple[Mapping[str, Any], ...] | None = None
    total_input: int | None = None
    total_output: int | None = None
    model: str = ""
    tokenizer: str = ""
    date: str = ""

    @property
    def detailed(self) -> bool:
        """True when every list of requests is there."""
        return all(getattr(self, name) is not None for name in LISTS)

    @property
    def latencies(self) -> tuple[float, ...]:
        """Seconds from sending to the last token, a request."""
        return tuple(t + sum(gaps) for t, gaps in zip(self.ttfts or (), self.itls or ()))

    @property
    def tpots(self) -> tuple[float, ...]:
        """Seconds an output token after the first; requests of one token have none.

        The client's own figure also counts the chunk of usage after the last token, which no list
        holds: this one is lower by some thousandths.
        """
        pairs = zip(self.itls or (), self.output_lens or ())
        return tuple(sum(gaps) / (length - 1) for gaps, length in pairs if length > 1)

    @property
    def active(self) -> float:
        """Output tokens a second from the first request sent to the last token; 0 when unknown.

        `throughput` also counts the wait before the first arrival, which no server can shorten.
        """
        if not self.start_times or not self.latencies or not self.output_lens:
            return 0.0
        ends = [start + took for start, took in zip(self.start_times, self.latencies)]
        took = max(ends) - min(self.start_times)
        return sum(self.output_lens) / took if took > 0 else 0.0


def parse(text: str | bytes, where: str = "result.json") -> Result:
    """Read one result, as the client writes it or as a record of ours keeps it.

    Raises:
        BadValues: it is not one JSON object with the types of a result.
    """
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise TypeError("it is no JSON object")
        if "completed" not in raw:
            raise TypeError("it does not say how many requests completed")
        return of_json(raw)
    except (ValueError, TypeError, KeyError, RecursionError) as err:
        several = isinstance(err, json.JSONDecodeError) and err.msg == "Extra data"
        raise BadValues(
            f"{where} is no result of a benchmark",
            why="it holds several results (--append-result)" if several else str(err),
            fix="give the file that one run wrote with --save-result --save-detailed",
        ) from err


def of_json(raw: Mapping[str, Any]) -> Result:
    """Build it from JSON values. Raises ValueError or TypeError for a value of another kind."""
    texts = raw.get("texts")
    if texts is None and raw.get("generated_texts") is not None:
        texts = [digested(str(text)) for text in raw["generated_texts"]]
    itls = raw.get("itls")
    return Result(
        asked=_count(raw, "num_prompts"),
        completed=_count(raw, "completed"),
        failed=_count(raw, "failed"),
        duration=_number(raw.get("duration", 0.0)),
        throughput=_number(raw.get("output_throughput", 0.0)),
        input_lens=_counts(raw.get("input_lens")),
        # Some versions name it in the singular.
        output_lens=_counts(raw.get("output_lens", raw.get("output_len"))),
        start_times=_numbers(raw.get("start_times")),
        ttfts=_numbers(raw.get("ttfts")),
        itls=None if itls is None else tuple(_numbers(gaps) or () for gaps in itls),
        errors=None if raw.get("errors") is None else tuple(map(str, raw["errors"])),
        texts=None if texts is None else tuple(dict(text) for text in texts),
        total_input=_count(raw, "total_input_tokens"),
        total_output=_count(raw, "total_output_tokens"),
        model=str(raw.get("model_id") or ""),
        tokenizer=str(raw.get("tokenizer_id") or ""),
        date=str(raw.get("date") or ""),
    )


def faults(result: Result) -> tuple[str, ...]:
    """Say why a result is no measurement; nothing when it is one."""
    return (*_count_faults(result), *_list_faults(result), *_request_faults(result))


def _count_faults(result: Result) -> Iterator[str]:
    if result.asked is None or result.completed is None:
        yield "it does not say how many requests were asked for and completed"
        return
    if result.asked < 1:
        yield "no request was asked for"
    failed = result.failed if result.failed is not None else result.asked - result.completed
    if result.completed != result.asked or failed:
        yield f"{result.completed} of {result.asked} requests completed, {failed} failed"


def _list_faults(result: Result) -> Iterator[str]:
    for name in (*LISTS, "texts"):
        found = getattr(result, name)
        if found is not None and result.asked is not None and len(found) != result.asked:
            yield f"{name} has {len(found)} entries for {result.asked} requests"


def _request_faults(result: Result) -> Iterator[str]:
    """Judge request by request: a stream that ended early completes, too."""
    errors = [text for text in result.errors or () if text]
    if errors:
        yield f"{len(errors)} requests ended with an error, the first: {errors[0][:200]}"
    yield from _each("made no token", result.output_lens, lambda n: n < 1)
    yield from _each("have no time to the first token", result.ttfts, lambda t: not t > 0)
    yield from _each("have no gaps between tokens", result.itls, lambda gaps: not gaps)
    yield from _each("have an empty text", result.texts, lambda text: not text["chars"])
    if result.asked and not result.throughput > 0 and not errors and result.output_lens is not None:
        yield "its throughput is 0"


def _each(what: str, values: Sequence[Any] | None, wrong: Any) -> Iterator[str]:
    found = [str(number) for number, value in enumerate(values or (), 1) if wrong(value)]
    if found:
        yield f"requests {', '.join(found[:10])}{' ...' * (len(found) > 10)} {what}"


def _count(raw: Mapping[str, Any], key: str) -> int | None:
    found = raw.get(key)
    return None if found is None else _whole(found)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is no finite number")
    return float(value)


def _counts(values: Any) -> tuple[int, ...] | None:
    return None if values is None else tuple(map(_whole, values))


def _numbers(values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    if set(map(type, values)) <= {int, float} and all(map(math.isfinite, values)):
        return tuple(map(float, values))  # a run has a hundred thousand of them
    return tuple(map(_number, values))
