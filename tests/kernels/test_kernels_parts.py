"""The small parts of a build: archs, disks, trees, presets, twins, objects, results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.agent.plan import ABSENT, State
from deploy.errors import BadValues, Refused, Unfit
from deploy.git import Git
from deploy.kernels import (
    arch,
    ccache,
    disk,
    objects,
    outside,
    preset,
    proof,
    record,
    results,
    tree,
    twins,
)
from deploy.kernels.build import build
from deploy.kernels.log import Hipified
from deploy.kernels.request import Artefact, planned
from tests.kernels.mini_room import TOP, Checkout, Tools, request_for

NAMES = ("ARCH", "BINARY", "CCACHE", "HIP_COMPILER", "PYTHON", "ROCM", "STAGE")
VALUES = {**{name: f"<{name}>" for name in NAMES}, "JOBS": "2"}


# --- archs


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gfx928,gfx936", "it names 2 archs"),
        ("gfx928 gfx936", "it names 2 archs"),
        ("gfx928;gfx936", "it names 2 archs"),
        ("gfx936:sramecc+:xnack-", "say gfx936"),
        ("gfx936:sramecc+", "say gfx936"),
        ("GFX936", "lower case"),
        ("gfx", "written like"),
        (" gfx936", "written like"),
        ("", "written like"),
    ],
)
def test_an_arch_is_one_bare_name(text: str, why: str) -> None:
    with pytest.raises(BadValues) as caught:
        arch.asked(text)
    assert why in caught.value.why


def test_a_bare_arch_is_taken_as_it_is() -> None:
    assert arch.asked("gfx936") == "gfx936"
    assert arch.asked("gfx90a") == "gfx90a"


@pytest.mark.parametrize(
    ("device", "code", "fits"),
    [
        ("gfx90a:sramecc+:xnack-", "gfx90a", True),
        ("gfx90a:sramecc+:xnack-", "gfx90a:xnack-", True),
        ("gfx90a:sramecc+:xnack-", "gfx90a:xnack+", False),
        ("gfx906", "gfx90a", False),
        ("gfx936:sramecc+:xnack-", "gfx936", True),
        ("gfx936", "gfx936:xnack-", False),
    ],
)
def test_a_code_object_fits_by_processor_and_stated_features(
    device: str, code: str, fits: bool
) -> None:
    assert arch.fits(device, code) is fits


# --- disks

TABLE = """\
22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:30 / /home rw shared:1 - nfs4 server:/home rw
31 30 0:31 / /home/u/local\\040disk rw - xfs /dev/sdb rw
32 22 0:32 / /scratch rw - lustre mds@tcp:/x rw
33 22 0:33 / /remote rw - fuse.sshfs u@h:/ rw
34 22 0:34 / /cover rw - ext4 /dev/sdc rw
35 34 0:35 / /cover rw - cifs //s/share rw
"""


@pytest.mark.parametrize(
    ("folder", "mount", "kind", "remote"),
    [
        ("/root/build", "/", "ext4", False),
        ("/home/u/build", "/home", "nfs4", True),
        ("/home/u/local disk/build", "/home/u/local disk", "xfs", False),
        ("/homely", "/", "ext4", False),
        ("/scratch", "/scratch", "lustre", True),
        ("/remote/x", "/remote", "fuse.sshfs", True),
        ("/cover/x", "/cover", "cifs", True),
    ],
)
def test_a_folder_lies_on_the_innermost_and_uppermost_mount(
    folder: str, mount: str, kind: str, remote: bool
) -> None:
    assert disk.mount_of(Path(folder), TABLE) == (mount, kind)
    assert disk.is_remote(kind) is remote


@pytest.mark.parametrize("kind", ["nfs", "fuse", "9p", "cifs", "lustre", "gpfs", "fuse.bindfs"])
def test_each_shared_type_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's table is the outside world here: such mounts cannot be had on every machine."""
    monkeypatch.setattr(disk, "mount_of", lambda _: (str(tmp_path), kind))

    with pytest.raises(Unfit, match="no place to compile") as caught:
        disk.require_local(tmp_path / "build")

    assert kind in caught.value.why
    assert list((tmp_path / "build").iterdir()) == []


@pytest.mark.parametrize("kind", ["overlay", "ext4", "xfs", "tmpfs", "zfs"])
def test_a_local_type_that_answers_fast_is_fit(kind: str, tmp_path: Path) -> None:
    found = disk.require_local(tmp_path)

    assert 0 < found.latency_us < disk.SLOW_US
    assert not disk.is_remote(kind)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_type_that_answers_slowly_is_refused_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "SLOW_US", 0.001)

    with pytest.raises(Unfit, match="no place to compile") as caught:
        disk.require_local(tmp_path)

    assert "us on" in caught.value.why


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(Unfit, match="cannot build in /proc/none") as caught:
        disk.require_local(Path("/proc/none"))
    assert "build_dir" in caught.value.fix


# --- a machine without the toolkit


def test_without_a_toolkit_nothing_is_made_and_the_image_is_named(
    checkout: Checkout, tmp_path: Path
) -> None:
    nothing = Tools(prefix=tmp_path / "no", python=Path("/usr/bin/python3"))
    room = tmp_path / "room"

    with pytest.raises(Unfit, match="cannot look at the toolchain") as caught:
        build(request_for(nothing, checkout, room))

    assert "--where container:IMAGE" in caught.value.fix
    assert not room.exists()


# --- trees


def test_a_laid_tree_is_the_commit_byte_for_byte(checkout: Checkout, tmp_path: Path) -> None:
    """Links, modes, odd names and CR LF, with settings of git that would change the bytes."""
    folder = checkout.folder
    checkout.git("config", "core.autocrlf", "true")
    (folder / "crlf.txt").write_bytes(b"a\r\nb\n")
    (folder / "a file.cu").write_bytes(b"x")
    (folder / os.fsdecode(b"n\xff.h")).write_bytes(b"x")
    (folder / "run.sh").write_bytes(b"#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("CMakeLists.txt")
    (folder / ".gitattributes").write_text("*.txt eol=crlf\n")
    head = checkout.commit("odd files")

    laid = tree.lay(Git(folder), head, tmp_path / "src")

    assert laid.tree == checkout.git("rev-parse", f"{head}^{{tree}}")
    assert (tmp_path / "src/link").is_symlink()
    assert (tmp_path / "src/run.sh").stat().st_mode & 0o777 == 0o755


def test_laying_again_writes_only_what_differs_and_removes_the_rest(
    checkout: Checkout, tmp_path: Path
) -> None:
    source = tmp_path / "src"
    tree.lay(Git(checkout.folder), checkout.base, source)
    (source / "csrc/rocm/ops.h").write_text("edited by hand")
    (source / "left.hip").write_text("left over")
    (source / "vllm/__init__.py").unlink()
    (source / "vllm/__init__.py").mkdir()
    (source / "vllm/__init__.py/x").write_text("a folder in a file's place")

    laid = tree.lay(Git(checkout.folder), checkout.base, source)

    assert laid.written == ("csrc/rocm/ops.h", "vllm/__init__.py")
    assert laid.removed == ("left.hip", "vllm/__init__.py/x")
    assert tree.lay(Git(checkout.folder), checkout.base, source).written == ()


def test_a_link_in_the_place_of_a_folder_is_not_written_through(
    checkout: Checkout, tmp_path: Path
) -> None:
    source, outside = tmp_path / "src", tmp_path / "outside"
    outside.mkdir()
    source.mkdir()
    (source / "csrc").symlink_to(outside)

    tree.lay(Git(checkout.folder), checkout.base, source)

    assert list(outside.iterdir()) == []
    assert not (source / "csrc").is_symlink()


@pytest.mark.parametrize("target", ["/etc/hostname", "../../../out.cu", "../loop/../../out.cu"])
def test_a_link_out_of_the_tree_is_refused(target: str, checkout: Checkout, tmp_path: Path) -> None:
    (checkout.folder / "csrc/loop").symlink_to("../csrc")
    (checkout.folder / "csrc/rocm/near.h").symlink_to("../loop/core/scale.h")
    (checkout.folder / "csrc/rocm/not-there").symlink_to("nothing")
    tree.lay(Git(checkout.folder), checkout.commit("links within"), tmp_path / "src")
    (checkout.folder / "csrc/rocm/far.cu").symlink_to(target)
    head = checkout.commit("a link out")

    with pytest.raises(BadValues, match="leads out") as caught:
        tree.lay(Git(checkout.folder), head, tmp_path / "src")

    assert caught.value.why == f"csrc/rocm/far.cu -> {target}"


def test_a_commit_that_is_not_there_is_named(checkout: Checkout, tmp_path: Path) -> None:
    with pytest.raises(BadValues, match="cannot lay out commit"):
        tree.lay(Git(checkout.folder), "1" * 40, tmp_path / "src")


@settings(max_examples=25)
@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "b", "a.b", "a-b", "ü", "a0"]), min_size=1, max_size=3).map(
            "/".join
        ),
        st.binary(max_size=3),
        max_size=8,
    )
)
def test_a_tree_id_is_the_one_that_git_gives(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    parents = {p[: i] for p in files for i, c in enumerate(p) if c == "/"}  # fmt: skip
    files = {path: data for path, data in files.items() if path not in parents}
    folder = tmp_path_factory.mktemp("tree")
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    listing = tree.scan(folder)
    for argv in (("init", "-q"), ("add", "-A", "-f"), ("write-tree",)):
        done = subprocess.run(("git", "-C", str(folder), *argv), env=env, check=True,
                              capture_output=True, text=True, timeout=60)  # fmt: skip

    assert tree.tree_id(listing) == done.stdout.strip()


# --- presets


@pytest.mark.parametrize("name", preset.names(TOP / "kernels"))
def test_each_preset_of_the_project_renders_and_has_its_own_name(name: str) -> None:
    found = preset.render(TOP / "kernels", name, VALUES)

    configure = found.document["configurePresets"][0]
    assert configure["name"] == name
    assert configure["environment"]["PYTORCH_ROCM_ARCH"] == "<ARCH>"
    assert "PYTORCH_ROCM_ARCH" not in configure["cacheVariables"]
    assert found.document["buildPresets"][0]["jobs"] == 2
    assert found.needs == "3.21"
    assert "@" not in found.text


def test_an_unknown_preset_and_an_unknown_value_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadValues) as caught:
        preset.render(TOP / "kernels", "rocm-debug", VALUES)
    assert "rocm-release, rocm-release-dtk" in caught.value.why

    document = {"preset": {"version": 3, "configurePresets": [{"name": "@WHAT@"}]}}
    (tmp_path / "mine.json").write_text(json.dumps(document))
    with pytest.raises(BadValues, match="uses @WHAT@"):
        preset.render(tmp_path, "mine", VALUES)


def test_a_folder_with_a_dollar_is_no_macro_of_cmake() -> None:
    found = preset.render(TOP / "kernels", "rocm-release", {**VALUES, "BINARY": "/b/$env{HOME}"})

    assert found.document["configurePresets"][0]["binaryDir"] == "/b/${dollar}env{HOME}"


def test_a_presets_file_of_an_unknown_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "CMakePresets.json").write_text('{"version": 99, "configurePresets": []}')
    found = preset.render(TOP / "kernels", "rocm-release", VALUES)

    with (
        pytest.raises(BadValues, match=r"CMakePresets\.json cannot be read") as caught,
        preset.placed(found, tmp_path),
    ):
        pass

    assert "99" in caught.value.why
    assert json.loads((tmp_path / "CMakePresets.json").read_text())["version"] == 99


def test_the_same_name_in_a_users_presets_file_is_refused(tmp_path: Path) -> None:
    found = preset.render(TOP / "kernels", "rocm-release", VALUES)
    document = {"version": 3, "configurePresets": [{"name": "rocm-release"}]}
    (tmp_path / "CMakeUserPresets.json").write_text(json.dumps(document))

    with (
        pytest.raises(BadValues, match="already has a preset") as caught,
        preset.placed(found, tmp_path),
    ):
        pass

    assert "CMakeUserPresets.json" in caught.value.why
    assert not (tmp_path / "CMakePresets.json").exists()


# --- twins

SOURCE = """\
#include <cuda_runtime.h>
#include "inc.cuh"
// 3 times, cudaMalloc
__global__ void k(float* a, __nv_bfloat16 b) { a[0] += 1.5f * std::exp(a[1]); }
void l(float* a, cudaStream_t s) { k<<<1, 64, 0, s>>>(a, b); cudaFree(a); }
"""
TWIN = """\
// !!! This is a file automatically generated by hipify!!!
#include "hip/hip_runtime.h"
#include <hip/hip_runtime.h>
#include "inc_hip.cuh"
// 3 times, hipMalloc
__global__ void k(float* a, __hip_bfloat16 b) { a[0] += 1.5f * ::exp(a[1]); }
void l(float* a, hipStream_t s) {
hipLaunchKernelGGL(( k), dim3(1), dim3(64), 0, s, a, b); hipFree(a); }
"""


def test_a_twin_is_that_of_its_source_and_of_no_edited_one() -> None:
    assert twins.corresponds(SOURCE, TWIN) == ""
    for old, new in (("1.5f", "1.25f"), ("64", "128"), ("a[1]", "a[2]"), ("void l", "void m")):
        assert twins.corresponds(SOURCE.replace(old, new), TWIN) != "", old


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("csrc/rocm/k.cu", ("csrc/rocm/k.cu", "csrc/rocm/k.hip", "csrc/rocm/k_hip.hip")),
        ("csrc/inc.cuh", ("csrc/inc.cuh", "csrc/inc_hip.cuh")),
        (
            "csrc/cuda/cuda_view.cu",
            ("csrc/cuda/cuda_view.cu", "csrc/hip/hip_view.hip", "csrc/hip/hip_view_hip.hip"),
        ),
    ],
)
def test_the_names_of_a_twin_follow_the_converters_rules(path: str, names: tuple[str]) -> None:
    assert twins.names(path) == names


def test_copies_twins_and_left_overs_are_compared_by_content(tmp_path: Path) -> None:
    source, binary = tmp_path / "src", tmp_path / "build"
    for root in (source, binary):
        (root / "csrc").mkdir(parents=True)
        (root / "csrc/k.cu").write_text(SOURCE)
        (root / "csrc/inc.cuh").write_text("int x;\n")
    (binary / "csrc/k.hip").write_text(TWIN)
    rows = [Hipified(f"{binary}/csrc/k.cu", f"{binary}/csrc/k.hip", "skipped, already hipified")]
    paths = ["csrc/k.cu", "csrc/inc.cuh"]
    assert twins.faults(source, binary, rows, paths) == []

    (source / "csrc/inc.cuh").write_text("int y;\n")
    (binary / "csrc/gone.hip").write_text("of a source that was deleted")
    (binary / "csrc/k.hip").write_text(TWIN.replace("1.5f", "2.5f"))
    found = {fault.path: fault.why for fault in twins.faults(source, binary, rows, paths)}

    assert set(found) == {"csrc/inc.cuh", "csrc/gone.hip", "csrc/k.hip"}
    assert "1.5f" in found["csrc/k.hip"]


@pytest.mark.hip
@pytest.mark.slow
def test_the_real_converter_agrees_with_the_comparison(tools: Tools, tmp_path: Path) -> None:
    """Every header and source of torch's own CUDA parts, converted by the real hipify."""
    code = (
        "import sys, pathlib, torch\n"
        "from torch.utils.hipify.hipify_python import hipify\n"
        "top = pathlib.Path(torch.__file__).parent / 'include/ATen'\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "for path in sorted(top.rglob('*.cuh'))[:150]:\n"
        "    target = out / path.relative_to(top)\n"
        "    target.parent.mkdir(parents=True, exist_ok=True)\n"
        "    target.write_bytes(path.read_bytes())\n"
        "done = hipify(str(out), output_directory=str(out), includes=[str(out) + '/*'],\n"
        "              is_pytorch_extension=True, show_progress=False)\n"
        "for path, row in done.items(): print(path, row.hipified_path, sep='\\t')\n"
    )
    done = subprocess.run((str(tools.python), "-c", code, str(tmp_path)), check=True,
                          capture_output=True, text=True, timeout=240)  # fmt: skip
    pairs = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    changed = [(a, b) for a, b in pairs if b not in (a, "None")]

    wrong = {a: why for a, b in changed
             if (why := twins.corresponds(Path(a).read_text(), Path(b).read_text()))}  # fmt: skip

    assert len(changed) > 20
    assert wrong == {}


# --- objects

DEPS = """\
CMakeFiles/e.dir/k.hip.o: #deps 3, deps mtime 17 (VALID)
    csrc/k.hip
    /b/csrc/inc_hip.cuh
    /usr/include/stdio.h

CMakeFiles/e.dir/t.cpp.o: #deps 2, deps mtime 18 (VALID)
    /s/csrc/t.cpp
    ../s/csrc/ops.h
"""
OUTSIDE = ("/opt/include/", "/usr/include/stdio.h")


def test_ninjas_dependencies_are_named_by_folder_and_foreign_ones_by_their_path() -> None:
    found = objects.dependencies(DEPS, Path("/b"), Path("/s"), ["/opt/include/"])

    assert [(item.path[-7:], item.inputs) for item in found] == [
        ("k.hip.o", (*OUTSIDE, "build/csrc/inc_hip.cuh", "build/csrc/k.hip")),
        ("t.cpp.o", ("/opt/include/", "src/csrc/ops.h", "src/csrc/t.cpp")),
    ]


def test_headers_are_looked_for_where_commands_and_environment_say() -> None:
    commands = (
        'ccache c++ -I/s/csrc -I. -isystem /opt/torch/include "-DNAME=-I/no" -iquote "/opt/a b"\n'
        "clang++ -I/opt/torch/include/ -idirafter ../opt/late -Iin -I/s/.. -c k.hip\n"
    )
    env = {"CPATH": "/opt/env::/opt/torch/include", "CPLUS_INCLUDE_PATH": "/b/generated",
           "ROCM_PATH": "/opt/rocm"}  # fmt: skip

    found = objects.searched(commands, env, Path("/b"), Path("/s"))

    assert found == (
        "/opt/a b/",
        "/opt/env/",
        "/opt/late/",
        "/opt/rocm/include/",
        "/opt/torch/include/",
        "/usr/local/include/",
    )


@settings(max_examples=20, deadline=None)
@given(names=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1)))
def test_any_names_reach_the_digests_of_what_lies_outside(names: list[str]) -> None:
    code = Path(outside.__file__).read_text("utf-8")
    argv = (sys.executable, "-I", "-S", "-c", code, *outside.packed(names))

    said = subprocess.run(argv, cwd="/", check=True, capture_output=True, text=True).stdout

    digests = json.loads(said.rsplit(outside.MARK, 1)[1])
    assert len(digests) == len(names)


def test_a_folder_is_told_by_its_names_and_a_file_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.h").write_text("1")
    names = f"{tmp_path}/", f"{tmp_path}/deep/a.h"
    first = [outside.digest_of(name) for name in names]

    (tmp_path / "deep/a.h").write_text("2")
    os.utime(tmp_path / "deep/a.h", (1, 1))
    other_bytes = [outside.digest_of(name) for name in names]
    (tmp_path / "deep/b.h").write_text("")
    other_names = outside.digest_of(names[0])

    assert other_bytes[0] == first[0]
    assert other_bytes[1] != first[1]
    assert other_names != first[0]
    assert outside.digest_of(f"{tmp_path}/none.h") == "absent"


def test_an_object_is_stale_when_it_or_an_input_has_other_bytes(tmp_path: Path) -> None:
    binary, source = tmp_path / "build", tmp_path / "src"
    for path in (binary / "a.o", binary / "k.hip", source / "k.h"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("1")
    item = objects.Object("a.o", ("/usr/include/k.h", "build/k.hip", "src/k.h"))
    there = {"/usr/include/k.h": "1"}
    known = {"a.o": objects.Contents(binary, source, there).all_of(item)}
    assert objects.stale([item], known, objects.Contents(binary, source, there)) == ()
    other = {"/usr/include/k.h": "2"}
    assert objects.stale([item], known, objects.Contents(binary, source, other)) == (item,)

    for path in (binary / "a.o", binary / "k.hip", source / "k.h"):
        path.write_text("2")
        assert objects.stale([item], known, objects.Contents(binary, source, there)) == (item,)
        path.write_text("1")
    (source / "k.h").unlink()
    assert objects.stale([item], known, objects.Contents(binary, source, there)) == (item,)


# --- the rest


def test_no_file_and_no_script_sets_anything_of_the_cache(tmp_path: Path) -> None:
    """`ignore_options` in any of its files would give the object of another definition."""
    program = shutil.which("ccache")
    if program is None:
        pytest.skip("no ccache: run tests/provision.sh start hip")
    for name in ("none.conf", "ccache.conf", "home/.config/ccache/ccache.conf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("ignore_options = -D*\n")
    script = {"HOME": str(tmp_path / "home"), "CCACHE_IGNOREOPTIONS": "-D*", "CCACHE_DIRECT": "1"}
    env = ccache.without(script) | ccache.environment(tmp_path, 2**30, tmp_path, "id")

    said = subprocess.run(
        (program, "--show-config"), env=env, check=True, capture_output=True, text=True
    ).stdout.splitlines()

    assert [line for line in said if not line.startswith(("(default)", "(environment)"))] == []
    assert "(default) ignore_options = " in said
    assert "(environment) direct_mode = false" in said


def test_hits_misses_and_uncacheable_calls_are_differences() -> None:
    before = {"direct_cache_hit": 2, "cache_miss": 5}
    after = {"direct_cache_hit": 3, "preprocessed_cache_hit": 1, "cache_miss": 5,
             "unsupported_compiler_option": 4}  # fmt: skip

    assert ccache.difference(before, after) == {"hits": 2, "misses": 0, "uncacheable": 4}


def test_a_cold_cache_for_a_known_source_is_a_warning(tmp_path: Path) -> None:
    cold = {"hits": 0, "misses": 3}
    assert "CCACHE_BASEDIR" in ccache.warnings(tmp_path, cold, warm=True)[0]
    assert ccache.warnings(tmp_path, cold, warm=False) == []
    assert ccache.warnings(tmp_path, {"hits": 1, "misses": 2}, warm=True) == []


def test_an_extension_that_nothing_imports_is_said_so(
    tools: Tools, checkout: Checkout, tmp_path: Path
) -> None:
    """The fork: the import and the entry of setup.py are comments."""
    request = request_for(tools, checkout, tmp_path)
    tree.lay(Git(checkout.folder), checkout.base, request.source)
    assert proof.imports(request) == []
    checkout.edit("vllm/platforms/rocm.py", "import vllm._rocm_C", "pass  # import vllm._rocm_C")
    head = checkout.edit("setup.py", '    "CMake', '    # "CMake')
    tree.lay(Git(checkout.folder), head, request.source)

    found = proof.imports(request)

    assert "nothing below vllm/ imports vllm._rocm_C" in found[0]
    assert "setup.py leaves vllm._rocm_C out" in found[1]


def test_a_record_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"schema": "other"}', '{"schema": "build-record/1", "x": 1}'):
        (tmp_path / record.FILE).write_text(text)
        assert record.read(tmp_path).complete is False
        assert record.read(tmp_path).asked == {}


def test_results_that_find_no_room_are_told_by_their_own_folder(
    checkout: Checkout, tmp_path: Path
) -> None:
    """And what stopped a build is told before that its logs found no room."""
    request = request_for(Tools(tmp_path, tmp_path), checkout, tmp_path)
    (request.build_dir / "logs").mkdir(parents=True)
    (request.build_dir / "logs/build-1.log").write_bytes(bytes(300_000))
    made = tmp_path / "made.so"
    made.write_bytes(bytes(300_000))
    artefact = Artefact(
        module="vllm._rocm_C", path="vllm/_rocm_C.so", mode="0755", size=300_000,
        sha256="1" * 64, file=made,
    )  # fmt: skip
    request.out.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(request.out))
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("no right to mount a small file system")
    try:
        with pytest.raises(Unfit, match="cannot write to") as logs, results.logs_kept(request):
            pass
        with pytest.raises(Unfit, match="cannot write to") as taken:
            results.collect(request, [artefact], {})
        with pytest.raises(BadValues, match="stopped"), results.logs_kept(request):
            raise BadValues("stopped", why="why", fix="fix")
    finally:
        subprocess.run(("umount", str(request.out)), check=True)

    for caught in (logs, taken):
        assert str(request.out) in str(caught.value)
        assert "No space left" in caught.value.why


def test_an_artefact_in_the_plan_expects_the_base_or_nothing(tmp_path: Path) -> None:
    artefact = Artefact(module="vllm._rocm_C", path="vllm/_rocm_C.abi3.so", mode="0755", size=3,
                        sha256="a" * 64, file=tmp_path)  # fmt: skip
    base = State(type="file", mode="0755", sha256="b" * 64, size=4)

    entry = planned(artefact, base)

    assert (entry.role, entry.want.sha256, entry.want.mode) == ("extension", "a" * 64, "0755")
    assert entry.assume == (base, ABSENT)
    assert planned(artefact, ABSENT).assume == (ABSENT,)


@pytest.mark.slow
def test_a_build_that_was_killed_holds_its_folder_until_its_compilers_end(tmp_path: Path) -> None:
    """Two builds in one folder would each take what the other writes."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from deploy.kernels.record import locked\n"
        "from deploy.kernels.runner import Local\n"
        "folder, runner = Path(sys.argv[2]), Local()\n"
        "with locked(folder) as lock:\n"
        "    runner.hold(lock)\n"
        "    argv = ('/bin/sh', '-c', 'echo up > up; sleep 4')\n"
        "    runner.run(argv, env={'PATH': '/bin'}, cwd=folder, log=folder / 'log', seconds=60)\n"
    )
    child = subprocess.Popen((sys.executable, "-c", code, str(TOP), str(tmp_path)))
    while not (tmp_path / "up").exists():
        assert child.poll() is None
        time.sleep(0.02)
    child.kill()
    child.wait(timeout=30)

    with (
        pytest.raises(Refused, match="another build runs") as caught,
        record.locked(tmp_path),
    ):
        pass
    assert str(child.pid) in caught.value.why

    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with record.locked(tmp_path):
                return
        except Refused:
            time.sleep(0.1)
    pytest.fail("the folder stayed locked")
