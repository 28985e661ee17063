"""Tasks about measuring the service: `./inv bench.chunks`."""

from __future__ import annotations

from invoke import Context

from deploy.console import show_json, task


@task(
    example="./inv bench.chunks --prompt 12000",
    help={
        "prompt": "tokens of the prompt, the chat template's included",
        "budget": "max_num_batched_tokens (default: the launch's, else vLLM's 2048)",
        "block": "the attention block of a hybrid model whose prefix is cached, for instance 784",
        "cached": "tokens that the prefix cache already has",
        "again": "the prompt is sent a second time with prefix caching, in blocks of this size",
    },
)
def chunks(
    _: Context, name: str = "", prompt: int = 12000, budget: int = 0, block: int = 0,
    cached: int = 0, again: int = 0, json: bool = False,
) -> int:  # fmt: skip
    """Print the (q_len, kv_len) of every step in which vLLM computes a lone prompt."""
    from deploy import serving, submission
    from deploy.layout import HERE
    from deploy.service.chunks import found_again

    manifest = submission.load(name, HERE) if name or not budget else None
    cached = found_again(prompt, again) if again else cached
    plan = serving.chunk_plan(manifest, prompt, budget=budget, align=block, cached=cached)
    if json:
        show_json({"schema": "chunks/1", "prompt": prompt, "chunks": [list(c) for c in plan]})
    else:
        print("\n".join(f"{chunk.q_len:>7} {chunk.kv_len:>7}" for chunk in plan))
    return 0
