"""From the edited kernel to gates 1 to 4 on a target, by the tasks' own functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy import flow
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.errors import Differs, StaleLock
from deploy.gates import Verdict
from tests.kernels.conftest import Built
from tests.kernels.mini_room import ARCH, EXTENSION, Checkout, Tools
from tests.kernels.mini_story import Story

pytestmark = [pytest.mark.hip, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def story(tools: Tools, built: Built, checkout: Checkout, room: Path) -> Story:
    return Story(tools, built.ccache, checkout, room)


def test_an_edited_kernel_is_built_pinned_deployed_and_proved_by_four_gates(story: Story) -> None:
    story.checkout.edit("vllm/__init__.py", '"0.18.1"', '"0.18.1"  # ours')
    story.write(story.checkout.edit("csrc/rocm/skinny_gemms.cu", "sum = 0.0f", "sum = 1.0f"))

    found, built = flow.build_kernels("mini", story.layout)
    pinned, _ = flow.lock("mini", story.layout)
    deployed = flow.deploy("mini", story.target, Request(verb=Verb.DEPLOY), story.layout)
    verdicts = story.verdicts()

    artefact = built["artefacts"][0]
    assert pinned.inputs["kernels"]["artefacts"][0]["sha256"] == artefact["sha256"]
    assert deployed[0].error is None, deployed[0].error
    faults = [gate.faults for gate in verdicts.values()]
    assert [verdicts[n].verdict for n in (1, 2, 3, 4)] == [Verdict.PASSED] * 4, faults
    assert any("csrc/rocm/skinny_gemms.cu: compiled into" in p for p in verdicts[2].proofs)
    assert artefact["sha256"] in verdicts[3].proofs[0]
    assert EXTENSION.ops["LLMM1"] in verdicts[4].proofs[0]
    assert (story.site / artefact["path"]).stat().st_mode & 0o777 == 0o755
    assert found.plan.extensions[0].module == "vllm._rocm_C"

    # A wheel is installed over it: the file is gone, and the third gate says so, no other.
    (story.site / artefact["path"]).unlink()
    again = story.verdicts()
    assert [again[n].verdict.value for n in (1, 2, 3, 4)] == [
        "passed", "passed", "failed", "not reached",
    ]  # fmt: skip


def test_a_python_edit_needs_no_build_and_a_kernel_edit_does(story: Story) -> None:
    story.write(story.checkout.edit("csrc/rocm/attention.cu", "* 0.5f", "* 0.25f"))
    flow.build_kernels("mini", story.layout)
    story.write(story.checkout.edit("vllm/__init__.py", '"0.18.1"', '"0.18.1"  # ours'))
    assert flow.plan("mini", story.layout).built["arch"] == ARCH

    story.write(story.checkout.edit("csrc/rocm/attention.cu", "* 0.25f", "* 0.125f"))
    with pytest.raises(StaleLock, match="of another source") as caught:
        flow.plan("mini", story.layout)

    assert "./inv build-kernels" in caught.value.fix


def test_a_changed_artefact_is_not_packed(story: Story) -> None:
    story.write(story.checkout.edit("csrc/rocm/attention.cu", "* 0.5f", "* 0.25f"))
    _, built = flow.build_kernels("mini", story.layout)
    out = story.layout.out_of("mini") / "kernels"
    artefact = out / built["artefacts"][0]["path"]
    artefact.write_bytes(artefact.read_bytes() + b"x")

    with pytest.raises(Exception, match="no finished build"):
        flow.plan("mini", story.layout)
    _, again = flow.build_kernels("mini", story.layout)

    assert again["rebuilt"] is True
    assert again["artefacts"] == built["artefacts"]
    assert json.loads((out / "kernels.json").read_text())["schema"] == "kernels/1"


def test_a_rebuild_with_other_bytes_is_told_with_its_section_and_fails_when_asked(
    story: Story,
) -> None:
    """A random name gets into the code, as a build path or a date would."""
    story.write(story.checkout.edit("csrc/rocm/attention.cu", "* 0.5f", "* 0.25f"))
    flow.build_kernels("mini", story.layout)
    same = flow.kernel_links(flow.plan("mini", story.layout))
    assert [(row["locked"] == row["found"], row["note"]) for row in same] == [(True, "")]

    text = 'string(RANDOM LENGTH 12 name)\nadd_compile_definitions(RANDOM_NAME="${name}")\n'
    story.checkout.edit("CMakeLists.txt", "set(hipified", f"{text}set(hipified")
    head = story.checkout.edit(
        "csrc/rocm/torch_bindings.cpp",
        "namespace {",
        "const char* kName = RANDOM_NAME;\nnamespace {",
    )
    story.write(head, reproducible="required")
    flow.build_kernels("mini", story.layout)

    with pytest.raises(Differs, match="has other bytes") as caught:
        flow.kernel_links(flow.plan("mini", story.layout))

    assert "section .rodata differs" in caught.value.why or "build-id" in caught.value.why
    assert not list(story.builds.glob("*-again"))
