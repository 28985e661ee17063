"""The real toolchain builds the mini tree: what comes out is fresh, proved, and never half done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.errors import BadValues, Refused, Unfit
from deploy.kernels import build as builds
from deploy.kernels import record, results, tree
from deploy.kernels.build import audit, build
from tests.kernels.conftest import Built
from tests.kernels.mini_room import ARCH, TOP, Checkout, Tools, call_op, request_for

pytestmark = [pytest.mark.hip, pytest.mark.slow, pytest.mark.timeout(600)]

GEMM = "csrc/rocm/skinny_gemms.cu"
BINDINGS = "csrc/rocm/torch_bindings.cpp"
SCALE = "csrc/core/scale.h"
CALL = (
    "import torch, vllm._rocm_C;"
    "print(torch.ops._rocm_C.LLMM1(torch.ones(2, 3), torch.tensor([[1., 2., 4.]]), 4).tolist())"
)


def site_of(request_out: Path, checkout: Checkout) -> Path:
    """Lay the package of the checkout around the collected artefact."""
    site = request_out.parent / "site"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(checkout.folder / "vllm", site / "vllm")
    shutil.copy(request_out / "vllm/_rocm_C.abi3.so", site / "vllm")
    return site


def compiled(evidence: object) -> set[str]:
    assert isinstance(evidence, dict)
    return {Path(step["output"]).name for step in evidence["log"]["compiled"]}


def test_the_artefact_is_imported_and_its_op_gives_the_right_numbers(
    built: Built, tools: Tools
) -> None:
    site = site_of(built.request.out, built.checkout)

    assert call_op(tools, site, CALL) == "[[7.0, 7.0]]"


def test_the_evidence_names_tools_archs_hits_and_every_bundle(built: Built) -> None:
    said = built.build.evidence

    assert said["commands"] == [ARCH]
    assert said["log"]["launches"] == 2
    assert said["log"]["unsupported"] == 0
    assert compiled(said) == {"skinny_gemms.hip.o", "attention.hip.o", "torch_bindings.cpp.o"}
    assert said["log"]["linked"] == ["_rocm_C.abi3.so"]
    facts = said["artefacts"][0]["elf"]
    assert facts["archs"] == [ARCH]
    assert len(facts["bundles"]) == 2
    assert said["environment"]["PYTORCH_ROCM_ARCH"] == ARCH
    assert said["environment"]["HIP_PLATFORM"] == "amd"
    assert len(said["toolchain"]["bitcode"]) > 10
    assert said["incidental"]["ccache"]["this_build"] == {"hits": 0, "misses": 3, "uncacheable": 0}
    assert (
        json.loads((built.request.out / results.DOCUMENT).read_text())["commit"] == said["commit"]
    )


def test_nothing_of_the_operators_own_environment_takes_part(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXXFLAGS", "-DFROM_THE_SHELL")
    monkeypatch.setenv("PYTHONPATH", "/from/the/shell")
    monkeypatch.setenv("PATH", f"/usr/local/cuda/bin:{os.environ['PATH']}")

    again = build(built.request)

    assert again.evidence["rebuilt"] is False
    assert "FROM_THE_SHELL" not in json.dumps(again.evidence)


def test_a_second_call_does_nothing_and_an_audit_finds_nothing(built: Built) -> None:
    before = {p: p.stat().st_mtime_ns for p in built.request.binary.rglob("*") if p.is_file()}

    again = build(built.request)
    found = audit(built.request)

    assert again.evidence["rebuilt"] is False
    assert again.artefacts == built.build.artefacts
    assert found.faults == ()
    after = {p: p.stat().st_mtime_ns for p in built.request.binary.rglob("*") if p.is_file()}
    assert after == before


def test_every_edit_reaches_the_binary_whatever_time_its_file_has(
    built: Built, tools: Tools, room: Path
) -> None:
    """A .cu, a header and the bindings, each with a time from long ago."""
    checkout = built.checkout
    request = request_for(tools, checkout, room, ccache_dir=built.ccache)
    build(request)
    edits = (
        (GEMM, "float sum = 0.0f", "float sum = 1.0f", "[[8.0, 8.0]]", {"skinny_gemms.hip.o"}),
        (
            SCALE,
            "MINI_SCALE = 1.0f",
            "MINI_SCALE = 2.0f",
            "[[16.0, 16.0]]",
            {"skinny_gemms.hip.o"},
        ),
        (BINDINGS, "at::empty({1,", "at::empty({2,", "", {"torch_bindings.cpp.o"}),
    )
    start = checkout.git("rev-parse", "HEAD")
    for path, old, new, answer, objects in edits:
        head = checkout.edit(path, old, new)
        # What an archive unpacked with its old times would leave in the source folder.
        shutil.copy(checkout.folder / path, request.source / path)
        os.utime(request.source / path, (1, 1))

        done = build(request_for(tools, checkout, room, head, ccache_dir=built.ccache,
                                 changed=(path,)))  # fmt: skip

        assert compiled(done.evidence) == objects, path
        assert set(map(os.path.basename, done.evidence["sources"][path])) == objects, path
        if answer:
            assert call_op(tools, site_of(request.out, checkout), CALL) == answer
    checkout.git("reset", "-q", "--hard", start)


def test_a_second_checkout_hits_and_gives_the_same_bytes(
    built: Built, tools: Tools, room: Path
) -> None:
    request = request_for(tools, built.checkout, room, built.request.head, ccache_dir=built.ccache)

    done = build(request)

    assert done.evidence["incidental"]["ccache"]["this_build"]["hits"] == 3
    assert done.artefacts[0].sha256 == built.build.artefacts[0].sha256


def test_a_header_that_comes_first_from_now_on_reaches_the_binary(
    built: Built, tools: Tools, checkout: Checkout, room: Path
) -> None:
    """No list of what was read the last time names it: not ninja's, and not the cache's."""
    build(request_for(tools, checkout, room, ccache_dir=built.ccache))
    (checkout.folder / "csrc/rocm/core").mkdir()
    text = (checkout.folder / SCALE).read_text().replace("1.0f", "7.0f")
    (checkout.folder / "csrc/rocm/core/scale.h").write_text(text)
    head = checkout.commit("shadow a header")

    request = request_for(tools, checkout, room, head, ccache_dir=built.ccache)
    done = build(request)

    assert call_op(tools, site_of(request.out, checkout), CALL) == "[[49.0, 49.0]]"
    assert done.evidence["incidental"]["ccache"]["this_build"] == {
        "hits": 2,
        "misses": 1,
        "uncacheable": 0,
    }


def test_a_header_outside_reaches_the_binary_whatever_time_it_has(
    built: Built, tools: Tools, checkout: Checkout, room: Path
) -> None:
    """One that env_script's CPATH finds is changed; then one that comes before it is put there."""
    first, second = room / "first", room / "second"
    for folder in (first, second):
        folder.mkdir()
    (second / "bias.h").write_text("#define BIAS 1.0f\n")
    (room / "env.sh").write_text(f'. "{tools.env_script}"\nexport CPATH="{first}:{second}"\n')
    checkout.edit(GEMM, "#include <cuda_runtime.h>", "#include <bias.h>\n#include <cuda_runtime.h>")
    head = checkout.edit(GEMM, "sum = 0.0f", "sum = BIAS")
    request = request_for(tools, checkout, room, head, ccache_dir=built.ccache,
                          env_script=str(room / "env.sh"))  # fmt: skip
    build(request)
    assert audit(request).faults == ()

    (second / "bias.h").write_text("#define BIAS 2.0f\n")
    os.utime(second / "bias.h", (1, 1))
    changed = audit(request).faults
    done = build(request)
    (first / "bias.h").write_text("#define BIAS 3.0f\n")
    os.utime(first / "bias.h", (1, 1))
    shadowed = audit(request).faults

    assert [fault.rsplit("/", 1)[-1] for fault in changed] == [
        "skinny_gemms.hip.o was compiled from other text"
    ]
    assert compiled(done.evidence) == {"skinny_gemms.hip.o"}
    assert call_op(tools, site_of(request.out, checkout), CALL) == "[[9.0, 9.0]]"
    assert len(shadowed) == 3


def test_a_deleted_header_takes_its_copy_and_twin_along(
    built: Built, tools: Tools, room: Path, tmp_path: Path
) -> None:
    checkout = Checkout(tmp_path / "own")
    build(request_for(tools, checkout, room, ccache_dir=built.ccache))
    assert (room / "build-dir/build/csrc/core/shape_hip.cuh").exists()
    (checkout.folder / "csrc/core/shape.cuh").unlink()
    head = checkout.commit("delete a header that is still included")

    with pytest.raises(BadValues, match=r"building .*\.o failed") as caught:
        build(request_for(tools, checkout, room, head, ccache_dir=built.ccache))

    assert "shape.cuh" in caught.value.why
    assert not (room / "build-dir/build/csrc/core/shape_hip.cuh").exists()
    assert (room / "out/logs/build-1.log").exists()
    assert not (room / "out/kernels.json").exists()
    assert not (room / "out/vllm").exists()


def test_a_changed_device_library_is_no_cache_hit(built: Built, tools: Tools, room: Path) -> None:
    """The compiler cache does not look at bitcode, which is linked into every kernel."""
    libraries = tools.prefix / "amdgcn/bitcode"
    library, other = libraries / "oclc_daz_opt_off.bc", libraries / "oclc_daz_opt_on.bc"
    assert library.stat().st_size == other.stat().st_size
    kept = room / "kept.bc"
    shutil.copy2(library, kept)
    library.write_bytes(other.read_bytes())
    shutil.copystat(kept, library)
    request = request_for(tools, built.checkout, room, built.request.head, ccache_dir=built.ccache)
    try:
        done = build(request)
    finally:
        shutil.copy2(kept, library)

    assert done.evidence["incidental"]["ccache"]["this_build"]["hits"] == 0
    assert done.evidence["toolchain"]["digest"] != built.build.evidence["toolchain"]["digest"]


def test_another_arch_configures_from_clean_and_is_what_the_binary_holds(
    built: Built, tools: Tools, room: Path
) -> None:
    request = request_for(tools, built.checkout, room, built.request.head, ccache_dir=built.ccache)
    build(request)

    done = build(request_for(tools, built.checkout, room, built.request.head,
                             ccache_dir=built.ccache, arch="gfx90a"))  # fmt: skip

    assert "arch changed from gfx906 to gfx90a" in done.evidence["configured"][0]
    assert done.evidence["artefacts"][0]["elf"]["archs"] == ["gfx90a"]


def test_a_copied_build_folder_is_known_for_a_copy(built: Built, tools: Tools, room: Path) -> None:
    shutil.copytree(built.request.build_dir, room / "build-dir")
    request = request_for(tools, built.checkout, room, built.request.head, ccache_dir=built.ccache)

    found = audit(request)
    done = build(request)

    assert any("CMAKE_HOME_DIRECTORY" in fault for fault in found.faults)
    assert any("source changed from" in reason for reason in done.evidence["configured"])
    assert str(built.request.build_dir) not in (room / "build-dir/build/CMakeCache.txt").read_text()


def test_an_arch_that_the_source_drops_is_refused_with_its_list(
    tools: Tools, checkout: Checkout, room: Path
) -> None:
    """The list holds the arch, but the filter lets another through: rc 0, wrong code."""
    checkout.edit("CMakeLists.txt", "if(arch IN_LIST HIP_SUPPORTED_ARCHS)",
                  "if(NOT arch STREQUAL gfx1100)")  # fmt: skip
    head = checkout.edit("CMakeLists.txt", "list(APPEND wanted ${arch})",
                         "list(APPEND wanted gfx90a)")  # fmt: skip

    with pytest.raises(BadValues, match="exactly gfx906") as caught:
        build(request_for(tools, checkout, room, head))

    assert "asked: gfx906; on the command lines: gfx90a" in caught.value.why
    assert "CMakeLists.txt:6" in caught.value.why


def test_an_arch_that_the_source_does_not_know_is_refused_with_its_list(
    tools: Tools, checkout: Checkout, room: Path
) -> None:
    with pytest.raises(BadValues, match="does not support gfx1030") as caught:
        build(request_for(tools, checkout, room, arch="gfx1030"))

    assert "gfx906, gfx90a, gfx928, gfx936 (CMakeLists.txt:6" in caught.value.why
    assert not (room / "out/kernels.json").exists()


def test_a_converter_that_writes_into_the_source_is_found(
    built: Built, tools: Tools, checkout: Checkout, room: Path
) -> None:
    text = 'parser.parse_args()\n    open(asked.source + "/rocm/left.hip", "w").close()'
    head = checkout.edit("cmake/hipify.py", "parser.parse_args()", text)

    with pytest.raises(BadValues, match="changed its source folder") as caught:
        build(request_for(tools, checkout, room, head, ccache_dir=built.ccache))

    assert "csrc/rocm/left.hip" in caught.value.why


def test_a_converter_that_skips_a_changed_source_is_found(
    built: Built, tools: Tools, checkout: Checkout, room: Path
) -> None:
    """It puts back the twin of yesterday's source, as a cache beside the build would."""
    request = request_for(tools, checkout, room, ccache_dir=built.ccache)
    build(request)
    shutil.copy(room / "build-dir/build/csrc/rocm/skinny_gemms.hip", room / "old.hip")
    checkout.edit(GEMM, "float sum = 0.0f", "float sum = 5.0f")
    head = checkout.edit("cmake/hipify.py", "hipify_extra_files_only=True,\n    )",
                         "hipify_extra_files_only=True,\n    )\n    shutil.copy("
                         f"'{room}/old.hip', 'csrc/rocm/skinny_gemms.hip')")  # fmt: skip

    with pytest.raises(BadValues, match="stale") as caught:
        build(request_for(tools, checkout, room, head, ccache_dir=built.ccache))

    assert "skinny_gemms" in str(caught.value)
    assert "5.0f" in caught.value.why


def test_a_changed_source_that_no_target_compiles_is_an_error(
    built: Built, tools: Tools, checkout: Checkout, room: Path
) -> None:
    (checkout.folder / "csrc/moe").mkdir()
    (checkout.folder / "csrc/moe/other.cu").write_text("// of another extension\n")
    head = checkout.commit("edit outside the wanted target")
    request = request_for(tools, checkout, room, head, ccache_dir=built.ccache,
                          changed=("csrc/moe/other.cu", GEMM))  # fmt: skip

    with pytest.raises(BadValues, match="not compiled into anything") as caught:
        build(request)

    assert "csrc/moe/other.cu" in caught.value.why
    assert GEMM not in caught.value.why


def test_objects_ahead_of_the_clock_are_compiled_again(
    built: Built, tools: Tools, checkout: Checkout, room: Path
) -> None:
    build(request_for(tools, checkout, room, ccache_dir=built.ccache))
    ahead = time.time() + 86_400
    for path in (room / "build-dir/build").rglob("*.o"):
        os.utime(path, (ahead, ahead))
    os.utime(room / "build-dir/src" / SCALE, (ahead, ahead))
    head = checkout.edit(GEMM, "float sum = 0.0f", "float sum = 3.0f")

    done = build(request_for(tools, checkout, room, head, ccache_dir=built.ccache))

    assert "skinny_gemms.hip.o" in compiled(done.evidence)
    told = " ".join(done.evidence["warnings"])
    assert "csrc/core/scale.h" in told
    assert call_op(tools, site_of(room / "out", checkout), CALL) == "[[10.0, 10.0]]"


def test_an_interrupted_build_leaves_no_artefact_and_the_next_one_is_whole(
    built: Built, tools: Tools, checkout: Checkout, room: Path
) -> None:
    build(request_for(tools, checkout, room, ccache_dir=built.ccache))
    head = checkout.edit(GEMM, "float sum = 0.0f", "float sum = 2.0f")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from deploy.kernels.build import build\n"
        "from tests.kernels.mini_room import *\n"
        "checkout = object.__new__(Checkout)\n"
        "checkout.folder, checkout.base = Path(sys.argv[2]), sys.argv[3]\n"
        "tools = Tools(Path(sys.argv[6]), Path(sys.argv[7]))\n"
        "build(request_for(tools, checkout, Path(sys.argv[4]), sys.argv[3],"
        " ccache_dir=Path(sys.argv[5])))\n"
    )
    argv = (
        sys.executable,
        "-c",
        program,
        str(TOP),
        str(checkout.folder),
        head,
        str(room),
        str(room / "cold"),
        str(tools.prefix),
        str(tools.python),
    )
    for number in (signal.SIGINT, signal.SIGKILL):
        log = room / "build-dir/logs/build-1.log"
        log.unlink(missing_ok=True)
        child = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        _wait_for(lambda log=log: log.exists() and b"[1/" in log.read_bytes(), child)
        child.send_signal(number)
        _, err = child.communicate(timeout=60)

        assert child.returncode != 0, err
        assert not (room / "out/kernels.json").exists()
        assert not (room / "out/vllm").exists()
        assert record.read(room / "build-dir").complete is False

    _wait_for(lambda: not _mapped(room))
    done = build(request_for(tools, checkout, room, head, ccache_dir=built.ccache))

    assert done.evidence["rebuilt"] is True
    assert call_op(tools, site_of(room / "out", checkout), CALL) == "[[9.0, 9.0]]"


def _mapped(room: Path) -> list[str]:
    """Return the processes that still work below a folder (a killed build leaves its compilers)."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(entry.joinpath("cwd").readlink()).startswith(str(room)):
                found.append(entry.name)
        except OSError:
            continue
    return found


def _wait_for(
    ready: Callable[[], bool], child: subprocess.Popen[bytes] | None = None, seconds: float = 120
) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "nothing happened in time"
        if child is not None and child.poll() is not None:
            raise AssertionError(child.communicate()[1])
        time.sleep(0.05)


def test_a_full_disk_in_the_middle_is_named_and_takes_nothing(
    built: Built, tools: Tools, checkout: Checkout, room: Path
) -> None:
    small = room / "build-dir"
    small.mkdir()
    mounted = subprocess.run(
        ("mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)), check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no right to mount a small file system")
    try:
        with pytest.raises(Refused, match="is full") as caught:
            build(request_for(tools, checkout, room, ccache_dir=built.ccache))
    finally:
        subprocess.run(("umount", str(small)), check=True)

    assert "No space left" in caught.value.why or "no space left" in caught.value.why
    assert not (room / "out/kernels.json").exists()


def test_a_missing_tool_is_named_with_its_package(
    tools: Tools, checkout: Checkout, room: Path
) -> None:
    """env_script may narrow PATH; a tool that is then out of reach is missing."""
    for gone in ("ninja", "ccache", "cmake"):
        tools_left = room / f"without-{gone}"
        tools_left.mkdir()
        for folder in ("/usr/bin", "/bin"):
            for path in Path(folder).iterdir():
                link = tools_left / path.name
                if path.name != gone and not link.exists():
                    link.symlink_to(path)
        script = room / f"{gone}.sh"
        script.write_text(f'. "{tools.env_script}"\nPATH={tools_left}\n')

        with pytest.raises(Unfit, match=f"{gone} is not installed") as caught:
            build(request_for(tools, checkout, room, env_script=str(script)))

        assert "apt-get install" in caught.value.fix


def test_without_a_hip_compiler_a_cuda_one_is_named_and_not_used(
    tools: Tools, checkout: Checkout, room: Path
) -> None:
    (room / "cuda").mkdir()
    nvcc = room / "cuda/nvcc"
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    script = room / "env.sh"
    script.write_text(f"export ROCM_PATH={room}/nowhere\nPATH={room}/cuda:$PATH\n")

    with pytest.raises(Unfit, match="no HIP compiler") as caught:
        build(request_for(tools, checkout, room, env_script=str(script)))

    assert str(nvcc) in caught.value.why


def test_a_preset_of_the_same_name_in_the_source_is_refused(
    tools: Tools, checkout: Checkout, room: Path
) -> None:
    document = {"version": 3, "configurePresets": [{"name": "rocm-release", "generator": "Ninja"}]}
    (checkout.folder / "CMakePresets.json").write_text(json.dumps(document))
    head = checkout.commit("bring a preset of that name")

    with pytest.raises(BadValues, match="already has a preset named rocm-release"):
        build(request_for(tools, checkout, room, head))


def test_the_sources_own_presets_stay_and_are_given_back(
    built: Built, tools: Tools, checkout: Checkout, room: Path
) -> None:
    text = json.dumps({"version": 2, "configurePresets": [{"name": "theirs", "hidden": True}]})
    (checkout.folder / "CMakePresets.json").write_text(text)
    head = checkout.commit("bring other presets")

    build(request_for(tools, checkout, room, head, ccache_dir=built.ccache))

    assert (room / "build-dir/src/CMakePresets.json").read_text() == text
    scanned = tree.scan(room / "build-dir/src")
    assert tree.tree_id(scanned) == checkout.git("rev-parse", f"{head}^{{tree}}")


def test_a_second_build_in_the_same_folder_is_refused(
    tools: Tools, checkout: Checkout, room: Path
) -> None:
    request = request_for(tools, checkout, room)
    with (
        record.locked(request.build_dir),
        pytest.raises(Refused, match="another build runs") as caught,
    ):
        builds.build(request)

    assert str(os.getpid()) in caught.value.why


def test_a_folder_with_somebodys_files_is_left_alone(
    tools: Tools, checkout: Checkout, room: Path
) -> None:
    (room / "build-dir").mkdir()
    (room / "build-dir/thesis.tex").write_text("precious")

    with pytest.raises(Refused, match="not a build folder of ours"):
        build(request_for(tools, checkout, room))

    assert (room / "build-dir/thesis.tex").read_text() == "precious"


def test_an_old_cmake_a_failing_env_script_and_a_missing_python_are_told(
    tools: Tools, checkout: Checkout, room: Path
) -> None:
    old = room / "old/cmake"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho cmake version 3.16.3\n")
    old.chmod(0o755)
    scripts = {
        f'. "{tools.env_script}"\nPATH={old.parent}:$PATH\n': "CMake found is too old",
        "return 3\n": "cannot look at the toolchain",
        "echo loud\nexit 0\n": "cannot look at the toolchain",
    }
    for text, told in scripts.items():
        (room / "env.sh").write_text(text)
        with pytest.raises(Unfit, match=told) as caught:
            build(request_for(tools, checkout, room, env_script=str(room / "env.sh")))
        assert caught.value.fix

    with pytest.raises(Unfit, match="cannot look at the toolchain") as caught:
        build(request_for(tools, checkout, room, env_script=str(room / "none.sh")))
    assert "none.sh" in caught.value.why
    with pytest.raises(Unfit, match="cannot look at the toolchain") as caught:
        build(request_for(tools, checkout, room, python="/nowhere/python3"))
    assert "/nowhere/python3" in caught.value.why


def test_what_env_script_prints_and_exports_is_kept_apart(
    built: Built, tools: Tools, checkout: Checkout, room: Path
) -> None:
    (room / "env.sh").write_text(
        f'echo "loading"; echo "{{}}" >&2\n. "{tools.env_script}"\nexport MINI_FLAG="a b"\n'
    )
    request = request_for(tools, checkout, room, ccache_dir=built.ccache,
                          env_script=str(room / "env.sh"))  # fmt: skip

    done = build(request)

    assert done.evidence["environment"]["MINI_FLAG"] == "a b"
    assert "HOME" not in done.evidence["environment"]


def test_a_cuda_compiler_on_a_command_line_stops_before_it_runs(
    tools: Tools, checkout: Checkout, room: Path
) -> None:
    head = checkout.edit("CMakeLists.txt", "install(TARGETS",
                         'set_property(TARGET _rocm_C PROPERTY RULE_LAUNCH_COMPILE "nvcc")\n'
                         "install(TARGETS")  # fmt: skip

    with pytest.raises(BadValues, match="CUDA compiler would compile"):
        build(request_for(tools, checkout, room, head))

    assert not (room / "build-dir/logs/build-1.log").exists()


def test_two_archs_where_one_was_asked_are_refused(
    tools: Tools, checkout: Checkout, room: Path
) -> None:
    head = checkout.edit("CMakeLists.txt", "list(APPEND wanted ${arch})",
                         "list(APPEND wanted ${arch} gfx90a)")  # fmt: skip

    with pytest.raises(BadValues, match="exactly gfx906") as caught:
        build(request_for(tools, checkout, room, head))

    assert "gfx906, gfx90a" in caught.value.why


def test_a_component_that_installs_nothing_is_named(
    built: Built, tools: Tools, checkout: Checkout, room: Path
) -> None:
    head = checkout.edit("CMakeLists.txt", "COMPONENT _rocm_C", "COMPONENT other")

    with pytest.raises(BadValues, match=r"did not install vllm\._rocm_C"):
        build(request_for(tools, checkout, room, head, ccache_dir=built.ccache))

    assert not (room / "out/kernels.json").exists()


def test_a_source_that_cannot_be_configured_is_told_by_cmakes_words(
    tools: Tools, checkout: Checkout, room: Path
) -> None:
    head = checkout.edit("CMakeLists.txt", "set(hipified",
                         'message(FATAL_ERROR "no triton kernels here")\nset(hipified')  # fmt: skip

    with pytest.raises(BadValues, match="could not be configured") as caught:
        build(request_for(tools, checkout, room, head))

    assert "no triton kernels here" in caught.value.why
    assert (room / "out/logs/configure.log").exists()
