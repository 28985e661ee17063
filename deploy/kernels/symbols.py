"""Runs where the build's torch lies and prints which names its libraries do not define.

Read as text like `survey`, so the standard library only. torch's libraries export hundreds of
thousands of symbols: reading them all takes seconds, a look-up in the GNU hash table microseconds.
"""

from __future__ import annotations

import glob
import json
import mmap
import os
import struct
import sys
from collections.abc import Iterable, Iterator

GNU_HASH, DYNSYM = 0x6FFFFFF6, 11


def missing(names: Iterable[str], folder: str) -> list[str]:
    """Return the names that no library of the folder defines, sorted."""
    left = set(names)
    for library in sorted(glob.glob(os.path.join(folder, "lib*.so"))):
        if left and os.path.isfile(library):
            left -= set(defined(library, left))
    return sorted(left)


def defined(library: str, names: Iterable[str]) -> Iterator[str]:
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        tables = _tables(data)
        for name in names:
            if tables and _in_hash_table(data, *tables, name.encode()):
                yield name


def _tables(data: mmap.mmap) -> tuple[int, int, int] | None:
    """Return where the hash table, the dynamic symbols and their strings start."""
    if data[:5] != b"\x7fELF\x02":
        return None
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, start + size * i) for i in range(count)]
    hashes = [row for row in rows if row[1] == GNU_HASH]
    symbols = [row for row in rows if row[1] == DYNSYM]
    if not hashes or not symbols:
        return None
    return hashes[0][4], symbols[0][4], rows[symbols[0][6]][4]


def _in_hash_table(data: mmap.mmap, table: int, symbols: int, strings: int, name: bytes) -> bool:
    count, first, words, _ = struct.unpack_from("<4I", data, table)
    buckets = table + 16 + 8 * words
    chains = buckets + 4 * count
    wanted = 5381
    for byte in name:
        wanted = (wanted * 33 + byte) & 0xFFFFFFFF
    (index,) = struct.unpack_from("<I", data, buckets + 4 * (wanted % count))
    while index >= first:
        (entry,) = struct.unpack_from("<I", data, chains + 4 * (index - first))
        if entry | 1 == wanted | 1:
            text, _, _, section = struct.unpack_from("<IBBH", data, symbols + 24 * index)
            start = strings + text
            if section and data[start : start + len(name) + 1] == name + b"\0":
                return True
        if entry & 1:
            return False
        index += 1
    return False


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as listed:
        print("symbols/1 " + json.dumps(missing(json.load(listed), sys.argv[2])))
