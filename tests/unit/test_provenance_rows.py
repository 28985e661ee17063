"""`./inv show`: each resolved value with the place that says it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deploy import provenance
from deploy.errors import BadValues
from deploy.layout import HERE, Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path)
    made.manifest("x").parent.mkdir()
    shutil.copy(HERE.manifest("tiny"), made.manifest("tiny"))
    return made


def rows(layout: Layout, *targets: str) -> dict[str, tuple[str, str]]:
    return {r.name: (r.value, r.origin) for r in provenance.rows("tiny", layout, targets)}


def line_of(layout: Layout, text: str) -> int:
    lines = layout.manifest("tiny").read_text().splitlines()
    [number] = [n for n, line in enumerate(lines, 1) if line.strip().startswith(text)]
    return number


def test_what_was_typed_names_its_line_and_the_rest_is_default(layout: Layout) -> None:
    found = rows(layout)
    value, origin = found["base.site"]
    assert value == "/usr/local/lib/python3.10/dist-packages"
    assert origin.endswith(f"tiny.yaml:{line_of(layout, 'site:')}")
    assert found["launch.port"] == ("8000", "default")
    assert found["kernels"] == ("(none)", "default")


def test_a_line_that_moves_moves_in_the_answer(layout: Layout) -> None:
    path = layout.manifest("tiny")
    before = line_of(layout, "python:")
    path.write_text("# one more line\n" + path.read_text())
    assert rows(layout)["base.python"][1].endswith(f":{before + 1}")


def test_a_list_has_the_line_where_it_begins(layout: Layout) -> None:
    value, origin = rows(layout)["overlay.include"]
    assert value == "[vllm/**]"
    assert int(origin.rpartition(":")[2]) >= line_of(layout, "include:")


def test_without_a_lock_the_way_to_one_is_told(layout: Layout) -> None:
    assert "./inv lock" in rows(layout)["lock"][1]


def test_the_locked_values_are_shown_with_the_lock(layout: Layout) -> None:
    shutil.copy(HERE.lock("tiny"), layout.lock("tiny"))
    found = rows(layout)
    assert found["lock"] == ("fresh: made from this manifest", "tiny.lock.yaml")
    assert found["inputs.head"][1] == "tiny.lock.yaml"
    assert len(found["expect.plan"][0]) == 64


def test_a_stale_lock_is_told_and_its_values_are_not(layout: Layout) -> None:
    shutil.copy(HERE.lock("tiny"), layout.lock("tiny"))
    path = layout.manifest("tiny")
    path.write_text(path.read_text().replace("/root/submission", "/root/elsewhere"))
    found = rows(layout)
    assert found["lock"][0] == "stale"
    assert "expect.plan" not in found


def test_a_host_overrides_by_name(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCU_HOSTS", raising=False)
    (layout.top / "hosts.yaml").write_text("hosts:\n  a: {ssh: root@a, site: /opt/site}\n")
    found = rows(layout, "ssh:a", "ssh:b", "local:/mnt")
    assert found["ssh:a"] == ("root@a", "hosts.yaml, host a")
    assert found["ssh:a base.site"] == ("/opt/site", "hosts.yaml, host a")
    assert "does not know" in found["ssh:b"][1]
    assert "local:/mnt" not in found


def test_a_manifest_with_faults_shows_the_faults(layout: Layout) -> None:
    layout.manifest("tiny").write_text("schema: 1\nnaem: tiny\n")
    with pytest.raises(BadValues) as caught:
        rows(layout)
    assert "did you mean 'name'" in caught.value.why
