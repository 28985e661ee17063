"""A machine that departs from the manifest is served as it is: by the tasks, and by hand.

The manifest's own places exist nowhere here, so whatever still reads one of them fails.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle as bundles
from deploy import inventory
from deploy.agent import launch
from deploy.inventory import Key
from tests.carriers.sshd import Sshd
from tests.service.ground import Checkout, local_place
from tests.service.test_service_verbs import own_processes

pytestmark = pytest.mark.slow

NOWHERE = {"python": "/nowhere/python3", "site": "/nowhere/site", "folder": "/nowhere/submission"}


@dataclass
class Away:
    """A checkout whose manifest names places of nowhere, and a place that departs from it."""

    checkout: Checkout
    inside: tuple[str, ...]
    overrides: dict[str, str]

    @property
    def folder(self) -> Path:
        return Path(self.overrides["launch_dir"])

    def script(self, name: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a script of launch.dir as a person does."""
        return subprocess.run(
            [*self.inside, "sh", str(self.folder / name)], env={**os.environ, **env}, cwd="/",
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Away]:
    place = local_place(tmp_path / "place")
    # A quote and a blank where a path may have them.
    folder, script = tmp_path / "it's a place", tmp_path / "it's env.sh"
    folder.mkdir()
    script.write_text("export FROM_ENV_SCRIPT=yes\n")
    overrides = {
        "site": str(place["site"]), "python": str(place["python"]),
        "env_script": str(script), "launch_dir": str(folder),
    }  # fmt: skip
    with own_processes() as inside:
        checkout = Checkout(tmp_path / "checkout", inside=inside, **{**place, **NOWHERE})
        yield Away(checkout, inside, overrides)


def of_server(folder: Path) -> str:
    """The environment of the server that was started in a folder, seen from outside."""
    run = launch.read_run(str(folder))
    assert run is not None
    for stat in Path("/proc").glob("[0-9]*/status"):
        try:
            pids = next(x for x in stat.read_text().splitlines() if x.startswith("NSpid:")).split()
            if pids[-1] == str(run.pid) and len(pids) > 2:
                return (stat.parent / "environ").read_text()
        except OSError:
            continue
    raise AssertionError(f"there is no process {run.pid}")


@pytest.fixture
def env(away: Away, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of an operator whose hosts.yaml says how `a` departs."""
    enter = f'ForceCommand {" ".join(away.inside)} sh -c "$SSH_ORIGINAL_COMMAND"'
    sshd = Sshd(tmp_path / "sshd", "SetEnv SHLVL=5", enter)
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "config").write_text(sshd.config_of("a"))
    rows = "".join(f'    {key}: "{value}"\n' for key, value in away.overrides.items())
    hosts = home / "hosts.yaml"
    hosts.write_text(f"hosts:\n  a:\n    ssh: a\n{rows}")
    inventory.trust(hosts, "a", Key(fingerprint=sshd.fingerprint, reason="test"))
    sshd.start()
    yield {"HOME": str(home), "DCU_HOSTS": str(hosts)}
    sshd.stop()


@pytest.mark.sshd
def test_what_a_host_overrides_reaches_every_script(away: Away, env: dict[str, str]) -> None:
    def done(*words: str) -> dict[str, Any]:
        return away.checkout.done(*words, "-t", "ssh:a", env=env)

    done("deploy")
    started = done("serve.start")["evidence"]

    assert started["service"]["faults"] == []
    assert started["scripts"]["overrides"] == away.overrides
    assert "FROM_ENV_SCRIPT=yes" in of_server(away.folder)
    [packed] = away.checkout.layout.out.glob("mine-*.pyz")
    for name, row in bundles.read(packed).inputs["scripts"].items():
        laid = (away.folder / name).read_bytes()
        assert hashlib.sha256(laid).hexdigest() == row["sha256"]  # the lock's, as everywhere

    seen = away.script("verify.sh")
    assert seen.returncode == 0, seen.stderr
    assert f"{away.overrides['site']}/vllm/__init__.py" in seen.stdout
    stopped = away.script("stop_vllm.sh")
    assert stopped.returncode == 0, stopped.stderr
    again = away.script("start_vllm.sh")
    assert again.returncode == 0, again.stderr
    done("serve.stop")


def flags(overrides: dict[str, str]) -> list[str]:
    pairs = ((f"--{key.replace('_', '-')}", value) for key, value in overrides.items())
    return [word for pair in pairs for word in pair]


def test_flags_of_a_bundle_reach_the_scripts_that_it_lays(away: Away) -> None:
    [packed] = away.checkout.layout.out.glob("mine-*.pyz")
    python = away.overrides["python"]

    def bundle(*words: str) -> None:
        agent = [*away.inside, python, "-I", "-S", str(packed), *words, "--root", "/"]
        subprocess.run([*agent, *flags(away.overrides)], check=True, timeout=60)

    bundle("scripts")
    early = away.script("start_vllm.sh")
    bundle("deploy")
    started = away.script("start_vllm.sh")
    stopped = away.script("stop_vllm.sh")

    assert early.returncode == 10
    assert early.stderr.splitlines()[-1].endswith(" ".join(flags(away.overrides)))
    assert started.returncode == 0, started.stderr
    assert stopped.returncode == 0, stopped.stderr


def test_a_start_uses_the_bundle_that_it_brought_and_a_person_is_asked(away: Away) -> None:
    place = {"python": away.overrides["python"], "site": away.overrides["site"]}
    [manifest] = away.checkout.layout.manifest("mine").parent.glob("mine.yaml")
    text = manifest.read_text()
    for key, value in {**place, "folder": away.overrides["launch_dir"]}.items():
        text = text.replace(NOWHERE[key], value)
    manifest.write_text(text)
    subprocess.run(away.checkout.argv("lock"), cwd=away.checkout.top, check=True, timeout=60)
    [packed] = away.checkout.layout.out.glob("mine-*.pyz")
    shutil.copy(packed, away.folder / "other-0123456789ab.pyz")

    away.checkout.done("deploy", "-t", "local:/")
    started = away.checkout.done("serve.start", "-t", "local:/")["evidence"]
    asked = away.script("verify.sh")
    told = away.script("verify.sh", DCU_BUNDLE=packed.name)

    assert started["service"]["faults"] == []
    assert "DCU_BUNDLE" not in of_server(away.folder)
    assert asked.returncode == 2
    assert "cannot tell which bundle is meant" in asked.stderr
    assert told.returncode == 0, told.stderr
    away.checkout.done("serve.stop", "-t", "local:/")
