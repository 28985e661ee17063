"""What a shared object says of itself: archs from bundle ids only, symbols, damage."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import BadValues
from deploy.kernels import elf, proof, symbols
from tests.kernels.mini_room import Tools

HOST = "host-x86_64-unknown-linux--"


def device(arch: str) -> str:
    return f"hipv4-amdgcn-amd-amdhsa--{arch}"


def plain(*ids: str, body: bytes = b"\x7fELF code") -> bytes:
    """Return one offload bundle as clang writes it: table first, code objects behind it."""
    table = 24 + 8 + sum(24 + len(name) for name in ids)
    head, at = elf.BUNDLE + struct.pack("<Q", len(ids)), table
    for name in ids:
        size = 0 if name.startswith("host") else len(body)
        head += struct.pack("<QQQ", at, size, len(name)) + name.encode()
        at += size
    return head + body * sum(not name.startswith("host") for name in ids)


def packed(version: int, bundle: bytes, method: int = 0) -> bytes:
    body = zstandard.compress(bundle) if method == 1 else zlib.compress(bundle)
    if version == 1:
        return elf.COMPRESSED + struct.pack("<HHIQ", 1, method, len(bundle), 7) + body
    sizes = "<HHIIQ" if version == 2 else "<HHQQQ"
    total = 4 + struct.calcsize(sizes) + len(body)
    return elf.COMPRESSED + struct.pack(sizes, version, method, total, len(bundle), 7) + body


def joined(*bundles: bytes) -> bytes:
    """Return a section: each bundle starts on a page of its own, as the linker puts them."""
    return b"".join(bundle + bytes(-len(bundle) % 4096) for bundle in bundles)


@pytest.fixture
def library(tmp_path: Path):
    """Make a real shared object with the host's compiler, with any `.hip_fatbin`."""
    if shutil.which("gcc") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("gcc is missing: run tests/provision.sh start hip")
        pytest.skip("no gcc: run tests/provision.sh start hip")

    def make(section: bytes | None, name: str = "_rocm_C.abi3.so", code: str = "") -> Path:
        text = code or "int PyInit__rocm_C(void) { return 0; }\n"
        if section is not None:
            (tmp_path / "fatbin").write_bytes(section)
            text += (
                'asm(".section .hip_fatbin,\\"a\\"\\n.p2align 12\\n'
                f'.incbin \\"{tmp_path}/fatbin\\"\\n.previous");\n'
            )
        source = tmp_path / "made.c"
        source.write_text(text)
        argv = (
            "gcc",
            "-shared",
            "-fPIC",
            "-Wl,--build-id",
            str(source),
            "-o",
            str(tmp_path / name),
        )
        subprocess.run(argv, check=True, timeout=60)
        return tmp_path / name

    return make


def test_archs_come_from_every_bundle_and_never_from_strings(library) -> None:
    section = joined(plain(HOST, device("gfx906")), plain(HOST, device("gfx906")))
    path = library(section, code='const char *want = "gfx936 hipv4-amdgcn-amd-amdhsa--gfx936";\n')

    found = elf.read(path)

    assert found.archs == ("gfx906",)
    assert [bundle.offset for bundle in found.bundles] == [0, 4096]
    assert (
        proof.arch_fault(found.archs, len(found.bundles), "gfx936") == "it has gfx906, needs gfx936"
    )
    assert found.abi == "abi3"
    assert len(found.build_id) == 40
    assert found.runpath == ""
    assert "want" in found.exported


def test_one_foreign_bundle_among_many_is_found(library) -> None:
    others = [plain(HOST, device("gfx936"))] * 5
    path = library(joined(*others[:3], plain(HOST, device("gfx906")), *others[3:]))

    found = elf.read(path)

    assert len(found.bundles) == 6
    assert found.archs == ("gfx906", "gfx936")
    assert "needs gfx936" in proof.arch_fault(found.archs, 6, "gfx936")


def test_a_feature_in_the_id_is_another_target(library) -> None:
    found = elf.read(library(joined(plain(HOST, device("gfx936:xnack-")))))

    assert found.archs == ("gfx936:xnack-",)
    assert proof.arch_fault(found.archs, 1, "gfx936")


def test_no_device_code_at_all_is_an_error(library) -> None:
    for section in (None, joined(plain(HOST))):
        found = elf.read(library(section))
        why = proof.arch_fault(found.archs, len(found.bundles), "gfx936")
        assert "needs gfx936" in why
        assert "no device code" in why or "host only" in why


def test_an_entry_without_code_is_no_code(library) -> None:
    empty = plain(HOST, device("gfx936"), body=b"")

    alone = elf.read(library(joined(empty)))
    beside = elf.read(library(joined(plain(HOST, device("gfx936")), empty)))

    assert alone.archs == ()
    assert "host only, needs gfx936" in proof.arch_fault(alone.archs, 1, "gfx936")
    assert [bundle.ids for bundle in beside.bundles] == [(HOST, device("gfx936")), (HOST,)]


@pytest.mark.parametrize("method", [0, 1])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_compressed_bundles_are_read_and_named(library, version: int, method: int) -> None:
    one, other = plain(HOST, device("gfx936")), plain(HOST, device("gfx906"))
    section = joined(packed(version, one, method), one, packed(version, other, method))

    found = elf.read(library(section))

    name = elf.METHODS[method]
    assert [bundle.storage for bundle in found.bundles] == [name, "plain", name]
    assert found.archs == ("gfx906", "gfx936")


def test_an_unreadable_compression_is_an_error_that_names_it(library) -> None:
    bundle = plain(HOST, device("gfx936"))
    broken = packed(2, bundle, 1).replace(zstandard.FRAME_HEADER, b"none")
    for section, name in ((broken, "zstd"), (packed(2, bundle, 9), "method 9")):
        path = library(joined(section))
        with pytest.raises(BadValues, match="no usable extension") as caught:
            elf.read(path)
        assert name in caught.value.why


def test_a_damaged_bundle_is_an_error(library) -> None:
    good = plain(HOST, device("gfx936"))
    beyond = elf.BUNDLE + struct.pack("<QQQQ", 1, 1 << 40, 8, 4) + b"host"
    many = elf.BUNDLE + struct.pack("<Q", 1 << 60)
    for broken in (good[:60], beyond, many):
        with pytest.raises(BadValues, match="no usable extension") as caught:
            elf.read(library(broken))
        assert ".hip_fatbin" in caught.value.why


def test_a_cut_file_is_an_error_wherever_it_is_cut(library, tmp_path: Path) -> None:
    whole = library(joined(plain(HOST, device("gfx906")))).read_bytes()
    for length in (0, 3, 40, 64, 4096, len(whole) // 2, len(whole) - 1):
        path = tmp_path / "cut.so"
        path.write_bytes(whole[:length])
        with pytest.raises(BadValues) as caught:
            elf.read(path)
        assert "cut short" in caught.value.why or "no ELF" in caught.value.why, length


def test_a_link_an_archive_and_an_executable_are_no_extension(library, tmp_path: Path) -> None:
    path = library(joined(plain(HOST, device("gfx906"))))
    (tmp_path / "link.so").symlink_to(path)
    (tmp_path / "text.so").write_text("import torch\n")
    subprocess.run(("gcc", "-c", str(tmp_path / "made.c"), "-o", str(tmp_path / "made.so")),
                   check=True, timeout=60)  # fmt: skip
    for name, why in (("link.so", "a link"), ("text.so", "no ELF"), ("made.so", "not a shared")):
        with pytest.raises(BadValues) as caught:
            elf.read(tmp_path / name)
        assert why in caught.value.why


def test_symbols_that_no_library_of_torch_defines_are_listed(library, tmp_path: Path) -> None:
    """What an extension of another torch looks like, found without importing it."""
    names = ("_ZN2at5thereEv", "_ZN3c105aloneEv", "_ZN5torch4goneEv")
    torch_lib = tmp_path / "lib"
    torch_lib.mkdir()
    for number, name in enumerate(names[:2]):
        made = library(None, f"libtorch{number}.so", f"void {name}(void) {{}}\n")
        shutil.move(made, torch_lib)
    calls = "".join(f"void {name}(void);\n" for name in names)
    body = "".join(f"{name}();" for name in names)
    path = library(None, code=f"{calls}void use(void) {{ {body} }}\n")

    found = elf.read(path)

    assert set(names) <= set(found.undefined)
    assert symbols.missing(elf.of_torch(found), str(torch_lib)) == ["_ZN5torch4goneEv"]


def test_the_first_section_that_differs_is_named(library, tmp_path: Path) -> None:
    code = "int PyInit__rocm_C(void) {{ return {}; }}\n"
    section = joined(plain(HOST, device("gfx906")))
    one = elf.read(library(section, "one.so", code.format(1)))
    other = elf.read(library(section, "other.so", code.format(2)))
    goes = joined(plain(HOST, device("gfx906"), body=b"\x7fELF gode"))
    device_only = elf.read(library(goes, "third.so", code.format(1)))

    assert elf.first_difference(one, one) == ""
    assert elf.first_difference(one, other) in (
        "section .note.gnu.build-id differs", "section .text differs",
    )  # fmt: skip
    assert ".hip_fatbin" in elf.first_difference(one, device_only) or (
        "build-id" in elf.first_difference(one, device_only)
    )


@given(st.lists(st.sampled_from(["gfx906", "gfx936", "gfx90a:xnack-"]), max_size=6), st.data())
def test_whatever_bundles_stand_in_a_section_all_are_read(archs: list[str], data) -> None:
    bundles = [plain(HOST, device(arch)) for arch in archs]
    stored = [
        packed(data.draw(st.sampled_from([1, 2, 3])), bundle)
        if data.draw(st.booleans())
        else bundle
        for bundle in bundles
    ]

    found = elf.bundles(joined(*stored), Path("x.so"))

    assert [bundle.archs[0] for bundle in found] == archs


@pytest.mark.hip
def test_a_real_code_object_for_another_arch_is_told_apart(tools: Tools, tmp_path: Path) -> None:
    """A program that names gfx936 in a string and holds code for gfx906 only."""
    (tmp_path / "k.hip").write_text(
        'extern "C" { const char *want = "gfx936"; }\n'
        "#include <hip/hip_runtime.h>\n"
        "__global__ void k(float *a) { a[0] += 1.f; }\n"
        'extern "C" void l(float *a) { k<<<1, 64>>>(a); }\n'
    )
    argv = (str(tools.prefix / "llvm/bin/clang++"), "-x", "hip", "-fPIC", "-shared",
            "--offload-arch=gfx906", "--hip-link", "k.hip", "-o", "k.so")  # fmt: skip
    subprocess.run(argv, cwd=tmp_path, check=True, timeout=120,
                   env={**os.environ, "HIP_PLATFORM": "amd"})  # fmt: skip

    found = elf.read(tmp_path / "k.so")

    data = (tmp_path / "k.so").read_bytes()
    assert b"gfx936" in data
    assert found.archs == ("gfx906",)

    # The same code object, its header of another processor.
    at = data.index(b"\x7fELF", data.index(elf.BUNDLE)) + 48
    (tmp_path / "k.so").write_bytes(data[:at] + b"\x3f" + data[at + 1 :])
    with pytest.raises(BadValues, match="no usable extension") as caught:
        elf.read(tmp_path / "k.so")
    assert "gfx906 is for the processor of number 0x3f" in caught.value.why
