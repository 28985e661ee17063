"""Tasks about profiles: `./inv profile.run`, `./inv profile.summary`."""

from __future__ import annotations

from invoke import Context

from deploy.console import show_json, task
from deploy.tasks.bench import _show


@task(
    example="./inv profile.run -n NAME -t ssh:ALIAS --follow",
    help={
        "buckets": "which requests to record, by comma (default: every bucket of the manifest)",
        "follow": "pass on its lines until the tables are written",
    },
)
def run(
    _: Context, name: str = "", to: str = "", buckets: str = "", follow: bool = False,
    json: bool = False,
) -> int:  # fmt: skip
    """Profile the service below the profiler: warm round, recorded round, tables; detached."""
    from deploy import measuring
    from deploy.errors import worst

    options = {"words": measuring.profile_words(name, buckets)}
    visits = measuring.start(name, to, "profile", options)
    code = worst(visit.exit for visit in visits)
    if code or not follow:
        return _show(visits, json=json)
    return _show(measuring.status(name, to, "profile", follow=True, record=True), json=json)


@task(
    example="./inv profile.status -n NAME -t ssh:ALIAS --follow",
    help={"follow": "pass on its lines until the tables are written"},
)
def status(
    _: Context, name: str = "", to: str = "", follow: bool = False, json: bool = False
) -> int:
    """Say how far each target's profile is; the table's place when it is done."""
    from deploy import measuring

    return _show(measuring.status(name, to, "profile", follow=follow, record=True), json=json)


@task(
    example="./inv profile.summary -n example --file docs/samples/candidate.hipkernel.csv"
    " --before docs/samples/base.hipkernel.csv",
    help={
        "file": "the profiler's *.hipkernel.csv, or its *.db",
        "before": "another one: where did the time go?",
        "top": "how many of the longest kernels to show: 1 to 20",
    },
)
def summary(
    _: Context, name: str = "", file: str = "", before: str = "", top: int = 10,
    json: bool = False,
) -> int:  # fmt: skip
    """Group kernels into the manifest's classes: time, share, bars, and what is left to gain."""
    from deploy import figures, measuring
    from deploy.errors import BadValues
    from deploy.measure.profile import TOP

    if not 1 <= top <= TOP:
        raise BadValues(
            f"--top {top} cannot be shown",
            why=f"a profile keeps its {TOP} longest kernels",
            fix=f"give a number from 1 to {TOP}; --json shows all of them",
        )
    after, older = measuring.profiles(name, file, before)
    if json:
        found = after.to_json()
        show_json({**found, "before": older.to_json() if older else None})
        return 0
    print(figures.profile_text(after, top=top))
    if older is not None:
        print(f"\n{figures.changes_text(older, after)}")
    return 0
