"""What the rules forbid of the server's words, in each spelling that its parser takes for a flag.

The spellings were tried on the parser of vLLM 0.18.1.
"""

from __future__ import annotations

import pytest

from deploy.service import rules

VLLM = ("vllm", "serve")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--quantization", "fp8"], "quantised weights"),
        (["--quantization=fp8"], "quantised weights"),
        (["--quant", "fp8"], "quantised weights"),
        (["-q", "fp8"], "quantised weights"),
        (["-qfp8"], "quantised weights"),
        (["-q=fp8"], "quantised weights"),
        (["--load-format", "gguf"], "quantised weights"),
        (["--load-format=gguf"], "quantised weights"),
        (["--load_format", "BitsAndBytes"], "quantised weights"),
        (["--load", "gguf"], "quantised weights"),
        (["--hf-overrides", '{"quantization_config": {}}'], "quantised weights"),
        (["--hf-overrides.quantization_config.quant_method", "fp8"], "quantised weights"),
        (["--speculative-config", "{}"], "speculative decoding"),
        (["--speculative_config={}"], "speculative decoding"),
        (["--speculative_config.model", "x"], "speculative decoding"),
        (["--specul", "{}"], "speculative decoding"),
        (["--num-speculative-tokens", "5"], "speculative decoding"),
        (["--scheduler_cls", "x.Y"], "another scheduler"),
        (["--scheduling-p", "priority"], "another scheduler"),
    ],
)
def test_a_forbidden_flag_is_seen_in_serve_and_in_command(words: list[str], what: str) -> None:
    for command, serve in ((VLLM, words), ((*VLLM, *words), [])):
        [found] = rules.forbidden(command, serve)
        assert found.endswith(f": {what} is not allowed")


def test_words_inside_a_shells_text_are_seen() -> None:
    command = ("sh", "-c", 'exec vllm serve --quantization fp8 "$@"')

    assert list(rules.forbidden(command, ())) == [
        "--quantization: quantised weights is not allowed"
    ]
    assert rules.unseen(command, ())


def test_what_is_allowed_passes() -> None:
    words = ("--load-format", "safetensors", "--num-gpu-blocks-override", "5", "--async-scheduling",
             "--kv-cache-dtype", "fp8", "--hf-overrides", '{"rope_theta": 1}',
             "--trust-remote-code")  # fmt: skip

    for command in (VLLM, ("python3", "-q", "-m", "vllm.entrypoints.openai.api_server")):
        assert list(rules.forbidden(command, words)) == []
        assert rules.unseen(command, words) == ""


@pytest.mark.parametrize(
    ("command", "serve"),
    [
        (VLLM, ["--config", "/root/x.yaml"]),
        (VLLM, ["--config=/root/x.yaml"]),
        (("/root/serve.sh",), []),
        (("sh", "-c", "vllm serve $MORE"), []),
    ],
)
def test_options_that_stand_elsewhere_are_named(command: tuple[str, ...], serve: list[str]) -> None:
    assert rules.unseen(command, serve)


def test_variables_that_a_command_sets_are_named() -> None:
    command = ("sh", "-c", "A=1 env B='x y' vllm serve --override=C")

    assert list(rules.assigned(command)) == ["A", "B"]
    assert list(rules.assigned(VLLM)) == []
