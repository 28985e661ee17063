"""Tasks about measuring the service: `./inv bench.run`, `./inv bench.compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invoke import Context

from deploy.console import say, show_json, task

if TYPE_CHECKING:
    from deploy.gates import Visit


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
        # On stderr: scripts take the columns from stdout.
        say(serving.chunk_title(manifest, prompt, budget=budget, cached=cached))
        say(f"{'q_len':>7} {'kv_len':>7}")
        print("\n".join(f"{chunk.q_len:>7} {chunk.kv_len:>7}" for chunk in plan))
    return 0


_STAMP = "which run, as its start printed it (default: the newest)"
_BASELINE = "a record of the same buckets to hold it against (what bench.collect wrote)"


@task(
    example="./inv bench.run -n NAME -t ssh:ALIAS --buckets 8-16K --requests 5 --follow",
    help={
        "buckets": "buckets of the manifest, by comma (default: all)",
        "requests": "fewer than the lock's are an observation, never comparable (default: its own)",
        "warm": "make the warm round first (--no-warm: an observation)",
        "follow": "pass on its lines until it has ended, then collect and judge it",
        "baseline": _BASELINE,
    },
)
def run(
    _: Context, name: str = "", to: str = "", buckets: str = "", requests: int = 0,
    warm: bool = True, follow: bool = False, baseline: str = "", json: bool = False,
) -> int:  # fmt: skip
    """Measure the running service: gates, warm round, counted round; detached on each target."""
    from deploy import measuring
    from deploy.errors import worst

    options = {
        "buckets": [b.strip() for b in buckets.split(",") if b.strip()],
        "requests": requests,
        "warm": warm,
    }
    visits = measuring.start(name, to, "bench", options)
    code = worst(visit.exit for visit in visits)
    if code or not follow:
        return _show(visits, json=json)
    measuring.status(name, to, "bench", follow=True)
    return _collect(name, to, "", baseline, json=json)


@task(
    example="./inv bench.status -n NAME -t ssh:ALIAS --follow",
    help={"stamp": _STAMP, "follow": "pass on its lines until it has ended"},
)
def status(
    _: Context, name: str = "", to: str = "", stamp: str = "", follow: bool = False,
    json: bool = False,
) -> int:  # fmt: skip
    """Say how far each target's run is. Changes nothing."""
    from deploy import measuring

    return _show(measuring.status(name, to, "bench", stamp=stamp, follow=follow), json=json)


@task(example="./inv bench.stop -n NAME -t ssh:ALIAS", help={"stamp": _STAMP})
def stop(_: Context, name: str = "", to: str = "", stamp: str = "", json: bool = False) -> int:
    """Ask a run to end, and its client with it; the service stays."""
    from deploy import measuring

    return _show(measuring.status(name, to, "bench", stamp=stamp, act="stop"), json=json)


@task(
    example="./inv bench.collect -n NAME -t ssh:ALIAS --baseline FILE",
    help={"stamp": _STAMP, "baseline": _BASELINE},
)
def collect(
    _: Context, name: str = "", to: str = "", stamp: str = "", baseline: str = "",
    json: bool = False,
) -> int:  # fmt: skip
    """Fetch the record of a run into out/NAME/bench/ and judge all seven gates."""
    return _collect(name, to, stamp, baseline, json=json)


@task(
    example="./inv bench.compare --base docs/samples/base.json"
    " --candidate docs/samples/candidate.json",
    help={
        "base": "records of the baseline, by comma, in the order they were made",
        "candidate": "as many of the candidate, made in turns with the others",
        "accuracy_base": "the baseline's accuracy: a table, or a record of bench.accuracy",
        "accuracy_candidate": "the same of the candidate",
    },
)
def compare(
    _: Context, base: str = "", candidate: str = "", accuracy_base: str = "",
    accuracy_candidate: str = "", json: bool = False,
) -> int:  # fmt: skip
    """Say what is proven: gain, noise, loss, per bucket; exit 10 on a regression or lost marks."""
    from deploy import figures, measuring
    from deploy.agent.words import Exit

    factor = measuring.factor(accuracy_base, accuracy_candidate)
    found = measuring.compared(measuring.paths(base), measuring.paths(candidate), factor)
    if json:
        show_json(found.to_json())
    else:
        print(figures.comparison_text(found))
    good = found.comparable and not found.regressions and (factor is None or factor >= 1)
    return Exit.OK if good else Exit.DIFFERS


@task(
    example="./inv bench.accuracy --base docs/samples/base-accuracy.md"
    " --candidate docs/samples/candidate-accuracy.md",
    help={
        "script": "run this run_accuracy.sh of the target, detached",
        "words": "its words, by comma: a task, a number of rows",
        "collect": "fetch the newest run's tables into out/NAME/accuracy.json",
        "base": "a table of the suite, or a record: the baseline's",
        "candidate": "the same of the candidate",
    },
)
def accuracy(
    _: Context, name: str = "", to: str = "", script: str = "", words: str = "",
    collect: bool = False, base: str = "", candidate: str = "", json: bool = False,
) -> int:  # fmt: skip
    """Run, collect or compare the accuracy suite, task by task; only a run's own output counts."""
    from deploy import figures, measuring
    from deploy.agent.words import Exit
    from deploy.errors import BadValues

    if script:
        options = {"script": script, "words": [w.strip() for w in words.split(",") if w.strip()]}
        return _show(measuring.start(name, to, "accuracy", options), json=json)
    if collect:
        return _show(measuring.collect_accuracy(name, to), json=json)
    if not (base and candidate):
        raise BadValues(
            "there is nothing to compare",
            why=f"--base is {base or 'not given'}, --candidate is {candidate or 'not given'}",
            fix="give both; or --script to run the suite, or --collect to fetch a run's tables",
        )
    found = measuring.accuracies(base, candidate)
    if json:
        show_json(found.to_json())
    else:
        print(figures.accuracy_text(found))
    return Exit.OK if found.factor is not None and found.factor >= 1 else Exit.DIFFERS


def _collect(name: str, to: str, stamp: str, baseline: str, *, json: bool) -> int:
    from deploy import measuring

    kept = measuring.collect(name, to, stamp=stamp, baseline=baseline)
    if not json:
        for _, path in kept:
            if path.name:
                print(path)
    return _show([visit for visit, _ in kept], json=json)


def _show(visits: list[Visit], *, json: bool) -> int:
    from deploy import figures, report
    from deploy.errors import worst

    if json:
        show_json(report.visits_json(visits))
        return worst(visit.exit for visit in visits)
    for visit in visits:
        found = visit.evidence.raw.get("measure") if visit.evidence else None
        if found:
            print(figures.job_text(visit.target, found))
        if not found or visit.error is not None:
            print(report.visit_text(visit))
        elif visit.gates:
            print(report.judged_text(visit))
    return worst(visit.exit for visit in visits)
