"""Beside the sources, never installed: the rule that the marker applies."""

from vllm.dcu import diag


def check_one_row_is_a_case_for_the_candidate():
    assert diag.selected("LLMM1", 1)
    assert not diag.selected("LLMM1", 2)
    assert not diag.selected("an op without a rule", 1)
