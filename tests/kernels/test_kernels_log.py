"""What a build log says, quiet or verbose, coloured, cut off, or with carriage returns."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from deploy.kernels import log, ninja, proof

CLANG = "/usr/bin/ccache /opt/dtk/llvm/bin/clang++ -DX=1 -O3 {arch} -fPIC -MD -MF a.d"
LINKER = "/opt/dtk/hip/bin/hipcc_cmake_linker_helper /opt/dtk/llvm/bin"
KO = "CMakeFiles/e.dir/k.hip.o"
VERBOSE = f"""\
[1/5] cd /b && /usr/bin/python3 /s/cmake/hipify.py -p /s/csrc -o /b/csrc csrc/rocm/k.cu
/b/csrc/rocm/inc.cuh -> /b/csrc/rocm/inc_hip.cuh [ok]
/b/csrc/rocm/k.cu -> /b/csrc/rocm/k.hip [skipped, already hipified]
/b/csrc/rocm/u.cu -> /b/csrc/rocm/u.hip [skipped, no changes]
\x1b[92mSuccessfully preprocessed all matching files.\x1b[0m
Total number of unsupported CUDA function calls: 0


Total number of replaced kernel launches: 15
/b/csrc/rocm/k.hip
[2/5] {CLANG.format(arch="--offload-arch=gfx936")} -o {KO} -x hip -c /b/csrc/rocm/k.hip
[3/5] /usr/bin/c++ -DY -std=gnu++17 -o CMakeFiles/e.dir/t.cpp.o -c /s/csrc/rocm/torch_bindings.cpp
[4/5] : && {LINKER} --hip-link k.o t.o -o _rocm_C.abi3.so -shared && :
"""
QUIET = """\
[1/4] Running hipify on _rocm_C extension source files.
[2/4] Building HIP object CMakeFiles/_rocm_C.dir/csrc/rocm/k.hip.o
[3/4] Building CXX object CMakeFiles/_rocm_C.dir/csrc/rocm/torch_bindings.cpp.o
[3/3] Linking HIP shared module _rocm_C.abi3.so
"""


def test_a_verbose_log_gives_files_archs_counts_and_the_link() -> None:
    found = log.read(VERBOSE)

    assert [row.ending for row in found.hipified] == [
        "ok", "skipped, already hipified", "skipped, no changes",
    ]  # fmt: skip
    assert found.hipified[0].twin == "/b/csrc/rocm/inc_hip.cuh"
    assert (found.unsupported, found.launches) == (0, 15)
    assert [(s.output, s.language, s.archs) for s in found.compiled] == [
        ("CMakeFiles/e.dir/k.hip.o", "hip", ("gfx936",)),
        ("CMakeFiles/e.dir/t.cpp.o", "cxx", ()),
    ]
    assert found.compiled[0].source == "/b/csrc/rocm/k.hip"
    assert found.linked == ("_rocm_C.abi3.so",)
    assert found.archs == ("gfx936",)
    assert found.others == ()


def test_a_quiet_log_gives_objects_but_no_arch() -> None:
    found = log.read(QUIET)

    assert [step.output.rsplit("/", 1)[-1] for step in found.compiled] == [
        "k.hip.o", "torch_bindings.cpp.o",
    ]  # fmt: skip
    assert found.linked == ("_rocm_C.abi3.so",)
    assert found.archs == ()


def test_every_spelling_of_every_arch_is_collected() -> None:
    line = CLANG.format(arch="--offload-arch=gfx906 --offload-arch gfx928 --amdgpu-target=gfx936")

    found = log.command(f"{line} -o k.o -x hip -c k.hip")

    assert found is not None
    assert found.archs == ("gfx906", "gfx928", "gfx936")


def test_carriage_returns_colours_and_dos_lines_change_nothing() -> None:
    noisy = "".join(
        f"\x1b[1mprogress 3%\x1b[0m\r\x1b[32m{line}\x1b[0m\r\n" for line in VERBOSE.splitlines()
    )

    assert log.read(noisy) == log.read(VERBOSE)


def test_an_ok_of_the_first_pass_outlives_a_skip_of_the_second() -> None:
    second = VERBOSE.replace("[ok]", "[skipped, already hipified]")

    found = log.joined([log.read(VERBOSE), log.read(second)])

    assert found.hipified[0].ending == "ok"
    assert len(found.hipified) == 3
    assert found.launches == 15


def test_a_failed_build_is_told_by_the_compilers_first_words() -> None:
    text = (
        "FAILED: CMakeFiles/e.dir/k.hip.o \n/usr/bin/ccache clang++ -c k.hip\n"
        "/b/csrc/rocm/k.hip:6:10: fatal error: 'gone.cuh' file not found\n"
        "1 error generated when compiling for gfx906.\nninja: build stopped: subcommand failed.\n"
    )
    found = proof.build_failed(log.read(text), Path("/out/build-1.log"), Path("/b"))

    assert found.what == "building CMakeFiles/e.dir/k.hip.o failed"
    assert "gone.cuh" in found.why
    assert "/out/build-1.log" in found.fix


def test_a_full_disk_in_the_log_is_told_as_one() -> None:
    text = "FAILED: k.o\nfatal error: error writing to k.o: No space left on device\n"

    found = proof.build_failed(log.read(text), Path("/l"), Path("/b"))

    assert "is full" in found.what
    assert int(found.exit) == 6


def test_a_command_line_names_every_program_it_starts() -> None:
    said = log.programs(": && /usr/bin/ccache /usr/local/cuda/bin/nvcc -c x.cu -o x.o && :")

    assert "nvcc" in said
    assert "nvcc" not in log.programs("/usr/bin/c++ -c nvcc.cpp -o nvcc.o")


def test_a_dry_run_is_asked_with_a_stand_in_for_the_step_that_always_runs(tmp_path: Path) -> None:
    (tmp_path / "CMakeFiles").mkdir()
    stand_in = tmp_path / "CMakeFiles/hipify_rocm_C"
    asked: list[bool] = []

    def ask(*args: str) -> str:
        asked.append(stand_in.exists())
        if stand_in.exists():
            return "ninja: no work to do.\n"
        return f"ninja explain: output CMakeFiles/hipify_rocm_C doesn't exist\n{QUIET}"

    assert ninja.pending(ask, tmp_path, ["_rocm_C"]) == []
    assert asked == [False, True]
    assert not stand_in.exists()


def test_a_stand_in_left_by_a_killed_call_is_removed(tmp_path: Path) -> None:
    (tmp_path / "hipify_x").touch()
    (tmp_path / ".stand-ins").write_text("hipify_x")

    ninja.clear(tmp_path)

    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=300))
def test_no_text_whatever_upsets_the_reader(text: str) -> None:
    log.read(text)


@given(st.integers(0, len(VERBOSE)))
def test_a_log_cut_off_anywhere_never_tells_more_than_the_whole(length: int) -> None:
    part, whole = log.read(VERBOSE[:length]), log.read(VERBOSE)

    assert set(part.archs) <= {"gfx936", *("gfx936"[:n] for n in range(7))}
    assert len(part.compiled) <= len(whole.compiled)
    assert len(part.hipified) <= len(whole.hipified)
