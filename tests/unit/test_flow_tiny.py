"""The flow from manifest to evidence on the tiny manifest: a pinned thing is held to its pin."""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy import flow, report
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.errors import BadValues, BundleError, Differs, Refused, StaleLock
from deploy.gates import Verdict, Visit
from deploy.layout import HERE, Layout
from deploy.lock import Lock, read_lock, write_lock

VERIFY = Request(verb=Verb.VERIFY)
SITE = "root/usr/local/lib/python3.10/dist-packages"


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """A checkout that holds the tiny manifest alone, locked and reproduced."""
    layout = Layout(tmp_path_factory.mktemp("checkout 中文"))
    (layout.top / "manifests").mkdir()
    shutil.copy(HERE.manifest("tiny"), layout.manifest("tiny"))
    shutil.copytree(HERE.series("tiny"), layout.series("tiny"))
    flow.lock("tiny", layout)
    visit, links = flow.reproduce("tiny", layout)
    assert visit.exit == 0, visit
    assert [link["link"] for link in links][0::8] == ["base commit", "tree"]
    return layout


@pytest.fixture
def layout(reproduced: Layout, tmp_path: Path) -> Layout:
    """A copy that a test may spoil."""
    copy = Layout(tmp_path / "copy")
    shutil.copytree(reproduced.top, copy.top, symlinks=True)
    shutil.rmtree(copy.out_of("tiny"))
    flow.reproduce("tiny", copy)
    return copy


def verify(layout: Layout) -> Visit:
    [visit] = flow.run("tiny", "", VERIFY, layout)
    return visit


def test_the_reproduced_root_verifies_and_gate_1_is_passed(reproduced: Layout) -> None:
    visit = verify(reproduced)

    assert visit.exit == 0
    assert visit.gates[0].verdict is Verdict.PASSED
    assert (reproduced.out_of("tiny") / "evidence.json").exists()


def test_one_changed_byte_of_an_installed_file_is_named_and_exits_10(layout: Layout) -> None:
    path = layout.out_of("tiny") / SITE / "vllm/version.py"
    text = path.read_bytes()
    path.write_bytes(text[:-2] + b"#\n")

    visit = verify(layout)

    assert visit.exit == 10
    assert visit.gates[0].verdict is Verdict.FAILED
    assert any(fault.startswith("vllm/version.py: changed") for fault in visit.gates[0].faults)


def flip(path: Path, at: int = -40) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(raw)


def spoil_wheel(layout: Layout) -> None:
    [path] = (layout.cache / "wheels").glob("*.whl")
    flip(path)


def spoil_lock(layout: Layout) -> None:
    flip(layout.lock("tiny"))


def spoil_bundle(layout: Layout) -> None:
    [path] = layout.out.glob("tiny-*.pyz")
    flip(path, 200)


def spoil_blob(layout: Layout) -> None:
    """Damage one stored content of the cached repository, and drop the bundle that has it too."""
    [repo] = (layout.cache / "repos").glob("*.git")
    [change] = [c for c in flow.plan("tiny", layout).delta.changes if c.path == "vllm/version.py"]
    assert change.new is not None
    oid = change.new.oid
    git = ("git", "-C", str(repo), "cat-file", "blob", oid)
    text = subprocess.run(git, check=True, capture_output=True).stdout
    for pack in (repo / "objects/pack").glob("*.pack"):
        moved = pack.read_bytes()
        for index in (repo / "objects/pack").glob("*"):
            index.unlink()
        subprocess.run(("git", "-C", str(repo), "unpack-objects", "-q"), input=moved, check=True)
    path = repo / "objects" / oid[:2] / oid[2:]
    raw = bytearray(zlib.decompress(path.read_bytes()))
    assert text in bytes(raw)
    raw[-2] ^= 1
    path.chmod(0o644)
    path.write_bytes(zlib.compress(bytes(raw)))
    for made in layout.out.glob("tiny-*.pyz"):
        made.unlink()


def spoil_base(layout: Layout) -> None:
    """Edit the folder that the base is packed from; the cached wheel is as it was."""
    path = layout.series("tiny") / "base/vllm/__init__.py"
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize("spoil", [spoil_wheel, spoil_lock, spoil_bundle, spoil_blob, spoil_base])
def test_one_changed_byte_of_a_pinned_thing_exits_4(
    spoil: Callable[[Layout], None], layout: Layout
) -> None:
    assert verify(layout).exit == 0
    spoil(layout)

    with pytest.raises(BundleError) as caught:
        verify(layout)

    assert caught.value.exit == 4
    assert caught.value.fix


def test_a_comment_in_the_manifest_stales_no_lock_and_a_changed_value_does(layout: Layout) -> None:
    path = layout.manifest("tiny")
    path.write_text("# a note\n" + path.read_text())
    assert verify(layout).exit == 0

    path.write_text(path.read_text().replace("/root/submission", "/root/elsewhere"))
    with pytest.raises(StaleLock, match=r"launch\.dir|stale"):
        verify(layout)


def test_reproduce_names_the_first_link_that_diverged_with_both_values(layout: Layout) -> None:
    edited = layout.series("tiny") / "series"
    rows = edited.read_text().splitlines()
    new = next(row for row in rows if row.startswith("new "))
    content = layout.series("tiny") / new.split(" from ")[1].strip()
    content.write_bytes(content.read_bytes() + b"\n# edited after the lock\n")

    with pytest.raises(Differs, match="head commit") as caught:
        flow.reproduce("tiny", layout)

    assert caught.value.exit == 10
    assert caught.value.why.count(" ") >= 3


def test_an_input_that_diverged_is_named_and_shown_not_only_digested(layout: Layout) -> None:
    pinned = read_lock(layout.lock("tiny"))
    older = {key: value for key, value in pinned.inputs.items() if key != "base_files"}
    write_lock(layout.lock("tiny"), Lock(inputs=older, expect=pinned.expect))

    with pytest.raises(StaleLock, match=r"diverged from the lock: inputs\.base_files") as caught:
        verify(layout)

    assert "locked nothing, found {" in caught.value.why
    assert "dist-info/RECORD" in caught.value.why


def test_a_listing_that_came_after_the_lock_is_named_with_the_command(layout: Layout) -> None:
    where = f"local:{layout.out_of('tiny') / 'root'}"
    flow.run("tiny", where, Request(verb=Verb.RESTORE), layout)
    path, _ = flow.list_base("tiny", where, layout)

    with pytest.raises(StaleLock, match=r"inputs\.base_files") as caught:
        verify(layout)

    assert "`./inv lock -n tiny`" in caught.value.fix
    assert path.name == "tiny.files"
    assert "tiny.files, a vendor's listing" in caught.value.fix


def test_a_kernel_source_that_the_manifest_ignores_is_named_with_its_reason(
    layout: Layout,
) -> None:
    manifest = layout.manifest("tiny")
    text = manifest.read_text()
    ignored = '  ignore:\n    "csrc/**": built by others\n'
    manifest.write_text(text.replace("  ignore:\n", ignored))
    flow.lock("tiny", layout)
    visit, _ = flow.reproduce("tiny", layout)

    assert {gate.verdict for gate in visit.gates[1:4]} == {Verdict.NOT_APPLICABLE}
    [reason] = {gate.reason for gate in visit.gates[1:4]}
    assert reason.startswith("kernel source csrc/")
    assert reason.endswith(" is ignored by the manifest: built by others")


def test_a_template_that_changed_since_the_lock_is_named_by_its_script(layout: Layout) -> None:
    pinned = read_lock(layout.lock("tiny"))
    scripts = {**pinned.inputs["scripts"]}
    assert {"start_vllm.sh", "stop_vllm.sh", "verify.sh", "ENVIRONMENT.md"} == set(scripts)
    scripts["start_vllm.sh"] = {"mode": "0755", "sha256": "0" * 64}
    write_lock(
        layout.lock("tiny"),
        Lock(inputs={**pinned.inputs, "scripts": scripts}, expect=pinned.expect),
    )

    with pytest.raises(StaleLock, match=r"inputs\.scripts\.start_vllm\.sh\.sha256") as caught:
        verify(layout)

    assert "0" * 64 in caught.value.why


def test_a_kernel_source_that_nothing_compiles_is_the_reason_of_the_gates(
    reproduced: Layout,
) -> None:
    silent = verify(reproduced).gates[1:4]

    assert {gate.verdict for gate in silent} == {Verdict.NOT_REACHED}
    assert all("`kernels:`" in gate.reason for gate in silent)


WANTED = "kernels: {preset: p, arch: gfx936, extensions: {_C: {ops: [gemm]}}}\n"


def test_a_kernel_that_is_wanted_and_not_built_fails_gate_2_and_lock_says_it(
    layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    path = layout.manifest("tiny")
    path.write_text(path.read_text() + WANTED)
    flow.lock("tiny", layout)
    why = (
        "the kernels of tiny were not built: csrc/tiny.cu changed; "
        "run `./inv build-kernels -n tiny`, then `./inv lock -n tiny`"
    )
    assert why in capsys.readouterr().err.splitlines()

    [visit] = flow.deploy("tiny", "", Request(verb=Verb.DEPLOY), layout)

    assert visit.exit == 10
    assert visit.gates[1].faults == (why,)
    verdicts = [gate.verdict.value for gate in visit.gates[:4]]
    assert verdicts == ["passed", "failed", "not reached", "not reached"]
    assert "verify: verified, but gate 2 FAILED" in report.visit_text(visit)


def test_kernels_that_are_wanted_and_unchanged_are_not_reached_until_they_are_built(
    layout: Layout,
) -> None:
    path, series = layout.manifest("tiny"), layout.series("tiny") / "series"
    path.write_text(path.read_text() + WANTED)
    edits = [line for line in series.read_text().splitlines() if "csrc/" not in line]
    series.write_text("\n".join(edits) + "\n")
    (layout.series("tiny") / "files/tiny.cu").unlink()
    flow.lock("tiny", layout)

    [visit] = flow.deploy("tiny", "", Request(verb=Verb.DEPLOY), layout)

    assert visit.exit == 0
    assert {gate.verdict for gate in visit.gates[1:]} == {Verdict.NOT_REACHED}
    assert visit.gates[1].reason.startswith("the kernels of tiny were not built; run `./inv build")


def test_a_check_lists_what_it_would_change_and_a_restore_what_it_changed(layout: Layout) -> None:
    [clean] = flow.run("tiny", "", Request(verb=Verb.CHECK), layout)
    [restored] = flow.run("tiny", "", Request(verb=Verb.RESTORE), layout)
    [checked] = flow.run("tiny", "", Request(verb=Verb.CHECK), layout)

    assert "vllm/gemm.py" not in report.visit_text(clean)
    assert re.search(r"^  give back +vllm/gemm\.py$", report.visit_text(restored), re.M)
    assert re.search(r"^  put +vllm/gemm\.py$", report.visit_text(checked), re.M)
    assert re.search(r"^  drop +vllm/old_entry\.py$", report.visit_text(checked), re.M)


def test_without_a_target_it_is_said_how_to_get_one(layout: Layout) -> None:
    shutil.rmtree(layout.out_of("tiny") / "root")

    with pytest.raises(BadValues, match="no target for tiny") as caught:
        verify(layout)

    assert "./inv reproduce -n tiny" in caught.value.fix


def test_without_a_lock_nothing_is_deployed_and_the_command_is_named(layout: Layout) -> None:
    layout.lock("tiny").unlink()

    with pytest.raises(StaleLock, match="not locked") as caught:
        verify(layout)

    assert "./inv lock -n tiny" in caught.value.fix


def test_a_root_that_somebody_else_made_is_never_replaced(layout: Layout) -> None:
    root = layout.out_of("tiny") / "root"
    shutil.rmtree(root)
    (root / "work").mkdir(parents=True)

    with pytest.raises(Refused, match="will not replace"):
        flow.reproduce("tiny", layout)

    assert (root / "work").is_dir()


def test_locking_again_changes_nothing_and_a_second_deploy_writes_nothing(layout: Layout) -> None:
    assert flow.lock("tiny", layout)[1] is False
    site = layout.out_of("tiny") / SITE
    before = {p: (p.lstat().st_ino, p.lstat().st_ctime_ns) for p in sorted(site.rglob("*"))}

    [visit] = flow.deploy("tiny", "", Request(verb=Verb.DEPLOY), layout)

    assert visit.exit == 0
    assert {p: (p.lstat().st_ino, p.lstat().st_ctime_ns) for p in sorted(site.rglob("*"))} == before


def test_restore_gives_the_base_back_and_verify_then_says_so(layout: Layout) -> None:
    [back] = flow.run("tiny", "", Request(verb=Verb.RESTORE), layout)
    assert back.exit == 0

    visit = verify(layout)

    assert visit.exit == 10
    assert {row["state"] for row in visit.evidence.faults} >= {"missing", "still base", "left over"}  # type: ignore[union-attr]


def test_what_an_error_on_a_target_proposes_is_about_that_target(
    layout: Layout, tmp_path: Path
) -> None:
    root = f"local:{tmp_path / 'second'}"
    shutil.copytree(layout.out_of("tiny") / "root", tmp_path / "second", symlinks=True)

    asked = Request(verb=Verb.MEASURE, options={"act": "status", "kind": "bench"})
    [visit] = flow.run("tiny", root, asked, layout)

    assert visit.error is not None
    assert visit.error.fix == f"start one: `./inv bench.run -n tiny -t {root}`"
    assert report.visit_text(visit).startswith(f"tiny on {root}: ")


def test_an_interpreter_that_lacks_is_named_where_a_task_and_a_bundle_take_it(
    layout: Layout,
) -> None:
    (layout.out_of("tiny") / "root/usr/bin/python3").unlink()

    [visit] = flow.deploy("tiny", "", Request(verb=Verb.DEPLOY), layout)

    assert visit.error is not None
    assert visit.error.exit == 3
    said = "set base.python in the manifest (hosts.yaml: python; a bundle by hand: --python) to"
    assert visit.error.fix.startswith(said)


def test_several_targets_are_all_visited_and_a_missing_one_is_said(
    layout: Layout, tmp_path: Path
) -> None:
    root = layout.out_of("tiny") / "root"
    copy = tmp_path / "second"
    shutil.copytree(root, copy, symlinks=True)

    visits = flow.run("tiny", f"local:{root},local:{copy}", VERIFY, layout)

    assert [visit.target for visit in visits] == [f"local:{root}", f"local:{copy}"]
    with pytest.raises(BundleError, match="no target local:"):
        flow.run("tiny", f"local:{tmp_path / 'absent'}", VERIFY, layout)
    with pytest.raises(BundleError, match="is no target"):
        flow.run("tiny", "ftp:x", VERIFY, layout)
