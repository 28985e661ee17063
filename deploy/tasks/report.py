"""The tasks that hand in: report, check-submission. Gathered by tasks.py."""

from __future__ import annotations

from invoke import Context

from deploy.console import say, show_json, task


@task(
    name="report",
    example="./inv report -n demo",
    help={
        "run": "records of the candidate, by comma (default: the newest that was collected)",
        "base": "as many records of the baseline, by comma",
        "profile": "the profiler's *.hipkernel.csv, or its *.db",
        "before": "the baseline's profile, in either form",
        "accuracy_base": "a table of the accuracy suite, or a record: the baseline's",
        "accuracy_candidate": "the same of the candidate",
        "to": "report on this target, as report-TARGET.*, instead of on the one last verified",
        "out": "where to write (default: out/NAME)",
    },
)
def write_report(
    _: Context, name: str = "", to: str = "", run: str = "", base: str = "", profile: str = "",
    before: str = "", accuracy_base: str = "", accuracy_candidate: str = "", out: str = "",
    json: bool = False,
) -> int:  # fmt: skip
    """Write the evidence as JSON, Markdown and one self-contained HTML page."""
    from deploy import page, reporting
    from deploy.agent.words import printable

    found, paths = reporting.write(
        name, to=to, run=run, base=base, profile=profile, before=before,
        accuracy_base=accuracy_base, accuracy_candidate=accuracy_candidate, out=out,
    )  # fmt: skip
    if json:
        show_json(found)
    else:
        print("\n".join(filter(None, [page.headline(found), printable(found["known"])])))
        print("\n".join(f"  {path}" for path in paths))
    return 0


@task(
    name="check-submission",
    example="./inv check-submission -n demo",
    help={
        "file": "a bundle, or the folder that is handed in (default: this folder where a bundle"
        " lies in it, else the newest bundle of -n below out/)"
    },
)
def check_submission(_: Context, name: str = "", file: str = "", json: bool = False) -> int:
    """Check everything about a submission that needs no card: one table. Changes nothing."""
    from pathlib import Path

    from deploy import inspection
    from deploy.agent.words import Exit
    from deploy.report import table

    path = Path(file) if file else inspection.chosen(name)
    if not file:
        say(f"checking {path.resolve()}")
    rows = inspection.inspect(path)
    if json:
        show_json({"schema": "inspection/1", "checks": [row._asdict() for row in rows]})
    else:
        print(table([(row.state, row.what, row.found) for row in rows], ""))
    return Exit.DIFFERS if any(row.state == "FAILED" for row in rows) else Exit.OK
