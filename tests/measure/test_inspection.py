"""What an organiser checks without a card: whole bundles, and each fault planted alone."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle as bundles
from deploy import inspection, scripts
from deploy import manifest as manifests
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.bundle import Sink
from deploy.errors import BadValues
from deploy.layout import HERE, Layout

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
KERNELS = "kernels: {preset: p, arch: gfx936, extensions: {_rocm_C: {ops: [LLMM1]}}}\n"
MODULE = {"path": "vllm/a.py", "class": "overlay", "reason": "vllm/**"}
KERNEL = {"path": "csrc/a.cu", "class": "kernel", "reason": "csrc/**"}


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


def submission(folder: Path) -> Path:
    path = make(folder)
    for one in scripts.on_target(manifests.parse(MANIFEST, "t")):
        (folder / one.name).write_bytes(one.data)
    (folder / "README.md").write_text("# T\n\nThird-party code: none.\n")
    (folder / "result.json").write_bytes((FIXTURES / "bench_result_ok.json").read_bytes())
    return path


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
                "verify.sh is missing", "this is no evidence", "made no token"):  # fmt: skip
        assert any(why in text for text in found), (why, found)


def test_evidence_of_another_plan_is_found(tmp_path: Path) -> None:
    submission(tmp_path)
    told = {"schema": "evidence/1", "verb": "verify", "exit": 0, "plan": "9" * 64, "files": []}
    (tmp_path / "evidence.json").write_text(json.dumps(told))

    assert "evidence.json: it speaks of another plan" in failed(tmp_path)


@pytest.mark.parametrize(
    ("other", "said"),
    [({"verb": "restore"}, "it is of a restore"), ({"worktree": True}, "it is of a work tree")],
)
def test_evidence_that_proves_nothing_of_the_lock_is_found(
    tmp_path: Path, other: dict[str, object], said: str
) -> None:
    path = submission(tmp_path)
    told = {"schema": "evidence/1", "verb": "verify", "exit": 0, "files": [],
            "plan": bundles.read(path).plan.digest}  # fmt: skip
    (tmp_path / "evidence.json").write_text(json.dumps(told))
    assert not any("evidence.json" in text for text in failed(tmp_path))

    (tmp_path / "evidence.json").write_text(json.dumps({**told, **other}))

    assert any(text.startswith(f"evidence.json: {said}") for text in failed(tmp_path))


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
