"""What a shared object proves of itself: its device code, what it needs, and what it lacks.

The archs are read from the ids of every offload bundle in `.hip_fatbin`, never from strings: a
program may well mention an arch that it holds no code for. A section holds one bundle a source
file, one behind the other; newer compilers may compress them.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.errors import BadValues

BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED = b"CCOB"
METHODS = {0: "zlib", 1: "zstd"}
FATBIN = ".hip_fatbin"
ELF_HEADER = 64
# EF_AMDGPU_MACH, as the "User Guide for AMDGPU Backend" of LLVM lists it.
MACHINES = {"gfx900": 0x2C, "gfx906": 0x2F, "gfx908": 0x30, "gfx90a": 0x3F, "gfx942": 0x4C}
# Names of torch's own libraries in an undefined symbol; everything else is the system's business.
TORCH_NAMES = ("N2at", "N3c10", "N5torch", "N6caffe2")


@dataclass(frozen=True, slots=True)
class Bundle:
    """One offload bundle: where it starts in its section, how it is stored, and the ids in it."""

    offset: int
    storage: str
    ids: tuple[str, ...]

    @property
    def archs(self) -> tuple[str, ...]:
        """The device targets, features included: hipv4-amdgcn-amd-amdhsa--gfx936 is gfx936."""
        return tuple(name.split("--", 1)[1] for name in self.ids if _is_device(name))


@dataclass(frozen=True, slots=True)
class Facts:
    """All that one file says. `sections` maps a section's name to its sha256, in file order."""

    path: Path
    size: int
    sha256: str
    build_id: str
    soname: str
    needed: tuple[str, ...]
    runpath: str
    undefined: tuple[str, ...]
    exported: frozenset[str]
    bundles: tuple[Bundle, ...]
    sections: dict[str, str] = field(default_factory=dict)

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(sorted({arch for bundle in self.bundles for arch in bundle.archs}))

    @property
    def abi(self) -> str:
        """The tag in the file's name: abi3, cpython-310-x86_64-linux-gnu, or "" for none."""
        parts = self.path.name.split(".")
        return parts[-2] if len(parts) > 2 and parts[-1] == "so" else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "sha256": self.sha256,
            "build_id": self.build_id,
            "abi": self.abi,
            "needed": list(self.needed),
            "runpath": self.runpath,
            "undefined": len(self.undefined),
            "archs": list(self.archs),
            "bundles": [[b.offset, b.storage, list(b.ids)] for b in self.bundles],
        }


def read(path: Path) -> Facts:
    """Read one shared object.

    Raises:
        BadValues: it is a link, cut short, no ELF file of this machine, or holds a bundle that
            cannot be read.
    """
    if path.is_symlink():
        raise _bad(path, f"it is a link to {path.readlink()}", "give the file itself")
    try:
        data = path.read_bytes()
    except OSError as err:
        raise _bad(path, str(err), "build it again") from err
    return _Reader(path, data).facts()


def first_difference(one: Facts, other: Facts) -> str:
    """Return in words where two builds of one source first differ; "" when nowhere."""
    if one.sha256 == other.sha256:
        return ""
    for name, sha in one.sections.items():
        if name not in other.sections:
            return f"section {name} is only in the first"
        if other.sections[name] != sha:
            return f"section {name} differs"
    extra = [name for name in other.sections if name not in one.sections]
    return f"section {extra[0]} is only in the second" if extra else "the headers differ"


def of_torch(facts: Facts) -> tuple[str, ...]:
    """Return the undefined symbols that torch's libraries must define."""
    named = ("aoti_torch_", "aten_")
    return tuple(
        name
        for name in facts.undefined
        if name.startswith(named) or (name.startswith("_Z") and _is_torch(name))
    )


def bundles(section: bytes, path: Path) -> tuple[Bundle, ...]:
    """Return every offload bundle of a section, in order."""
    found = []
    at = _next(section, 0)
    while at >= 0:
        try:
            bundle, end = _bundle(section, at)
        except (struct.error, zlib.error, ValueError, UnicodeDecodeError) as err:
            raise _bad(path, f"the bundle at {at} of {FATBIN} is damaged: {err}") from err
        found.append(bundle)
        at = _next(section, max(end, at + 4))
    return tuple(found)


class _Reader:
    def __init__(self, path: Path, data: bytes) -> None:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile

        self.path, self.data = path, data
        try:
            self.elf = ELFFile(io.BytesIO(data))
            self._check()
            self.sections = [(s.name, s) for s in self.elf.iter_sections()]
        except (ELFError, struct.error, ValueError, KeyError, TypeError, AttributeError) as err:
            raise _bad(path, self._why(err)) from err

    def _why(self, err: Exception) -> str:
        if self.data[:4] != b"\x7fELF":
            return "it is no ELF file"
        return f"it is cut short or damaged ({type(err).__name__}: {err})"

    def _check(self) -> None:
        header = self.elf.header
        end = header["e_shoff"] + header["e_shnum"] * header["e_shentsize"]
        if end > len(self.data) or not header["e_shnum"]:
            raise ValueError(f"its section table ends at {end}, the file at {len(self.data)}")
        if header["e_type"] != "ET_DYN":
            raise ValueError(f"it is {header['e_type']}, not a shared object")

    def facts(self) -> Facts:
        dynamic = self._dynamic()
        undefined, exported = self._symbols()
        fatbins = [self._bytes(s) for name, s in self.sections if name == FATBIN]
        return Facts(
            path=self.path,
            size=len(self.data),
            sha256=hashlib.sha256(self.data).hexdigest(),
            build_id=self._build_id(),
            soname="".join(dynamic.get("soname", [])),
            needed=tuple(dynamic.get("needed", [])),
            runpath=":".join(dynamic.get("runpath", []) + dynamic.get("rpath", [])),
            undefined=undefined,
            exported=exported,
            bundles=tuple(b for data in fatbins for b in bundles(data, self.path)),
            sections={
                name: hashlib.sha256(self._bytes(s)).hexdigest() for name, s in self.sections
            },
        )

    def _bytes(self, section: Any) -> bytes:
        if section["sh_type"] == "SHT_NOBITS":
            return b""
        start, size = section["sh_offset"], section["sh_size"]
        if start + size > len(self.data):
            raise _bad(self.path, f"section {section.name} reaches beyond the end of the file")
        return self.data[start : start + size]

    def _dynamic(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        section: Any = self.elf.get_section_by_name(".dynamic")
        for tag in section.iter_tags() if section is not None else ():
            for name in ("needed", "runpath", "rpath", "soname"):
                if tag.entry.d_tag == f"DT_{name.upper()}":
                    found.setdefault(name, []).append(getattr(tag, name))
        return found

    def _symbols(self) -> tuple[tuple[str, ...], frozenset[str]]:
        table: Any = self.elf.get_section_by_name(".dynsym")
        undefined, exported = set(), set()
        for symbol in table.iter_symbols() if table is not None else ():
            strong = symbol["st_info"]["bind"] in ("STB_GLOBAL", "STB_WEAK")
            if not symbol.name or not strong:
                continue
            if symbol["st_shndx"] != "SHN_UNDEF":
                exported.add(symbol.name)
            elif symbol["st_info"]["bind"] == "STB_GLOBAL":
                undefined.add(symbol.name)
        return tuple(sorted(undefined)), frozenset(exported)

    def _build_id(self) -> str:
        section: Any = self.elf.get_section_by_name(".note.gnu.build-id")
        notes = section.iter_notes() if section is not None else ()
        return next((str(n["n_desc"]) for n in notes if n["n_type"] == "NT_GNU_BUILD_ID"), "")


def _bundle(data: bytes, at: int) -> tuple[Bundle, int]:
    if data.startswith(COMPRESSED, at):
        return _compressed(data, at)
    ids, end = _entries(data, at)
    return Bundle(at, "plain", tuple(ids)), end


def _entries(data: bytes, at: int) -> tuple[list[str], int]:
    """Read one plain bundle: a count, then offset, size, length of id and id of each entry.

    The id of a device entry that holds no code is left out.
    """
    place = at + len(BUNDLE)
    (count,) = struct.unpack_from("<Q", data, place)
    if count > 256:
        raise ValueError(f"it says that it has {count} entries")
    place += 8
    ids, end = [], place
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", data, place)
        place += 24
        if length > 256 or at + offset + size > len(data):
            raise ValueError("an entry reaches beyond its section")
        name = data[place : place + length].decode("ascii")
        if size or not _is_device(name):
            _same_processor(name, data[at + offset : at + offset + size])
            ids.append(name)
        place += length
        end = max(end, at + offset + size, place)
    return ids, end


def _same_processor(name: str, code: bytes) -> None:
    """Compare an entry's id with its ELF header, by which a device takes code or refuses it.

    Only for names that stand in LLVM's table: what numbers other toolkits use is not known.
    """
    arch = name.rpartition("--")[2].partition(":")[0]
    if arch in MACHINES and code.startswith(b"\x7fELF") and len(code) >= ELF_HEADER:
        (flags,) = struct.unpack_from("<I", code, 48)
        if flags & 0xFF != MACHINES[arch]:
            number = f"{flags & 0xFF:#x}"
            raise ValueError(f"the code of {name} is for the processor of number {number}")


def _compressed(data: bytes, at: int) -> tuple[Bundle, int]:
    """Read a compressed bundle: magic, version, method, sizes and hash, then the packed bundle."""
    version, method = struct.unpack_from("<HH", data, at + 4)
    name = METHODS.get(method, f"method {method}")
    if version == 1:
        total, head = 0, 4 + 2 + 2 + 4 + 8
    elif version == 2:
        (total,), head = struct.unpack_from("<I", data, at + 8), 4 + 2 + 2 + 4 + 4 + 8
    elif version == 3:
        (total,), head = struct.unpack_from("<Q", data, at + 8), 4 + 2 + 2 + 8 + 8 + 8
    else:
        raise ValueError(f"it is compressed in a format of version {version}")
    body = data[at + head : at + total if total else None]
    plain, used = _unpacked(body, name)
    ids, _ = _entries(plain, 0)
    return Bundle(at, name, tuple(ids)), at + (total or head + used)


def _unpacked(body: bytes, method: str) -> tuple[bytes, int]:
    if method == "zlib":
        stream = zlib.decompressobj()
        plain = stream.decompress(body)
        return plain, len(body) - len(stream.unused_data)
    if method == "zstd":
        return _unpacked_zstd(body)
    raise ValueError(f"it is compressed by {method}")


def _unpacked_zstd(body: bytes) -> tuple[bytes, int]:
    import zstandard

    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        plain = bytes(stream.decompress(body))
    except zstandard.ZstdError as err:
        raise ValueError(f"its zstd stream is damaged: {err}") from err
    return plain, len(body) - len(stream.unused_data)


def _next(section: bytes, start: int) -> int:
    """Return where the next bundle starts; both kinds are aligned to at least 8 bytes."""
    places = [section.find(magic, start) for magic in (BUNDLE, COMPRESSED)]
    found = [place for place in places if place >= 0]
    while found and min(found) % 8:
        lowest = min(found)
        magic = BUNDLE if section.startswith(BUNDLE, lowest) else COMPRESSED
        found.remove(lowest)
        if (later := section.find(magic, lowest + 1)) >= 0:
            found.append(later)
    return min(found) if found else -1


def _is_device(name: str) -> bool:
    return name.startswith("hip") and "--" in name


def _is_torch(name: str) -> bool:
    return any(part in name for part in TORCH_NAMES)


def _bad(path: Path, why: str, fix: str = "build it again and take the staged file") -> BadValues:
    return BadValues(f"{path} is no usable extension", why=why, fix=fix)
