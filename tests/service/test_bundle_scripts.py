"""A person with a web terminal and one uploaded file: the bundle brings its own scripts."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import bundle as bundles
from deploy.agent.plan import Plan
from tests.carriers.sshd import free_port
from tests.service import test_service_verbs as verbs
from tests.service.test_service_verbs import STANDIN, START, Target, own_processes


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    site, folder = tmp_path / "site", tmp_path / "submission"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_bytes(verbs.BODY)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    port = free_port()
    overrides = ("--site", str(site), "--python", sys.executable, "--launch-dir", str(folder))
    with own_processes() as inside:
        made = Target(None, folder, overrides, port, inside)  # type: ignore[arg-type]
        text = START.format(python=sys.executable, standin=STANDIN, overrides=" ".join(overrides),
                            words=" ".join(made.words[1:])).encode()  # fmt: skip
        pinned = {"mode": "0755", "sha256": hashlib.sha256(text).hexdigest()}
        inputs = {**verbs.inputs(folder, port), "scripts": {"start_vllm.sh": pinned}}
        made.bundle = bundles.pack(
            verbs.plan(), inputs, verbs.fill, tmp_path / "up", scripts={"start_vllm.sh": text}
        )
        yield made


def test_the_scripts_are_laid_beside_a_copy_of_the_bundle(target: Target) -> None:
    (target.folder / "t-000000000000.pyz").write_text("of an earlier upload")

    code, evidence, said = target.run("scripts")

    name = target.bundle.path.name
    assert (code, evidence["outcome"]) == (0, "brought"), said
    assert evidence["scripts"]["written"] == ["start_vllm.sh", "overrides.sh", name]
    assert (target.folder / "start_vllm.sh").stat().st_mode & 0o777 == 0o755
    assert (target.folder / name).read_bytes() == target.bundle.path.read_bytes()
    assert [path.name for path in target.folder.glob("*.pyz")] == [name]
    assert target.run("scripts")[1]["outcome"] == "nothing to do"


def test_what_a_machine_departs_in_is_laid_too_and_goes_when_the_manifest_says_the_same(
    target: Target, tmp_path: Path
) -> None:
    site, folder = target.overrides[1], str(target.folder)
    target.run("scripts")
    laid = (target.folder / "overrides.sh").read_text().splitlines()
    (target.folder / "mine.sh").write_text("a person's own\n")

    inputs = bundles.read(target.bundle.path).inputs
    here = {"site": site, "python": sys.executable, "launch_dir": folder}
    plan = Plan.parse({**verbs.plan().to_json(), **here})
    text = (target.folder / "start_vllm.sh").read_bytes()
    target.bundle = bundles.pack(
        plan, inputs, verbs.fill, tmp_path / "mended", scripts={"start_vllm.sh": text}
    )
    target.overrides = ()
    said = target.run("scripts")[1]["scripts"]

    assert laid[1:] == [f"own_launch_dir={folder}", f"own_python={sys.executable}",
                        f"own_site={site}"]  # fmt: skip
    assert said["overrides"] == {}
    assert sorted(path.name for path in target.folder.glob("*.sh")) == ["mine.sh", "start_vllm.sh"]


def test_an_edited_script_is_laid_anew(target: Target) -> None:
    target.run("scripts")
    script = target.folder / "start_vllm.sh"
    locked = script.read_bytes()
    script.write_text("exit 3\n")

    assert target.run("scripts")[1]["scripts"]["written"] == ["start_vllm.sh"]
    assert script.read_bytes() == locked


def test_a_damaged_script_is_not_laid(target: Target) -> None:
    path = target.bundle.path
    data = path.read_bytes()
    assert data.count(b"setsid nohup") == 1
    path.write_bytes(data.replace(b"setsid nohup", b"nohup setsid"))

    code, evidence, _ = target.run("scripts")

    assert code == 4
    assert "start_vllm.sh is damaged" in evidence["error"]["what"]
    assert not (target.folder / "start_vllm.sh").exists()


@pytest.mark.slow
def test_one_uploaded_file_starts_the_service(target: Target) -> None:
    code, evidence, said = target.run("start", "--options", json.dumps({"ready": 30}))

    assert (code, evidence["outcome"]) == (0, "running"), said
    assert "brought to" in said
    assert target.run("stop")[1]["outcome"] == "stopped"
