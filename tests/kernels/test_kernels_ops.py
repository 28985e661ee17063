"""Every way in which an extension can be there and not work has a state of its own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle as bundles
from deploy import manifest as manifests
from deploy import scripts
from deploy.agent.ops import OpsProbe
from deploy.agent.plan import ABSENT, Extension, Plan, PlannedFile, State
from deploy.agent.tree import TreeReader
from deploy.bundle import Sink
from deploy.kernels import proof
from tests.kernels.conftest import Built
from tests.kernels.mini_room import EXTENSION, Tools

SITE = "/usr/lib/site"
# A stand-in for torch: what the probe asks of it, and nothing else.
TORCH = """\
class _Op:
    def __init__(self, schema): self.default = type("O", (), {"_schema": schema})()
    def overloads(self): return ["default"]
class _Space: pass
class ops: pass
def register(space, name, schema):
    if not hasattr(ops, space): setattr(ops, space, _Space())
    setattr(getattr(ops, space), name, _Op(schema))
class _C:
    def _dispatch_get_all_op_names():
        return [s + "::" + n for s in vars(ops) if s[:2] != "__" for n in vars(getattr(ops, s))]
__version__ = "0.0-stub"
"""
LLMM1 = "_rocm_C::LLMM1(Tensor a) -> Tensor"
MODULE = """\
#include <Python.h>
{before}
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "ext", 0, 0, 0}};
PyMODINIT_FUNC PyInit_ext(void) {{
    {body}
    return PyModule_Create(&module);
}}
"""
REGISTER = (
    'PyRun_SimpleString("import torch; torch.register(\\"{space}\\", \\"LLMM1\\", '
    '\\"_rocm_C::LLMM1(Tensor a) -> Tensor\\")");'
)

MANIFEST = f"""\
schema: 1
name: small
base: {{{{python: {{python}}, site: {{site}}}}}}
source: {{{{git: ., base: {"1" * 40}, head: {"2" * 40}, package: pkg}}}}
overlay: {{{{include: ["pkg/**"]}}}}
launch: {{{{dir: {{folder}}, port: 8001}}}}
"""

Ask = Callable[..., dict[str, Any]]


class Site:
    """A root with one package `pkg` and an extension compiled for this interpreter."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, root / SITE.strip("/")
        (self.top / "pkg").mkdir(parents=True)
        (self.top / "pkg/__init__.py").write_text("")
        (self.top / "torch").mkdir()
        (self.top / "torch/__init__.py").write_text(TORCH)

    @property
    def file(self) -> Path:
        return self.top / "pkg/ext.so"

    def compile(self, body: str = "", before: str = "", *options: str) -> None:
        source = self.root / "ext.c"
        source.write_text(MODULE.format(body=body, before=before))
        include = _python_include()
        argv = ("gcc", "-shared", "-fPIC", f"-I{include}", "ext.c", "-o", str(self.file), *options)
        subprocess.run(argv, cwd=self.root, check=True, timeout=60)

    def ask(self, ops: dict[str, str] | None = None, timeout: float = 60) -> dict[str, Any]:
        extension = Extension(module="pkg.ext", namespace="_rocm_C", ops=ops or {"LLMM1": ""})
        env = {"PYTHONPATH": str(self.top)}
        tree = TreeReader(str(self.root), SITE)
        probe = OpsProbe(tree, [extension], python=sys.executable, env=env)
        return probe.finish(timeout)[0]


def _python_include() -> str:
    import sysconfig

    return sysconfig.get_path("include")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    if shutil.which("gcc") is None or not Path(_python_include(), "Python.h").exists():
        if os.environ.get("CI") == "true":
            pytest.fail("gcc or Python.h is missing: run tests/provision.sh start hip")
        pytest.skip("no gcc or no Python.h: run tests/provision.sh start hip")
    return Site(tmp_path / "root")


def test_verify_sh_prints_origin_size_sha256_and_ops(site: Site, tmp_path: Path) -> None:
    site.compile(REGISTER.format(space="_rocm_C"))
    env_script = tmp_path / "env.sh"
    env_script.write_text(f"export PYTHONPATH={site.top}\n")
    text = "V = 1\n"
    (site.top / "pkg/__init__.py").write_text(text)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    want = State(type="file", mode="0644", sha256=sha256, size=len(text))
    plan = Plan(
        name="small", package="pkg", python=sys.executable, site=str(site.top),
        env_script=str(env_script),
        files=(PlannedFile(path="pkg/__init__.py", role="module", want=want, assume=(ABSENT,)),),
        extensions=(Extension(module="pkg.ext", namespace="_rocm_C", ops={"LLMM1": LLMM1}),),
    )  # fmt: skip

    def fill(wanted: Iterator[tuple[str, Sink]]) -> None:
        for _, sink in wanted:
            sink.write(text.encode())

    made = bundles.pack(plan, {}, fill, tmp_path / "up")
    manifest = manifests.parse(
        MANIFEST.format(python=sys.executable, site=site.top, folder=made.path.parent), "small"
    )
    [script] = [one for one in scripts.on_target(manifest) if one.name == "verify.sh"]
    (made.path.parent / script.name).write_bytes(script.data)
    deploy = (sys.executable, "-I", "-S", str(made.path), "deploy", "--root", "/")
    subprocess.run(deploy, capture_output=True, check=True, timeout=60)

    seen = subprocess.run(
        ("/bin/sh", made.path.parent / script.name),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert seen.returncode == 0, seen.stderr
    lines = seen.stdout.splitlines()
    assert f"origin  empty: {site.top}/pkg/__init__.py" in lines
    assert f"{'ok':14} {len(text):9}  {sha256}  pkg/__init__.py" in lines
    assert f"loads   pkg.ext: {site.file} ok" in lines
    assert f"op      LLMM1 {LLMM1}" in lines


def test_an_extension_that_loads_and_registers_is_ok(site: Site) -> None:
    site.compile(REGISTER.format(space="_rocm_C"))

    found = site.ask({"LLMM1": LLMM1})

    assert (found["state"], found["why"]) == ("ok", "")
    assert found["origin"] == found["expected"] == str(site.file)
    assert found["inode"] == site.file.stat().st_ino
    assert found["schemas"] == {"LLMM1": LLMM1}
    assert proof.ops_registered([found]).faults == ()


def test_a_missing_extension_is_not_a_broken_one(site: Site) -> None:
    found = site.ask()

    assert found["state"] == "extension missing"
    assert found["origin"] == ""
    assert found["expected"] == str(site.top / "pkg/ext.abi3.so")


def test_an_undefined_symbol_is_named_though_the_package_imports(site: Site) -> None:
    site.compile("_ZN3c104goneEv();", "void _ZN3c104goneEv(void);")
    text = "try:\n    from . import ext\nexcept ImportError: pass\n"
    (site.top / "pkg/__init__.py").write_text(text)

    found = site.ask()

    assert found["state"] == "undefined symbol"
    assert "_ZN3c104goneEv" in found["why"]
    assert str(site.file) in found["why"]
    assert "0.0-stub" in found["why"]
    assert found["sha256"]


def test_a_symbol_that_only_a_later_call_needs_is_found_at_once(site: Site) -> None:
    """Bound lazily, the module would load and fail in the middle of a request."""
    before = "#include <unistd.h>\nvoid _ZN3c104goneEv(void);"
    site.compile("if (getpid() < 0) _ZN3c104goneEv();", before, "-Wl,-z,lazy")

    assert site.ask()["state"] == "undefined symbol"


def test_a_missing_library_is_named(site: Site) -> None:
    (site.root / "g.c").write_text("int gone(void) { return 0; }\n")
    subprocess.run(("gcc", "-shared", "-fPIC", "g.c", "-o", "libgalaxyhip.so.5"), cwd=site.root,
                   check=True, timeout=60)  # fmt: skip
    site.compile("gone();", "int gone(void);", "./libgalaxyhip.so.5")
    (site.root / "libgalaxyhip.so.5").unlink()

    found = site.ask()

    assert found["state"] == "library missing"
    assert "libgalaxyhip.so.5" in found["why"]
    assert "env_script" in found["why"]


def test_an_op_in_another_namespace_does_not_count(site: Site) -> None:
    site.compile(REGISTER.format(space="_C"))

    found = site.ask()

    assert found["state"] == "op missing"
    assert "LLMM1 (it is there as _C::LLMM1)" in found["why"]
    assert str(site.file) in found["why"]


def test_all_missing_ops_are_listed(site: Site) -> None:
    site.compile(REGISTER.format(space="_rocm_C"))

    found = site.ask({"LLMM1": "", "wvSplitK": "", "paged_attention": ""})

    assert "paged_attention, wvSplitK" in found["why"]


def test_an_op_that_was_there_before_is_somebody_elses(site: Site) -> None:
    site.compile()
    (site.top / "pkg/__init__.py").write_text(
        f'import torch\ntorch.register("_rocm_C", "LLMM1", "{LLMM1}")\n'
    )

    found = site.ask()

    assert found["state"] == "op from elsewhere"
    assert "LLMM1" in found["why"]


def test_an_op_that_the_package_adds_to_the_extension_it_loads_is_somebody_elses(
    site: Site,
) -> None:
    site.compile(REGISTER.format(space="_rocm_C"))
    loads = "import torch, pkg.ext\n"
    (site.top / "pkg/__init__.py").write_text(loads)
    own = site.ask()
    (site.top / "pkg/__init__.py").write_text(
        f'{loads}torch.register("_rocm_C", "ghost", "_rocm_C::ghost(Tensor a) -> Tensor")\n'
    )

    found = site.ask({"LLMM1": "", "ghost": ""})

    assert own["state"] == "ok", own["why"]
    assert found["state"] == "op from elsewhere"
    assert found["why"] == f"ghost was registered after {site.file} was loaded"


def test_an_op_from_before_a_package_that_loads_the_extension_is_somebody_elses(
    site: Site,
) -> None:
    site.compile()
    (site.top / "pkg/__init__.py").write_text(
        f'import torch\ntorch.register("_rocm_C", "LLMM1", "{LLMM1}")\nimport pkg.ext\n'
    )

    found = site.ask()

    assert found["state"] == "op from elsewhere"
    assert found["why"] == f"LLMM1 was registered before {site.file} was loaded"


def test_another_schema_is_shown_beside_the_wanted_one(site: Site) -> None:
    site.compile(REGISTER.format(space="_rocm_C"))

    found = site.ask({"LLMM1": "LLMM1(Tensor a, int rows) -> Tensor"})

    assert found["state"] == "other schema"
    assert LLMM1 in found["why"]
    assert "int rows" in found["why"]


def test_a_crash_a_hang_and_an_exit_are_no_answer(site: Site) -> None:
    for body, told in (("*(volatile int *)0 = 1;", "signal 11"), ("exit(3);", "code 3")):
        site.compile(body, "#include <stdlib.h>")
        found = site.ask()
        assert found["state"] == "does not answer"
        assert told in found["why"]
    site.compile("for (;;) sleep(1);", "#include <unistd.h>")
    assert "no end after" in site.ask(timeout=2)["why"]


def test_a_broken_torch_and_a_broken_package_are_told_apart(site: Site) -> None:
    site.compile()
    (site.top / "pkg/__init__.py").write_text("import nothing_like_that\n")
    assert site.ask()["state"] == "package does not import"
    (site.top / "torch/__init__.py").write_text("raise ImportError('libgalaxyhip.so.5')\n")
    found = site.ask()
    assert found["state"] == "torch does not import"
    assert "libgalaxyhip" in found["why"]


def test_what_the_package_prints_is_not_taken_for_an_answer(site: Site) -> None:
    site.compile('puts("loud"); ' + REGISTER.format(space="_rocm_C"), "#include <stdio.h>")
    (site.top / "pkg/__init__.py").write_text('print(\'INFO: {"state": "broken"}\')\n')

    assert site.ask()["state"] == "ok"


def test_a_file_of_that_name_elsewhere_fails_gate_3(site: Site, tmp_path: Path) -> None:
    site.compile(REGISTER.format(space="_rocm_C"))
    other = tmp_path / "other"
    shutil.copytree(site.top, other)
    site.file.unlink()
    (site.top / "pkg/__init__.py").write_text(f"__path__.append('{other}/pkg')\n")

    found = site.ask()
    artefact = {"path": "pkg/ext.so", "module": "pkg.ext", "sha256": found["sha256"]}
    gate = proof.binary_installed(artefact, found["sha256"], found)

    assert "an import takes" in gate.faults[0]


def real(built: Built, tools: Tools, root: Path, extension: Extension) -> dict[str, Any]:
    top = root / SITE.strip("/")
    if not top.exists():
        shutil.copytree(built.checkout.folder / "vllm", top / "vllm")
        shutil.copy(built.build.artefacts[0].file, top / "vllm")
    shutil.copy(tools.env_script, root / "env.sh")
    probe = OpsProbe(
        TreeReader(str(root), SITE), [extension], python=str(tools.python),
        env_script="/env.sh", env={"PYTHONPATH": str(top)},
    )  # fmt: skip
    return probe.finish(120)[0]


WANTED = Extension(module=EXTENSION.module, namespace=EXTENSION.namespace, ops=dict(EXTENSION.ops))


@pytest.mark.hip
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_extension_passes_gates_3_and_4_with_its_schemas(
    built: Built, tools: Tools, tmp_path: Path
) -> None:
    found = real(built, tools, tmp_path / "root", WANTED)
    row = built.build.evidence["artefacts"][0]

    assert found["state"] == "ok", found["why"]
    assert found["schemas"]["LLMM1"] == EXTENSION.ops["LLMM1"]
    assert found["torch"] == built.build.evidence["toolchain"]["torch"]["version"]
    assert proof.ops_registered([found]).faults == ()
    assert proof.binary_installed(row, row["sha256"], found).faults == ()


@pytest.mark.hip
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_torch_refuses_two_owners_of_a_namespace(
    built: Built, tools: Tools, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    real(built, tools, root, WANTED)
    package = root / SITE.strip("/") / "vllm/__init__.py"
    package.write_text("import torch\nLIB = torch.library.Library('_rocm_C', 'DEF')\n")

    clash = real(built, tools, root, WANTED)
    package.write_text("")
    ops = {"LLMM1": "LLMM1(Tensor a) -> Tensor"}
    wanted = Extension(module=EXTENSION.module, namespace=EXTENSION.namespace, ops=ops)
    other = real(built, tools, root, wanted)

    assert clash["state"] == "namespace clash"
    assert "_rocm_C" in clash["why"]
    assert other["state"] == "other schema"
