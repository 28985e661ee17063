"""What a call about the service carries: the locked launch, or a variant of one difference."""

from __future__ import annotations

import pytest

from deploy import serving
from deploy.agent.launch import Launch
from deploy.errors import BadValues
from deploy.manifest import Manifest, parse

BASE = "a" * 40
TEXT = f"""
schema: 1
name: m
base: {{python: /usr/bin/python3, site: /s, requires: {{vllm: "0.18.1"}}}}
source: {{git: ../x, base: {BASE}, head: {"b" * 40}, package: vllm}}
overlay: {{include: ["vllm/**"]}}
launch:
  dir: /root/submission
  port: 8001
  serve: {{max-num-batched-tokens: 4096, enforce-eager: }}
  env: {{VLLM_NEW: {{value: 1, why: the candidate}}}}
model: {{path: /m, served_name: n, files: {{config.json: {{size: 2}}}}}}
dispatch:
  diag: DIAG
  switch: VLLM_NEW
  markers: [{{shape: chunks, phase: prefill}}, {{shape: "(1, 5120)", phase: decode}}]
"""


def manifest(diag: str = "same-process", text: str = TEXT) -> Manifest:
    return parse(text.replace("DIAG", diag), "m")


def test_the_agents_launch_is_the_manifests() -> None:
    found = serving.launch_of(manifest())

    assert found.argv == manifest().serve_argv()
    assert found.env == {"VLLM_NEW": "1"}
    assert (found.dir, found.port, found.model) == ("/root/submission", 8001, "/m")
    assert found.files == {"config.json": (2, "")}
    assert Launch.parse(found.to_json()) == found


def test_off_differs_in_the_switch_alone() -> None:
    on, off = serving.launch_of(manifest()), serving.launch_of(manifest(), off=True)

    assert off.env == {"VLLM_NEW": "0"}
    assert {**off.to_json(), "env": None} == {**on.to_json(), "env": None}


def test_a_twin_differs_in_its_markers_alone_and_must_be_asked_for() -> None:
    twin = serving.launch_of(manifest("twin"), twin=True)

    assert twin.env == {"VLLM_NEW": "1", "VLLM_DCU_KERNEL_DIAG": "1"}
    with pytest.raises(BadValues, match="has no twin"):
        serving.launch_of(manifest(), twin=True)


def test_without_a_switch_nothing_can_be_off() -> None:
    text = TEXT.replace("  switch: VLLM_NEW\n", "")

    with pytest.raises(BadValues, match="with its candidate off"):
        serving.launch_of(manifest(text=text), off=True)


def test_without_a_launch_nothing_can_be_started() -> None:
    text = TEXT[: TEXT.index("launch:")]

    with pytest.raises(BadValues, match="cannot start m"):
        serving.launch_of(manifest(text=text))


def test_markers_follow_from_the_manifest_and_the_chunk_plan() -> None:
    found = serving.needed(manifest(), 9000)

    assert [str(want) for want in found] == [
        "(4096, *) prefill",
        "(808, *) prefill",
        "(1, 5120) decode",
    ]
    assert len(serving.chunk_plan(manifest(), 9000, budget=9000)) == 1
