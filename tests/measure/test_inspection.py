"""What an organiser checks without a card: whole bundles, and each fault planted alone."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle as bundles
from deploy import inspection, scripts
from deploy import manifest as manifests
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.agent.words import digest
from deploy.bundle import Sink
from deploy.errors import BadValues
from deploy.layout import HERE, Layout
from tests.measure.test_bench_compare import FLAGS, raw_run

FIXTURES = Path(__file__).parent / "fixtures"
MANIFEST = """schema: 1
name: t
base: {python: /usr/bin/python3, site: /s, image: "r/vllm:1"}
source: {git: /somewhere, base: "1111111111111111111111111111111111111111",
         head: "2222222222222222222222222222222222222222", package: vllm}
overlay: {include: ["vllm/**"], ignore: {"tests/**": not installed}}
launch: {dir: /root/submission, port: 8001, serve: {max-num-seqs: 128, trust-remote-code: },
         env: {VLLM_DCU: {value: 1, why: turns it on}}, ready: 10m,
         container: {shm_size: 3G, mounts: [{source: /a, target: /b, read_only: yes}]}}
model: {path: /m, served_name: m}
bench:
  buckets:
    4-8K: {dataset: /d/a.jsonl, sha256: "HASH", requests: 50}
    8-16K: {dataset: /d/b.jsonl, sha256: "HASH", requests: 50}
    16-32K: {dataset: /d/c.jsonl, sha256: "HASH", requests: 50}
""".replace("HASH", "a" * 64)
# What the run of the fixtures sent.
FIVE = MANIFEST.replace("requests: 50", "requests: 5") + f"  flags: {json.dumps(FLAGS)}\n"
EVIDENCE = "evidence answers this bundle's plan"
RESULT = "bench.json is a result"
KERNELS = "kernels: {preset: p, arch: gfx936, extensions: {_rocm_C: {ops: [LLMM1]}}}\n"
MODULE = {"path": "vllm/a.py", "class": "overlay", "reason": "vllm/**"}
KERNEL = {"path": "csrc/a.cu", "class": "kernel", "reason": "csrc/**"}


def commanded(words: str) -> str:
    return MANIFEST.replace("launch: {", f"launch: {{command: [{words}], ")


def make(
    folder: Path, *, body: bytes = b"V = 1\n", path: str = "vllm/a.py", text: str = MANIFEST,
    files: list[dict[str, Any]] | None = None, role: str = "module",
) -> Path:  # fmt: skip
    manifest = manifests.parse(text, "t")
    want = State(type="file", mode="0644", sha256=hashlib.sha256(body).hexdigest(), size=len(body))
    entry = PlannedFile(path=path, role=role, want=want, assume=(ABSENT,))
    plan = Plan(name="t", package="vllm", python="/usr/bin/python3", site="/s", files=(entry,))
    rows = [{"path": path, "class": "overlay", "reason": "vllm/**"}] if files is None else files

    def fill(wanted: Iterator[tuple[str, Sink]]) -> None:
        for _, sink in wanted:
            sink.write(body)

    rendered = scripts.on_target(manifest)
    inputs = {"manifest": manifest.meaning(), "files": rows, "scripts": scripts.pinned(rendered)}
    texts = {one.name: one.data for one in rendered}
    return bundles.pack(plan, inputs, fill, folder, scripts=texts).path


def failed(path: Path) -> list[str]:
    return [row.found for row in inspection.inspect(path) if row.state == inspection.FAILED]


def test_a_whole_bundle_passes_every_check(tmp_path: Path) -> None:
    rows = inspection.inspect(make(tmp_path))

    assert [row.state for row in rows] == ["ok"] * len(rows), rows
    assert len(rows) == 9


def test_a_manifest_made_from_the_example_passes_every_check(tmp_path: Path) -> None:
    text = HERE.manifest("example").read_text("utf-8").replace("name: example", "name: t")

    rows = inspection.inspect(make(tmp_path, text=text))

    assert [row.state for row in rows] == ["ok"] * len(rows), rows


def test_the_manifest_of_a_bundle_is_the_one_it_was_made_from(tmp_path: Path) -> None:
    made = bundles.read(make(tmp_path))

    assert inspection.manifest_of(made).meaning() == manifests.parse(MANIFEST, "t").meaning()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"body": b"def broken(:\n"}, "vllm/a.py: invalid syntax"),
        ({"path": "vllm/v1/core/sched/scheduler.py"}, "the rules lock the scheduler's code"),
        ({"files": []}, "vllm/a.py: in the plan, and no path of the difference"),
        ({"files": [{"path": "vllm/a.py", "class": "overlay", "reason": "x"},
                    {"path": "vllm/b.py", "class": "overlay", "reason": "x"}]},
         "vllm/b.py: to be installed, and not in the plan"),
        ({"files": [{"path": "vllm/a.py", "class": "overlay", "reason": "x"},
                    {"path": "tests/b.py", "class": "ignored", "reason": ""}]},
         "tests/b.py: ignored without a reason"),
        ({"text": MANIFEST.replace("trust-remote-code:", "speculative-config: x")},
         "--speculative-config: speculative decoding is not allowed"),
        ({"body": b"x = a" + b".a" * 100_000 + b"\n"}, "vllm/a.py: it is nested too deeply"),
        ({"body": b"x = 1" + b"+1" * 200_000 + b"\n"}, "vllm/a.py: it is nested too deeply"),
        ({"body": b"x = " + b"-" * 100_000 + b"1\n"}, "vllm/a.py: it is nested too deeply"),
        ({"text": MANIFEST.replace("trust-remote-code:", "load-format: gguf")},
         "--load-format: quantised weights is not allowed"),
        ({"text": commanded("vllm, serve, --speculative-config, x")},
         "--speculative-config: speculative decoding is not allowed"),
        ({"text": commanded("env, VLLM_DCU=2, vllm, serve")},
         "VLLM_DCU is set by launch.command, and has no reason"),
        ({"text": MANIFEST.replace("trust-remote-code:", "quantization: fp8")},
         "--quantization: quantised weights is not allowed"),
        ({"text": "\n".join(line for line in MANIFEST.splitlines() if "16-32K" not in line)},
         "the official bucket 16-32K is missing"),
        ({"path": "vllm/_rocm_C.abi3.so", "role": "extension", "files": []},
         "it installs compiled files, and its manifest says nothing of kernels"),
        ({"files": [MODULE, KERNEL], "text": MANIFEST + KERNELS},
         "csrc/a.cu changed, and no extension is carried"),
        ({"files": [MODULE, KERNEL]}, "csrc/a.cu changed, and no extension is carried"),
    ],
)  # fmt: skip
def test_each_planted_fault_is_found_alone(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    found = failed(make(tmp_path, **change))

    assert len(found) == 1, found
    assert why in found[0]


def test_a_kernel_that_is_left_out_for_a_reason_is_a_note_with_it(tmp_path: Path) -> None:
    waived = MANIFEST + 'gates: {not_applicable: {"2": the base has no card}}\n'

    rows = inspection.inspect(make(tmp_path, text=waived, files=[MODULE, KERNEL]))

    [told] = [row for row in rows if row.state != inspection.OK]
    assert (told.state, told.what) == (inspection.NOTE, "compiled for the asked arch only")
    assert told.found.endswith("no extension is carried: the base has no card")


def test_a_renamed_and_an_altered_bundle_are_found(tmp_path: Path) -> None:
    path = make(tmp_path)
    renamed = tmp_path / "final.pyz"
    renamed.write_bytes(path.read_bytes())
    assert failed(renamed) == ["final.pyz is not NAME-<12 hex>.pyz"]
    other = path.with_name(f"t-{'0' * 12}.pyz")
    other.write_bytes(path.read_bytes())
    assert "it is named 000000000000" in failed(other)[0]

    with zipfile.ZipFile(renamed, "a") as archive:
        archive.writestr("evil.py", "x")

    assert "does not belong into a bundle" in failed(renamed)[0]


def submission(folder: Path, text: str = MANIFEST) -> Path:
    path = make(folder, text=text)
    for one in scripts.on_target(manifests.parse(text, "t")):
        (folder / one.name).write_bytes(one.data)
    (folder / "README.md").write_text("# T\n\nThird-party code: none.\n")
    (folder / "result.json").write_bytes((FIXTURES / "bench_result_ok.json").read_bytes())
    return path


def verified(path: Path) -> dict[str, Any]:
    """What the agent of a bundle says of a target where all is as planned."""
    plan = bundles.read(path).plan
    files = [
        {"path": entry.path, "state": "ok", "found": entry.want.to_json()} for entry in plan.files
    ]
    place = {"state": "ok", "why": "", "file": "/s/vllm/__init__.py"}
    return {
        "schema": "evidence/1", "verb": "verify", "exit": 0, "outcome": "verified",
        "plan": plan.digest, "tree": plan.tree, "files": files, "origin": {"empty": place},
        "python": {"version": "3.10.12"}, "gates": [], "traps": [],
    }  # fmt: skip


def measured(path: Path) -> dict[str, Any]:
    """The record of a run of one bucket of a bundle, as bench.collect keeps it."""
    made, raw = bundles.read(path), raw_run()
    manifest = made.inputs["manifest"]
    gates = [{"gate": 7, "name": "result comparable", "verdict": "not reached", "reason": "x",
              "proofs": [], "faults": []}]  # fmt: skip
    return {
        **raw, "name": made.plan.name, "plan": made.plan.digest, "inputs": digest(made.inputs),
        "locked": manifest["bench"], "flags": manifest["bench"]["flags"], "state": "done",
        "error": None, "gates": gates,
    }  # fmt: skip


def row_of(folder: Path, what: str) -> inspection.Row:
    """The only row of a thing, however many there are of others."""
    [found] = [
        row for row in inspection.inspect(folder) if what in (row.what, row.found[: len(what)])
    ]
    return found


def test_a_whole_folder_passes(tmp_path: Path) -> None:
    submission(tmp_path)

    rows = inspection.inspect(tmp_path)

    assert failed(tmp_path) == []
    assert any(row.state == inspection.NOTE and "evidence" in row.what for row in rows)
    assert any(row.what == "result.json is a result" for row in rows)


def test_faults_of_a_folder_are_found(tmp_path: Path) -> None:
    submission(tmp_path)
    (tmp_path / "README.md").write_text("# T\n")
    (tmp_path / "start_vllm.sh").write_text("vllm serve --speculative-config x\n")
    (tmp_path / "verify.sh").unlink()
    (tmp_path / "evidence.json").write_text('{"schema": "evidence/1"}')
    (tmp_path / "result.json").write_bytes(
        (FIXTURES / "bench_result_silent_error.json").read_bytes()
    )

    found = failed(tmp_path)

    for why in ("says nothing of third-party code", "start_vllm.sh was edited by hand",
                "verify.sh is missing", "evidence.json: ", "made no token"):  # fmt: skip
        assert any(why in text for text in found), (why, found)


def test_evidence_of_another_plan_is_found(tmp_path: Path) -> None:
    submission(tmp_path)
    told = {"schema": "evidence/1", "verb": "verify", "exit": 0, "plan": "9" * 64, "files": []}
    (tmp_path / "evidence.json").write_text(json.dumps(told))

    assert "evidence.json: it speaks of another plan" in failed(tmp_path)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"verb": "restore"}, "it is of a restore"),
        ({"worktree": True}, "it is of a work tree"),
        ({"name": "another"}, "it speaks of another plan"),
        ({"files": []}, "vllm/a.py: the agent did not answer for it"),
        ({"files": [{"path": "vllm/a.py", "state": "changed"}]}, "vllm/a.py: changed"),
        ({"files": [{"path": "vllm/a.py", "state": "ok", "found": {"type": "absent"}}]},
         "vllm/a.py: called as planned, found was {'type': 'absent'}"),
        ({"origin": {}}, "import from empty was not probed"),
        ({"origin": {"empty": {"state": "elsewhere", "why": "x", "file": "/evil"}}},
         "import from empty: elsewhere"),
        ({"origin": {"empty": {"state": "ok", "why": "", "file": "/evil.py"}}},
         "import from empty: called the site's, found was /evil.py"),
        ({"tree": ""}, "tree read on the target is absent"),
        ({"tree": "9" * 64}, "tree read on the target is 9999"),
        ({"gates": [{"gate": 1, "verdict": "failed"}]}, "gate 1 failed"),
        ({"gates": [{"verdict": "failed"}]}, "it cannot be checked: KeyError"),
        ({"exit": 10}, "exit 10"),
        ({"outcome": "differs"}, "exit 0 differs"),
        ({"python": []}, "it cannot be checked"),
    ],
)  # fmt: skip
def test_evidence_that_proves_nothing_of_the_lock_is_found(
    tmp_path: Path, other: dict[str, object], said: str
) -> None:
    told = verified(submission(tmp_path))
    (tmp_path / "evidence.json").write_text(json.dumps(told))
    row = row_of(tmp_path, EVIDENCE)
    assert row == (inspection.OK, EVIDENCE, "evidence.json: 1 files as planned")

    (tmp_path / "evidence.json").write_text(json.dumps({**told, **other}))

    row = row_of(tmp_path, EVIDENCE)
    assert row.state == inspection.FAILED
    assert said in row.found


def test_evidence_without_its_parts_is_none(tmp_path: Path) -> None:
    plan = bundles.read(submission(tmp_path)).plan
    told = {"schema": "evidence/1", "verb": "verify", "exit": 0, "plan": plan.digest}
    (tmp_path / "evidence.json").write_text(json.dumps(told))

    row = row_of(tmp_path, EVIDENCE)

    assert row.state == inspection.FAILED
    assert "the agent did not answer for it" in row.found


def _counted(raw: dict[str, Any], **values: Any) -> None:
    raw["buckets"][0]["rounds"][1]["result"].update(values)


def _gate_six(raw: dict[str, Any]) -> None:
    raw["gates"][0].update(gate=6, verdict="failed", faults=["no marker"])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda raw: raw.update(name="other"), "its name is other, the bundle's is t"),
        (lambda raw: raw.update(plan="0" * 64), "its plan is 0000"),
        (lambda raw: raw.update(inputs="0" * 64), "its inputs is 0000"),
        (lambda raw: raw.pop("plan"), "its plan is not said"),
        (lambda raw: raw.update(buckets=[]), "it measured no bucket"),
        (lambda raw: raw.update(state="failed"), "its run is failed, not done"),
        (lambda raw: raw.update(schema="bench/9"), "its schema is not bench/1"),
        (_gate_six, "gate 6 failed: no marker"),
        (lambda raw: raw["locked"]["buckets"].pop("4-8K"), "what was to be measured is not what"),
        (lambda raw: raw["buckets"][0].update(requests=4), "4 requests, the lock has 5"),
        (lambda raw: raw["buckets"][0].update(requests=float("inf")), "'requests' of bucket 1"),
        (lambda raw: raw["buckets"][0]["rounds"].pop(0), "the warm round was skipped"),
        (lambda raw: raw["locked"]["buckets"].update({"8-16K": {}}), "the locked bucket 8-16K"),
        (lambda raw: raw["buckets"][0]["rounds"][1].update(result=None), "has no result"),
        (lambda raw: raw["buckets"][0]["rounds"][1].pop("before"), "was not looked at before"),
        (lambda raw: _counted(raw, completed=4), "4 of 5 requests completed"),
        (lambda raw: _counted(raw, output_throughput=1e9), "1000000000"),
        (lambda raw: _counted(raw, duration=int("9" * 400)), ""),
        (lambda raw: _counted(raw, texts=[{}] * 5), ""),
    ],
)  # fmt: skip
def test_a_record_that_is_no_result_of_this_bundle_is_found(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], Any], said: str
) -> None:
    raw = measured(submission(tmp_path, FIVE))
    (tmp_path / "bench.json").write_text(json.dumps(raw))
    assert row_of(tmp_path, RESULT).state == inspection.OK, row_of(tmp_path, RESULT)

    spoil(raw)
    (tmp_path / "bench.json").write_text(json.dumps(raw))

    rows = [row for row in inspection.inspect(tmp_path) if row.what == RESULT]
    assert {row.state for row in rows} == {inspection.FAILED}
    assert any(said in row.found for row in rows), rows


def test_a_record_of_a_baseline_is_of_another_plan_and_a_result(tmp_path: Path) -> None:
    raw = measured(submission(tmp_path, FIVE)) | {"name": "base", "plan": "0" * 64}
    (tmp_path / "base.json").write_text(json.dumps(raw))
    assert row_of(tmp_path, "base.json is a result").state == inspection.OK

    raw["buckets"][0]["rounds"].pop(0)
    (tmp_path / "base.json").write_text(json.dumps(raw))

    assert row_of(tmp_path, "base.json is a result").state == inspection.FAILED


def test_a_result_that_was_cut_is_found_and_other_text_is_not_checked(tmp_path: Path) -> None:
    submission(tmp_path)
    whole = (tmp_path / "result.json").read_bytes()
    (tmp_path / "result.json").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "notes.json").write_bytes(b"// not JSON")

    assert row_of(tmp_path, "result.json is a result").state == inspection.FAILED
    assert row_of(tmp_path, "notes.json is a result").state == inspection.NOTE


def test_a_profile_is_read_and_a_damaged_one_is_found(tmp_path: Path) -> None:
    submission(tmp_path)
    path, what = tmp_path / "t.hipkernel.csv", "t.hipkernel.csv is a profile"
    table = "Name,Calls,TotalDurationNs,AverageNs,Percentage\nk,2,10,5,100\nTotal,2,10,5,100\n"
    path.write_text(table)
    assert row_of(tmp_path, what) == (inspection.OK, what, "2 calls of 1 kernels")

    path.write_text(table.replace("k,2,10,5,", "k,3,10,3,"))

    row = row_of(tmp_path, what)
    assert row.state == inspection.FAILED
    assert "its Total row says 2 calls" in row.found


@pytest.mark.parametrize("name", ["x.json", "evidence.json", "README", "x.hipkernel.csv"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    submission(tmp_path)
    (tmp_path / "README.md").unlink()
    os.mkfifo(tmp_path / name)

    found = failed(tmp_path)

    assert any("not a regular file" in text for text in found), found


def test_a_pipe_for_a_bundle_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"t-{'0' * 12}.pyz")

    assert failed(tmp_path) == [f"t-{'0' * 12}.pyz is not a regular file"]
    with pytest.raises(BadValues, match="no submission"):
        inspection.inspect(tmp_path / f"t-{'0' * 12}.pyz")


@pytest.mark.parametrize("make_it", [Path.mkdir, lambda path: path.symlink_to("/nowhere/at/all")])
def test_a_readme_that_is_no_file_is_found(tmp_path: Path, make_it: Callable[[Path], None]) -> None:
    submission(tmp_path)
    make_it(tmp_path / "README")
    assert failed(tmp_path) == []  # the one beside it is read

    (tmp_path / "README.md").unlink()

    [found] = failed(tmp_path)
    assert found.startswith("README: ")


def test_options_that_nobody_can_see_are_not_called_right(tmp_path: Path) -> None:
    for number, text in enumerate(
        (MANIFEST.replace("trust-remote-code:", "config: /root/x.yaml"),
         commanded("/root/serve.sh"), commanded('sh, -c, "vllm serve \\"$@\\""'))
    ):  # fmt: skip
        folder = tmp_path / str(number)
        row = row_of(make(folder, text=text), "the server's words obey the rules")
        assert row.state == inspection.NOTE
        assert row.found.startswith("not checked: ")


def test_a_folder_of_no_or_two_bundles_is_a_question(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(BadValues):
            inspection.inspect(tmp_path)
        make(tmp_path)
        make(tmp_path, body=b"V = 2\n")
    with pytest.raises(BadValues, match="no submission"):
        inspection.inspect(tmp_path / "nothing.pyz")


def test_without_a_file_the_folder_is_checked_or_the_newest_bundle_of_the_manifest(
    tmp_path: Path,
) -> None:
    layout, here = Layout(tmp_path), tmp_path / "here"
    here.mkdir()
    for folder in (layout.out, layout.manifest("t").parent):
        folder.mkdir()
    layout.manifest("t").write_text(MANIFEST)
    newer, older = make(layout.out), make(layout.out, body=b"V = 2\n")
    other = layout.out / f"another-{'0' * 12}.pyz"
    other.touch()
    os.utime(older, (1, 1))

    assert inspection.chosen("", here, layout) == newer
    assert inspection.chosen("t", here, layout) == newer
    (here / "mine.pyz").touch()
    assert inspection.chosen("", here, layout) == here
    assert inspection.chosen("t", here, layout) == newer
    for path in (newer, older):
        path.unlink()
    with pytest.raises(BadValues, match="no submission to check") as caught:
        inspection.chosen("t", here, layout)
    assert "./inv bundle -n t" in caught.value.fix
