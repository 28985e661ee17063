"""One result of `vllm bench serve`: parse it, and say why it is none.

The client ends with 0 and writes a file even when every request failed, and an engine's error in
the middle of a stream looks like a completed request of no tokens. So nothing but the lists and
the counts decides. `parse` reads, `faults` judges one result alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from deploy.agent.texts import digested
from deploy.errors import BadValues

T = TypeVar("T")

# Per request, one entry each; written with --save-detailed only.
LISTS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "errors")
# How far the client's own figures may lie from what its lists say: they may have been rounded.
_ROUNDED = 0.001
_RATE_STEP = 0.006  # tokens a second, as a figure of two decimals
# Seconds that a run may take beyond its requests and the arrivals that it waits for.
_BESIDE = 1.0
_LARGEST = 1 << 62


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
    rate: float | None = None  # requests a second that were to arrive; None: all at once
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
    def span(self) -> float:
        """Seconds from the first request sent to the last token; 0 when unknown."""
        if not self.start_times or not self.latencies:
            return 0.0
        ends = [start + took for start, took in zip(self.start_times, self.latencies)]
        return max(ends) - min(self.start_times)

    @property
    def active(self) -> float:
        """Output tokens a second over the span; 0 when unknown.

        `throughput` also counts the wait before the first arrival, which no server can shorten.
        """
        return sum(self.output_lens or ()) / self.span if self.span > 0 else 0.0


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
    except (ValueError, TypeError, RecursionError) as err:
        several = isinstance(err, json.JSONDecodeError) and err.msg == "Extra data"
        raise BadValues(
            f"{where} is no result of a benchmark",
            why="it holds several results (--append-result)" if several else str(err),
            fix="give the file that one run wrote with --save-result --save-detailed",
        ) from err


def of_json(raw: Mapping[str, Any]) -> Result:
    """Build it from JSON values. Raises ValueError or TypeError for a value of another kind."""
    texts = _list(raw, "texts", _text)
    if texts is None:
        texts = _list(raw, "generated_texts", lambda text: digested(str(text)))
    rate = raw.get("ramp_up_start_rps") or raw.get("request_rate")  # a ramp has "inf" beside it
    return Result(
        asked=_count(raw, "num_prompts"),
        completed=_count(raw, "completed"),
        failed=_count(raw, "failed"),
        duration=_number(raw.get("duration", 0.0)),
        throughput=_number(raw.get("output_throughput", 0.0)),
        rate=None if rate in (None, "inf") else _number(rate),
        input_lens=_list(raw, "input_lens", _whole),
        # Some versions name it in the singular.
        output_lens=_list(raw, "output_lens" if "output_lens" in raw else "output_len", _whole),
        start_times=_list(raw, "start_times", _number),
        ttfts=_list(raw, "ttfts", _number),
        itls=_list(raw, "itls", _numbers),
        errors=_list(raw, "errors", str),
        texts=texts,
        total_input=_count(raw, "total_input_tokens"),
        total_output=_count(raw, "total_output_tokens"),
        model=str(raw.get("model_id") or ""),
        tokenizer=str(raw.get("tokenizer_id") or ""),
        date=str(raw.get("date") or ""),
    )


def faults(result: Result) -> tuple[str, ...]:
    """Say why a result is no measurement; nothing when it is one."""
    found = (*_count_faults(result), *_list_faults(result), *_request_faults(result))
    # Of requests that failed the client's figures leave some out: only a whole run adds up.
    return found or tuple(_figure_faults(result))


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
    yield from _each("have no prompt", result.input_lens, lambda n: n < 1)
    yield from _each("made no token", result.output_lens, lambda n: n < 1)
    yield from _each("have no time to the first token", result.ttfts, lambda t: not t > 0)
    yield from _each("have no gaps between tokens", result.itls, lambda gaps: not gaps)
    yield from _each("have a gap below 0", result.itls, lambda gaps: gaps and min(gaps) < 0)
    yield from _each("have an empty text", result.texts, lambda text: not text["chars"])
    if result.asked and not result.throughput > 0 and not errors and result.output_lens is not None:
        yield "its throughput is 0"


def _figure_faults(result: Result) -> Iterator[str]:
    """Hold the client's figures against its own lists: a figure alone can say anything."""
    for what, total, each in (
        ("prompt", result.total_input, result.input_lens),
        ("output", result.total_output, result.output_lens),
    ):
        if total is not None and each is not None and total != sum(each):
            yield f"it says {total} {what} tokens, those of its requests add up to {sum(each)}"
    tokens = sum(result.output_lens) if result.output_lens is not None else result.total_output
    if tokens is not None and result.throughput > 0:
        if not result.duration > 0:
            yield f"it took {result.duration:g} s"
            return
        made = tokens / result.duration
        if abs(made - result.throughput) > _ROUNDED * made + _RATE_STEP:
            yield (
                f"it says {result.throughput:.3f} tok/s, {tokens} tokens in"
                f" {result.duration:.3f} s are {made:.3f}"
            )
    yield from _duration_faults(result)


def _duration_faults(result: Result) -> Iterator[str]:
    """The clock runs before the first request arrives, and until the last one has ended."""
    span = result.span
    if not span:
        return
    waits = (result.asked or 0) / result.rate if result.rate else 0.0
    least, most = span * (1 - _ROUNDED) - _RATE_STEP, span * (1 + _ROUNDED) + waits + _BESIDE
    if not least <= result.duration <= most:
        yield f"it says that it took {result.duration:.3f} s, its requests took {span:.3f} s"


def _each(what: str, values: Sequence[Any] | None, wrong: Any) -> Iterator[str]:
    found = [str(number) for number, value in enumerate(values or (), 1) if wrong(value)]
    if found:
        yield f"requests {', '.join(found[:10])}{' ...' * (len(found) > 10)} {what}"


def _count(raw: Mapping[str, Any], key: str) -> int | None:
    found = raw.get(key)
    return None if found is None else _whole(found)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _LARGEST:
        raise TypeError(f"{_shown(value)} is no whole number")
    return value


def _number(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) < _LARGEST  # which NaN is not, either; a longer integer has no float
    ):
        raise TypeError(f"{_shown(value)} is no finite number")
    return float(value)


def _numbers(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{_shown(values)} is no list")
    if set(map(type, values)) <= {float} and all(map(math.isfinite, values)):
        return tuple(values)  # a run has a hundred thousand of them
    return tuple(map(_number, values))


def _list(raw: Mapping[str, Any], key: str, kind: Callable[[Any], T]) -> tuple[T, ...] | None:
    """Return a list of one kind, or None where it was not written."""
    values = raw.get(key)
    if values is None:
        return None
    if not isinstance(values, list):
        raise TypeError(f"{key}: {_shown(values)} is no list")
    try:
        return tuple(map(kind, values))
    except TypeError as err:
        raise TypeError(f"{key}: {err}") from err


def _text(value: Any) -> Mapping[str, Any]:
    """A text as `digested` keeps it."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{_shown(value)} is no digest of a text")
    for key, kind in (("sha256", str), ("steps", str), ("chars", int), ("words", int)):
        if type(value.get(key)) is not kind:
            raise TypeError(f"{key!r} of a text is {_shown(value.get(key))}")
    return dict(value)


def _shown(value: Any) -> str:
    """What stands there, unless that is very long: an integer may have more digits than fit."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _LARGEST:
        return "a number of more than 18 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
