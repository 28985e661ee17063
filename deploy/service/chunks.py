"""Predict into which chunks vLLM's scheduler cuts the prompt of a lone request.

The shapes that a kernel sees in prefill follow from it, so a marker can be asked for before the
request is sent. It speaks of one request at a time, without speculative decoding and without a
long-prefill threshold: both would cut smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deploy.errors import BadValues

BUDGET = 2048  # vLLM's own for an API server on a card below 70 GiB


class Chunk(NamedTuple):
    """One step: `q_len` new tokens are computed while `kv_len` tokens are known."""

    q_len: int
    kv_len: int


def chunks(prompt: int, budget: int, *, align: int = 0, cached: int = 0) -> tuple[Chunk, ...]:
    """Return the steps of a prompt of so many tokens, the chat template's included.

    `budget` is max_num_batched_tokens. `align` is the attention block of a hybrid model whose
    prefix is cached (it ends its steps at block ends), else 0. `cached` tokens are found in the
    prefix cache.

    Raises:
        BadValues: a length that no request can have.
    """
    _check(prompt, budget, align, cached)
    return tuple(_steps(prompt, budget, align, cached))


def found_again(prompt: int, block: int) -> int:
    """Return how much of a prompt the prefix cache gives back when it is sent a second time.

    The last block is computed anew always: without it there would be nothing to sample from.
    """
    return (prompt - 1) // block * block


def settings(argv: Sequence[str]) -> tuple[int, bool]:
    """Return budget and whether prefix caching is asked for, from the words that start a service.

    Raises:
        BadValues: the budget is no number.
    """
    budget, caching = BUDGET, False
    for word, following in zip(argv, [*argv[1:], ""]):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name == "--max-num-batched-tokens":
            budget = _tokens(value if equals else following)
        elif name == "--enable-prefix-caching":
            caching = True
        elif name == "--no-enable-prefix-caching":
            caching = False
    return budget, caching


def _steps(prompt: int, budget: int, align: int, computed: int) -> Iterator[Chunk]:
    while computed < prompt:
        step = min(prompt - computed, budget)
        if align:
            last = prompt - prompt % align
            if computed + step < last:
                step = step // align * align
            elif computed < last < computed + step:
                step = last - computed
        computed += step
        yield Chunk(step, computed)


def _check(prompt: int, budget: int, align: int, cached: int) -> None:
    faults = []
    if prompt < 1:
        faults.append(f"a prompt has at least one token, not {prompt}")
    if budget < 1:
        faults.append(f"the budget is at least one token, not {budget}")
    if align < 0 or align > budget > 0:
        faults.append(f"the block {align} does not fit the budget {budget}: no step could end")
    if not 0 <= cached < max(prompt, 1):
        faults.append(f"{cached} cached tokens leave nothing of {prompt} to compute")
    if faults:
        raise BadValues(
            "these chunks cannot be predicted",
            why="; ".join(faults),
            fix="give --prompt, --budget, --block and --cached as the service has them",
        )


def _tokens(text: str) -> int:
    """Read a number as vLLM's flags take it: 4096, 4k (1000s), 4K (1024s)."""
    scale = {"k": 1000, "m": 10**6, "K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isascii() or not digits.isdigit():
        raise BadValues(
            "the chunk plan has no budget",
            why=f"--max-num-batched-tokens is {text!r}",
            fix="write a number of tokens, or 4k",
        )
    return int(digits) * scale
