"""One report of a submission: JSON is the document itself; Markdown and one HTML page show it.

`document` gathers, `markdown` and `html` render; all three are pure. The page is one file that
loads nothing: styles, pictures and tables are in it. What was not looked at is said to be so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from deploy.agent.words import Verb, printable
from deploy.figures import stop_here
from deploy.gates import NOT_PROVEN
from deploy.measure.compare import Comparison
from deploy.measure.profile import Profile, hot_spot
from deploy.measure.record import Run

SCHEMA = "report/1"
_TEMPLATES = Path(__file__).with_name("templates")
_STATES = {"passed": "good", "failed": "bad"}
_CLAIMS = {"gain": "good", "loss": "bad", "possible loss": "bad"}
_BAR = 420.0  # width of the longest bar
_LINK = 68  # height of one link of the chain


def document(
    *,
    name: str,
    identities: Mapping[str, str],
    evidence: Mapping[str, Any] | None,
    environment: Sequence[Mapping[str, str]],
    gates: Sequence[Mapping[str, Any]] | None = None,
    run: Run | None = None,
    left_out: Sequence[str] = (),
    comparison: Comparison | None = None,
    profile: Profile | None = None,
    before: Profile | None = None,
) -> dict[str, Any]:
    """Gather what is known into one value; a part that nobody looked at is None.

    `identities` are the lock's; `evidence` is what a verify left (evidence/1 with source and
    gates); `gates` are those with a measured run's, which never stands for itself; `left_out` are
    runs that are of something else, and why.
    """
    told = dict(evidence or {})
    gates = told.get("gates") or () if gates is None else gates
    return {
        "schema": SCHEMA,
        "name": name,
        "target": told.get("target") or (run.raw.get("target") if run else "") or "",
        "identities": dict(identities),
        "gates": [dict(gate) for gate in gates],
        "known": known(told) if told else "",
        "source": told.get("source"),
        "tree": told.get("tree", ""),
        "files": [{"path": row["path"], "state": row["state"]} for row in told.get("files") or ()],
        "extensions": list(told.get("extensions") or ()),
        "origin": told.get("origin") or {},
        "environment": [dict(row) for row in environment],
        "process": _process(run) if run else None,
        "markers": list(_markers(run)) if run else None,
        "bench": comparison.to_json() if comparison else _alone(run),
        "profile": profile.to_json() if profile else None,
        "profile_before": before.to_json() if before else None,
        "profile_texts": _texts(profile, before) if profile else [],
        "left_out": list(left_out),
        "not_proven": [
            *_limits(gates, comparison, profile),
            *(f"anything by {text}" for text in left_out),
        ],
    }


def html(found: Mapping[str, Any]) -> str:
    """Return the page. Every text of it is escaped: names and logs are somebody else's words."""
    view = {
        "name": found["name"],
        "target": found["target"],
        "outcome": _outcome(found["gates"]),
        "headline": headline(found),
        "known": found["known"],
        "chain": _chain(found),
        "chain_height": _LINK * len(_links(found)) + 4,
        "gates": [{**gate, "state": _STATES.get(gate["verdict"], "")} for gate in found["gates"]],
        "bench": _bench(found["bench"]),
        "markers": [_marker(row) for row in found["markers"] or ()],
        "profile": _profile(found),
        "process": found["process"],
        "environment": found["environment"],
        "kernels": [_extension(row) for row in found["extensions"]],
        "paths": _paths(found),
        "not_proven": found["not_proven"],
    }
    return _environment().get_template("report.html.j2").render(view)


def markdown(found: Mapping[str, Any]) -> str:
    """Return the same as text that a code host shows as tables."""
    lines = [f"# {_cell(found['name'])}", "", _cell(headline(found)), ""]
    lines += [_cell(found["known"]), ""] if found["known"] else []
    lines += ["## Gates", ""]
    lines += _table(
        ("gate", "proves", "verdict", "on what it rests"),
        (
            (str(g["gate"]), g["name"], g["verdict"],
             "; ".join([g["reason"], *g["faults"], *g["proofs"][:3]]).strip("; "))
            for g in found["gates"]
        ),
    )  # fmt: skip
    lines += ["", "## Identities", ""]
    lines += _table(
        ("link", "value", "proof"),
        ((one["name"], one["full"], one["proof"]) for one in _links(found)),
    )
    for row in (found["bench"] or {}).get("buckets", ()):
        lines += ["", f"## {_cell(row['bucket'])}", "", _cell(_bucket(row)["summary"]), ""]
        lines += [f"- {_cell(text)}" for text in (*row["faults"], *row["notes"])]
        if row["metrics"]:
            lines += ["", *_table(("", "baseline ms", "candidate ms"), (
                (m["name"], f"{m['base_ms']:.2f}", f"{m['candidate_ms']:.2f}")
                for m in row["metrics"]
            ))]  # fmt: skip
    if found["profile"]:
        lines += ["", "## Profile", ""]
        lines += _table(("class", "calls", "total ms", "share"), (
            (row["name"], str(row["calls"]), f"{row['total_ns'] / 1e6:.3f}", f"{row['share']:.1%}")
            for row in found["profile"]["classes"]
        ))  # fmt: skip
        lines += ["", *(_cell(text) for text in found["profile_texts"])]
    lines += ["", "## Environment", ""]
    lines += _table(
        ("name", "value", "why"),
        ((row["name"], row["value"], row["why"]) for row in found["environment"]),
    )
    lines += ["", "## What this does not prove", ""]
    lines += [f"- {_cell(text)}" for text in found["not_proven"]]
    return "\n".join(lines) + "\n"


def headline(found: Mapping[str, Any]) -> str:
    """Say in one sentence how far the proof goes."""
    gates = found["gates"]
    failed = [gate for gate in gates if gate["verdict"] == "failed"]
    if failed:
        return f"Gate {failed[0]['gate']} failed ({failed[0]['name']}): nothing after it is proven."
    passed = [gate["gate"] for gate in gates if gate["verdict"] == "passed"]
    if not passed:
        return "Nothing was verified yet."
    open_ = [gate for gate in gates if gate["verdict"] == "not reached"]
    done = f"Gate{'s' if passed[1:] else ''} {', '.join(map(str, passed))}"
    if open_:
        return f"{done} passed; not reached from gate {open_[0]['gate']} on."
    return f"{done} passed: what was measured is what was edited."


def known(evidence: Mapping[str, Any]) -> str:
    """Say since when a target is known to be as it is told of: evidence is of one moment."""
    target = evidence.get("target") or "the target"
    time = (evidence.get("incidental") or {}).get("time") or "a time that is not known"
    if evidence.get("verb") == Verb.RESTORE.value:
        return f"{target} was restored at {time}, and not verified since."
    return f"{target} was verified at {time}."


# --- what the document holds ----------------------------------------------------------------------


def _process(run: Run) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    rounds = [one for bucket in run.buckets.values() for one in bucket.rounds]
    states = [one.raw["after"] for one in rounds if one.raw.get("after")]
    if states:
        last = states[-1]
        listeners = ", ".join(f"{r['address']}:{r['port']}" for r in last.get("listeners") or ())
        rows += [
            {
                "name": "server",
                "value": f"pid {last['pid']}, started at tick {last['start_ticks']}",
            },
            {"name": "processes", "value": ", ".join(map(str, last.get("members") or ()))},
            {"name": "listens on", "value": listeners or "nothing"},
        ]
        rows += [
            {"name": "mapped", "value": f"{row['path']} ({row['state']}, inode {row['inode']})"}
            for row in last.get("mapped") or ()
        ]
    versions = ", ".join(f"{k} {v}" for k, v in sorted(run.versions.items()))
    cleared = ", ".join(run.raw.get("cleared") or ()) or "none"
    rows.append({"name": "versions", "value": versions or "not known"})
    rows.append({"name": "client's flags", "value": " ".join(run.flags) or "none"})
    rows.append({"name": "cleared for the client", "value": cleared})
    return rows


def _markers(run: Run) -> Iterator[dict[str, Any]]:
    """Each marker of the service by shape, round for round, and whether the plan has its length."""
    proofs = [p for gate in run.raw.get("gates") or () if gate["gate"] == 6 for p in gate["proofs"]]
    for bucket in run.buckets.values():
        for one in bucket.rounds:
            scan = one.raw.get("markers") or {}
            for row in scan.get("markers") or ():
                if row["pid"] in scan["pids"] and (row["window"] or row["before"]):
                    start = f"{bucket.name}, {one.name} round: ({row['shape'][0]}, "
                    yield {
                        "round": f"{bucket.name}, {one.name}",
                        "shape": row["shape"],
                        "dtype": row["dtype"],
                        "selected": row["selected"],
                        "window": row["window"],
                        "before": row["before"],
                        "planned": any(proof.startswith(start) for proof in proofs),
                    }


def _alone(run: Run | None) -> dict[str, Any] | None:
    """A run without a baseline: its own figures, and that nothing follows from them."""
    if run is None:
        return None
    rows = [
        {
            "bucket": bucket.name, "comparable": False, "claim": None, "metrics": [],
            "faults": [], "notes": ["no baseline was named: nothing is compared"],
            "base_tok_s": 0.0,
            "candidate_tok_s": bucket.result.throughput if bucket.result else 0.0,
            "requests": bucket.requests,
        }
        for bucket in run.buckets.values()
    ]  # fmt: skip
    return {"schema": "comparison/1", "buckets": rows, "score": None, "comparable": False}


def _texts(profile: Profile, before: Profile | None) -> list[str]:
    texts = [stop_here(profile).strip(), *profile.notes]
    return [hot_spot(before, profile), *texts] if before else texts


def _limits(
    gates: Sequence[Mapping[str, Any]], comparison: Comparison | None, profile: Profile | None
) -> Iterator[str]:
    for gate in gates:
        if gate["verdict"] == "not applicable":
            yield f"gate {gate['gate']} ({gate['name']}): not applicable, {gate['reason']}"
        elif gate["verdict"] in ("not reached", "failed"):
            yield f"gate {gate['gate']} ({gate['name']}): {gate['verdict']}"
    yield (
        NOT_PROVEN[0]
        if comparison is None or comparison.coefficient is None
        else ("that the accuracy of tasks outside the suite stayed")
    )
    if comparison is None:
        yield NOT_PROVEN[1]
    else:
        for row in comparison.rows:
            if row.claim and row.claim.verdict.value != "gain":
                yield f"that {row.bucket} became faster: {row.claim.verdict.value}"
    if profile is None:
        yield "where the time goes (run profile.run)"
    yield "anything about requests that were not sent"


# --- how the page shows it ------------------------------------------------------------------------


def _links(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """The chain from source to dispatch: each link's identity, and the proof that carries it on."""
    ids = found["identities"]
    gate = {row["gate"]: row for row in found["gates"]}
    files = found["files"]
    same = sum(row["state"] == "ok" for row in files)
    process = next((r["value"] for r in found["process"] or () if r["name"] == "server"), "")
    hits = sum(row["window"] for row in found["markers"] or () if row["selected"])
    rows = (
        ("edited source", ids.get("head", ""), 1, "every path of base..head is classed"),
        ("lock: inputs", ids.get("inputs", ""), 1, "commits, contents and base are pinned"),
        ("plan", ids.get("plan", ""), 1, "the same for every target"),
        ("bundle", ids.get("bundle", ""), 1, "self-contained, deterministic"),
        ("installed tree", found["tree"], 1, f"{same} of {len(files)} files read back and equal"),
        ("registered ops", "", 4, f"{len(found['extensions'])} extensions loaded and asked"),
        ("serving process", process, 5, "one server, mapping the installed files"),
        (
            "dispatch",
            f"{hits} selected" if hits else "",
            6,
            "markers of this process in its window",
        ),
        ("measured result", "", 7, "equal to the baseline in all that must be equal"),
    )
    return [_link(*row, gate.get(row[2])) for row in rows]


def _link(
    name: str, value: str, number: int, proof: str, gate: Mapping[str, Any] | None
) -> dict[str, str]:
    verdict = gate["verdict"] if gate else "not reached"
    state = _STATES.get(verdict, "")
    if state != "good":
        proof = f"gate {number}: {verdict}" + (f", {gate['reason']}" if gate and gate["reason"]
                                               else "")  # fmt: skip
    short = f"{value[:16]}…" if len(value) in (40, 64) else value
    return {"name": name, "value": short, "full": value, "proof": proof, "state": state}


def _chain(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**link, "y": 2 + _LINK * n} for n, link in enumerate(_links(found))]


def _outcome(gates: Sequence[Mapping[str, Any]]) -> str:
    counts = {v: sum(g["verdict"] == v for g in gates) for v in ("passed", "failed", "not reached")}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def _bench(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not found:
        return None
    score = found["score"]
    unproven = found.get("unproven") or ()
    return {"buckets": [_bucket(row) for row in found["buckets"]],
            "score": _score(score, unproven) if score else None}  # fmt: skip


def _score(found: Mapping[str, Any], unproven: Sequence[str]) -> dict[str, Any]:
    notes = []
    if "final" in found:
        notes.append(f"x {found['coefficient']:.4f} accuracy = {found['final']:.4f}")
    if seen := [row["bucket"] for row in found["rows"] if row["bucket"] in unproven]:
        notes.append(f"of what was seen: the change of {', '.join(seen)} is not shown")
    if found["missing"]:
        notes.append(f"not measured: {', '.join(found['missing'])}")
    return {
        "rows": [
            {**row, "gain": f"{row['gain']:+.4f}", "points": f"{row['points']:.4f}"}
            for row in found["rows"]
        ],
        "total": f"{found['total']:.4f}",
        "note": "; ".join(notes),
    }


def _bucket(row: Mapping[str, Any]) -> dict[str, Any]:
    claim = row["claim"]
    verdict = claim["verdict"] if claim else "not comparable"
    rates = row["base_tok_s"], row["candidate_tok_s"]
    longest = max(*rates, 1e-9)
    forest = [*_forest_rows(row)]
    widest = max([0.01, *(abs(v) for item in forest for v in item["values"])]) * 1.1
    return {
        "bucket": row["bucket"],
        "verdict": verdict,
        "state": _CLAIMS.get(verdict, "" if claim or not row["faults"] else "bad"),
        "summary": _summary(row, claim),
        "faults": row["faults"],
        "notes": row["notes"],
        "base": f"{rates[0]:.3f}",
        "candidate": f"{rates[1]:.3f}",
        "base_width": round(_BAR * rates[0] / longest, 1),
        "candidate_width": round(_BAR * rates[1] / longest, 1),
        "metrics": [_metric(metric) for metric in row["metrics"]],
        "forest": [_forest(item, n, widest) for n, item in enumerate(forest)],
        "forest_height": 28 * len(forest) + 34,
        "zero": 330,
    }


def _summary(row: Mapping[str, Any], claim: Mapping[str, Any] | None) -> str:
    rates = f"{row['base_tok_s']:.3f} → {row['candidate_tok_s']:.3f} tok/s"
    if not claim:
        return f"{rates}; no gain and no loss follows from it."
    interval = claim["interval"]
    low_high = (
        f", 95 % between {interval['low']:+.2%} and {interval['high']:+.2%}" if interval else ""
    )
    pairs = f"{claim['pairs']} pair" + "s" * (claim["pairs"] != 1)
    return f"{rates}: {claim['change']:+.2%}{low_high}; {pairs}. {claim['why'].capitalize()}."


def _forest_rows(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    claim = row["claim"]
    if claim and claim["interval"]:
        yield {"name": "throughput", "values": _values(claim["interval"])}
    for metric in row["metrics"]:
        if metric["change"]:
            yield {"name": metric["name"], "values": _values(metric["change"])}


def _values(found: Mapping[str, float]) -> tuple[float, float, float]:
    return found["value"], found["low"], found["high"]


def _forest(item: Mapping[str, Any], number: int, widest: float) -> dict[str, Any]:
    at, low, high = (round(330 + 130 * v / widest, 1) for v in item["values"])
    value, below, above = item["values"]
    return {
        "name": item["name"], "y": 18 + 28 * number, "at": at, "low": low, "high": high,
        "label": f"{value:+.2%} ({below:+.2%} to {above:+.2%})",
    }  # fmt: skip


def _metric(found: Mapping[str, Any]) -> dict[str, str]:
    base, candidate = found["base_ms"], found["candidate_ms"]
    change = f"{candidate / base - 1:+.2%}" if base else ""
    return {"name": found["name"], "base": f"{base:.2f}", "candidate": f"{candidate:.2f}",
            "change": change}  # fmt: skip


def _marker(row: Mapping[str, Any]) -> dict[str, Any]:
    shape = f"({', '.join(map(str, row['shape']))})"
    planned = "planned" if row["planned"] else "not asked for"
    return {**row, "shape": shape, "planned": planned, "state": "good" if row["planned"] else ""}


def _profile(found: Mapping[str, Any]) -> dict[str, Any] | None:
    after, before = found["profile"], found["profile_before"]
    if not after:
        return None
    older = {row["name"]: row["total_ns"] for row in (before or {}).get("classes", ())}
    names = [row["name"] for row in after["classes"]]
    gone = [name for name in older if name not in names]
    times = {row["name"]: row["total_ns"] for row in after["classes"]}
    longest = max(*times.values(), *older.values(), 1)
    step = 30 if before else 26
    rows = []
    for number, name in enumerate([*names, *gone]):
        now, was = times.get(name, 0), older.get(name, 0)
        share = now / after["total_ns"] if after["total_ns"] else 0.0
        width = round(_BAR * now / longest, 1)
        before_width = round(_BAR * was / longest, 1)
        rows.append({
            "name": name, "y": 4 + step * number, "width": width, "before_width": before_width,
            "label_x": 198 + max(width, before_width), "label": f"{share:.1%}",
        })  # fmt: skip
    table = [
        {"name": row["name"], "kernels": row["kernels"], "calls": row["calls"],
         "total": f"{row['total_ns'] / 1e6:.3f}", "share": f"{row['share']:.1%}",
         "worth": f"{0.1 * row['share']:.2%}"}
        for row in after["classes"]
    ]  # fmt: skip
    texts = found["profile_texts"]
    return {
        "two": bool(before), "rows": rows, "height": step * len(rows) + 8, "table": table,
        "summary": f"{after['kernels']} kernels, {after['calls']} calls,"
                   f" {after['total_ns'] / 1e6:.3f} ms of kernel time",
        "stop": ". ".join(texts),
    }  # fmt: skip


def _extension(row: Mapping[str, Any]) -> dict[str, str]:
    return {"name": str(row.get("module", "")), "state": str(row.get("state", "")),
            "sha256": str(row.get("sha256", ""))}  # fmt: skip


def _paths(found: Mapping[str, Any]) -> list[dict[str, str]]:
    states = {row["path"]: row["state"] for row in found["files"]}
    rows = []
    for row in (found["source"] or {}).get("paths", ()):
        state = states.get(row["path"], "not installed")
        mark = "good" if state == "ok" else "" if state == "not installed" else "bad"
        rows.append({**row, "state": state, "mark": mark})
    return rows


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _table(head: Sequence[str], rows: Any) -> list[str]:
    lines = [" | ".join(["", *map(_cell, head), ""]).strip(), "|" + "---|" * len(head)]
    return lines + [" | ".join(["", *map(_cell, row), ""]).strip() for row in rows]


def _cell(text: str) -> str:
    """One cell of a Markdown table that shows a text as it is."""
    marked = printable(str(text))
    for mark in "\\`*_<>[]|#":
        marked = marked.replace(mark, "\\" + mark)
    return marked


__all__ = ["document", "headline", "html", "markdown"]
