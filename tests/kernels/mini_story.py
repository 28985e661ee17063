"""A manifest over the mini tree, a target that holds its base, and the gates of a verify."""

from __future__ import annotations

import shutil
from pathlib import Path

from deploy import flow, gates
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.layout import Layout
from tests.kernels.mini_room import ARCH, EXTENSION, TOP, Checkout, Tools

SITE = "/usr/lib/python3/dist-packages"
MANIFEST = """\
schema: 1
name: mini
base:
  python: {python}
  site: {site}
  requires: {{vllm: "0.18.1"}}
  env_script: {env_script}
source: {{git: {repo}, base: {base}, head: {head}, package: vllm}}
overlay: {{include: ["vllm/**"]}}
kernels:
  preset: rocm-release
  arch: {arch}
  build_dir: {builds}
  jobs: 2
  reproducible: {reproducible}
  ccache: {{dir: {ccache}}}
  extensions:
    _rocm_C:
      ops:
        LLMM1: "{schema}"
        paged_decay: ""
"""


class Story:
    """A layout of its own with one manifest, and a target that holds the base."""

    def __init__(self, tools: Tools, ccache: Path, checkout: Checkout, room: Path) -> None:
        self.layout = Layout(room / "top")
        self.room, self.tools, self.ccache, self.checkout = room, tools, ccache, checkout
        self.env_script = tools.env_script
        self.builds = room / "builds"
        shutil.copytree(TOP / "kernels", self.layout.top / "kernels")
        (self.layout.top / "manifests").mkdir()
        self.root = room / "root"
        shutil.copytree(checkout.folder / "vllm", self.site / "vllm")
        info = self.site / "vllm-0.18.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.18.1\n")
        # The interpreter and env_script are named by the same path for build and target.
        for path in (tools.python, tools.env_script):
            place = self.root / str(path).lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
        (self.root / str(tools.env_script).lstrip("/")).write_text(f'. "{tools.env_script}"\n')
        launcher = self.root / str(tools.python).lstrip("/")
        launcher.write_text(
            f'#!/bin/sh\nPYTHONPATH="{self.site}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
            f'export PYTHONPATH\nexec "{tools.python}" "$@"\n'
        )
        launcher.chmod(0o755)

    @property
    def site(self) -> Path:
        return self.root / SITE.strip("/")

    @property
    def target(self) -> str:
        return f"local:{self.root}"

    def write(self, head: str, arch: str = ARCH, reproducible: str = "reported") -> None:
        text = MANIFEST.format(
            python=self.tools.python,
            env_script=self.env_script,
            site=SITE,
            repo=self.checkout.folder,
            base=self.checkout.base,
            head=head,
            arch=arch,
            reproducible=reproducible,
            builds=self.builds,
            ccache=self.ccache,
            schema=EXTENSION.ops["LLMM1"],
        )
        self.layout.manifest("mini").write_text(text)

    def verdicts(self, verb: Verb = Verb.VERIFY) -> dict[int, gates.Gate]:
        visits = flow.run("mini", self.target, Request(verb=verb), self.layout)
        assert visits[0].error is None, visits[0].error
        return {gate.number: gate for gate in visits[0].gates}
