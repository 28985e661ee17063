"""A kernel compiled in a container of the base image, put into an image, and proved inside it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import flow, imaging
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.carriers.engine import Engine, open_engine
from deploy.gates import Verdict
from deploy.layout import Layout
from tests.carriers import dock
from tests.kernels.mini_room import ARCH, EXTENSION, TOP, Checkout, provisioned
from tests.kernels.mini_story import MANIFEST

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

TOOLCHAIN = "dcu-test/toolchain:1"
IMAGE = str(dock.own("kernels"))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with open_engine() as found:
        if found.inspect(TOOLCHAIN) is None:
            pytest.skip(
                f"no image {TOOLCHAIN} (2.5 GB, three minutes):"
                " sh tests/kernels/toolchain-image.sh start"
            )
        yield found


def checkout(room: Path, vendor: str) -> tuple[Layout, Checkout]:
    """A layout whose one manifest is the mini tree, on the vendor's image."""
    layout, source = Layout(room / "top"), Checkout(room / "checkout")
    shutil.copytree(TOP / "kernels", layout.top / "kernels")
    (layout.top / "manifests").mkdir()
    source.edit("vllm/__init__.py", '"0.18.1"', '"0.18.1"  # ours')
    text = MANIFEST.format(
        python=dock.PYTHON,
        env_script=provisioned().env_script,
        site=dock.SITE,
        repo=source.folder,
        base=source.base,
        head=source.edit("csrc/rocm/skinny_gemms.cu", "sum = 0.0f", "sum = 1.0f"),
        arch=ARCH,
        reproducible="reported",
        builds=room / "builds",
        ccache=room / "ccache",
        schema=EXTENSION.ops["LLMM1"],
    )
    text = text.replace("base:\n", f"base:\n  image: {vendor}\n", 1)
    layout.manifest("mini").write_text(text)
    return layout, source


def test_an_edited_kernel_is_compiled_in_a_container_and_proved_in_the_image(
    engine: Engine, tmp_path: Path
) -> None:
    tree = {"vllm-0.18.1.dist-info/METADATA": b"Name: vllm\nVersion: 0.18.1\n"}
    mini = TOP / "tests/kernels/mini"
    for path in sorted((mini / "vllm").rglob("*.py")):
        tree[str(path.relative_to(mini))] = path.read_bytes()
    with dock.base_image(engine, tree, on=TOOLCHAIN) as vendor:
        layout, _ = checkout(tmp_path, vendor)

        _, built = flow.build_kernels("mini", layout, where=f"container:{vendor}")
        flow.lock("mini", layout)
        made = imaging.build_image("mini", layout, tag=IMAGE)
        try:
            [visit] = flow.run("mini", f"image:{IMAGE}", Request(verb=Verb.VERIFY), layout)
        finally:
            engine.remove_image(IMAGE)

    [artefact] = built["artefacts"]
    assert built["commands"] == [ARCH]
    assert artefact["elf"]["archs"] == [ARCH]
    assert built["incidental"]["where"] == f"container:{vendor}"
    assert made.id == made.config
    assert visit.error is None, visit.error
    verdicts = {gate.number: gate for gate in visit.gates}
    faults = [gate.faults for gate in visit.gates]
    assert [verdicts[n].verdict for n in (1, 2, 3, 4)] == [Verdict.PASSED] * 4, faults
    assert artefact["sha256"] in verdicts[3].proofs[0]
    assert EXTENSION.ops["LLMM1"] in verdicts[4].proofs[0]
