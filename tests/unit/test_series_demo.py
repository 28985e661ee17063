"""What the demo adds to vLLM works by itself: the marker, its switch and its data file."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from deploy.layout import HERE

CALL = """
import sys
sys.path.insert(0, sys.argv[1])
from dcu import diag

class Tensor:
    dtype = "torch.bfloat16"
    def __init__(self, *shape):
        self.shape = shape

diag.report("LLMM1", Tensor(1, 2048), Tensor(4096, 2048))
diag.report("LLMM1", Tensor(2, 3, 2048), Tensor(4096, 2048))
"""


def call(switch: str) -> str:
    done = subprocess.run(
        (sys.executable, "-B", "-c", CALL, str(HERE.series("demo") / "files")),
        env={"VLLM_DCU_KERNEL_DIAG": switch},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stderr


def test_the_marker_names_choice_shape_and_type_of_every_call() -> None:
    lines = [re.sub(r" pid=\d+$", "", line) for line in call("1").splitlines()]

    assert lines == [
        "DCU_KERNEL_DIAG selected=True shape=(1, 2048, 4096) dtype=torch.bfloat16 op=LLMM1",
        "DCU_KERNEL_DIAG selected=False shape=(6, 2048, 4096) dtype=torch.bfloat16 op=LLMM1",
    ]


@pytest.mark.parametrize("switch", ["0", "", "yes"])
def test_the_marker_is_silent_unless_it_is_switched_on(switch: str) -> None:
    assert call(switch) == ""
