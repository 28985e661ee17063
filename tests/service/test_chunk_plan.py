"""The chunk plan is the scheduler's; the expected lists were taken from vLLM 0.18.1 itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import BadValues
from deploy.layout import HERE
from deploy.service.chunks import Chunk, chunks, found_again, settings


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [
        (1, [(1, 1)]),
        (4096, [(4096, 4096)]),
        (4097, [(4096, 4096), (1, 4097)]),
        (8192, [(4096, 4096), (4096, 8192)]),
        (12000, [(4096, 4096), (4096, 8192), (3808, 12000)]),
        (32768, [(4096, 4096 * n) for n in range(1, 9)]),
        (32900, [*[(4096, 4096 * n) for n in range(1, 9)], (132, 32900)]),
    ],
)
def test_a_prompt_is_cut_at_the_budget(prompt: int, steps: list[tuple[int, int]]) -> None:
    assert list(chunks(prompt, 4096)) == steps


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [
        (8192, [(3920, 3920), (3920, 7840), (352, 8192)]),
        (12000, [(3920, 3920), (3920, 7840), (3920, 11760), (240, 12000)]),
        (32900, [*[(3920, 3920 * n) for n in range(1, 9)], (784, 32144), (756, 32900)]),
    ],
)
def test_a_hybrid_model_with_a_cached_prefix_is_cut_at_block_ends(
    prompt: int, steps: list[tuple[int, int]]
) -> None:
    assert list(chunks(prompt, 4096, align=784)) == steps


@pytest.mark.parametrize(("prompt", "last"), [(8192, 16), (12000, 16), (12001, 1)])
def test_a_prompt_sent_again_computes_its_last_block_only(prompt: int, last: int) -> None:
    assert chunks(prompt, 4096, cached=found_again(prompt, 16)) == (Chunk(last, prompt),)


@given(
    st.integers(1, 40000), st.integers(1, 9000), st.integers(0, 3), st.integers(1, 2000),
)  # fmt: skip
def test_every_token_is_computed_once_and_no_step_is_over_budget(
    prompt: int, budget: int, seen: int, block: int
) -> None:
    align = block if block <= budget else 0
    cached = min(seen * block, prompt - 1)

    steps = chunks(prompt, budget, align=align, cached=cached)

    assert sum(step.q_len for step in steps) == prompt - cached
    assert steps[-1].kv_len == prompt
    assert all(0 < step.q_len <= budget for step in steps)


@pytest.mark.parametrize(
    ("prompt", "budget", "align", "cached"),
    [(0, 4096, 0, 0), (5, 0, 0, 0), (5, 4096, 5000, 0), (5, 4096, -1, 0), (5, 4096, 0, 5)],
)
def test_what_no_request_can_be_is_refused(
    prompt: int, budget: int, align: int, cached: int
) -> None:
    with pytest.raises(BadValues, match="cannot be predicted"):
        chunks(prompt, budget, align=align, cached=cached)


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ((), (2048, False)),
        (("--max-num-batched-tokens", "4096"), (4096, False)),
        (("--max-num-batched-tokens=4k", "--enable-prefix-caching"), (4000, True)),
        (("--max_num_batched_tokens", "4K", "--no-enable-prefix-caching"), (4096, False)),
    ],
)
def test_budget_and_caching_are_read_from_the_words_of_the_start(
    argv: tuple[str, ...], found: tuple[int, bool]
) -> None:
    assert settings(argv) == found


def test_a_budget_that_is_no_number_is_refused() -> None:
    with pytest.raises(BadValues, match="no budget"):
        settings(("--max-num-batched-tokens",))


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (("--budget", "4096"), "max_num_batched_tokens 4096 (--budget):"),
        (("-n", "tiny"), "max_num_batched_tokens 2048 (vLLM's default):"),
        (("-n", "example"), "max_num_batched_tokens 4096 (launch.serve of example):"),
    ],
)
def test_the_columns_have_a_title_that_parsers_of_stdout_do_not_see(
    words: tuple[str, ...], title: str
) -> None:
    argv = (sys.executable, "-m", "invoke", "--search-root", str(HERE.top), "bench.chunks", *words)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)

    first, columns = done.stderr.splitlines()
    assert first == f"a prompt of 12000 tokens, {title}"
    assert columns.split() == ["q_len", "kv_len"]
    assert done.stdout.splitlines()[-1].split()[1] == "12000"
    assert all(len(line.split()) == 2 for line in done.stdout.splitlines())
