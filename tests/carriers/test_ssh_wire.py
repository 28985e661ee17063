"""What goes over the line, taken apart: the shell line, the frames, and what is packed."""

from __future__ import annotations

import io
import random
import shlex
import struct
import subprocess
import sys
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.carriers.ssh_wire import PYTHONS, Frames, Packer, command, job
from deploy.errors import BadValues

NONCE = "dcu-bundle-0123-"
RANDOM = random.Random(3).randbytes(3 << 20)


def frame(kind: str, body: bytes) -> bytes:
    return kind.encode() + struct.pack(">I", len(body)) + body


@given(
    st.binary(max_size=300),
    st.lists(st.tuples(st.sampled_from("ALNE"), st.binary(max_size=300)), max_size=6),
    st.integers(1, 50),
)
def test_frames_come_out_whole_however_the_bytes_are_cut(
    noise: bytes, sent: list[tuple[str, bytes]], size: int
) -> None:
    raw = noise + NONCE.encode() + b"\n" + b"".join(frame(*one) for one in sent)
    frames = Frames(NONCE)

    found = [one for at in range(0, len(raw), size) for one in frames.feed(raw[at : at + size])]

    assert found == sent
    assert frames.noise == noise


def test_a_stream_of_noise_is_not_read_for_ever() -> None:
    frames = Frames(NONCE)

    with pytest.raises(ValueError, match="before the agent said a word"):
        list(frames.feed(b"y\n" * 600_000))


def test_a_frame_that_announces_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="was announced"):
        list(Frames(NONCE).feed(NONCE.encode() + b"\nE\xff\xff\xff\xff"))


def test_the_shell_line_survives_a_shell_and_finds_a_python() -> None:
    line, stdin = command([sys.executable], zlib.compress(b"print('ran', sys.argv[1:][:0])"), NONCE)

    done = subprocess.run(["sh", "-c", line], capture_output=True, input=stdin, check=False)

    assert done.stdout == b"ran []\n", done.stderr


def test_a_long_program_goes_over_stdin_and_not_into_the_process_list() -> None:
    program = zlib.compress(b"print('ran')#" + RANDOM[:40_000].hex().encode())
    line, stdin = command([sys.executable], program, NONCE)

    done = subprocess.run(["sh", "-c", line], capture_output=True, input=stdin, check=False)

    assert done.stdout == b"ran\n", done.stderr
    assert len(line) < 2_000


def test_every_candidate_is_tried_once_in_order_and_told_when_none_is_fit() -> None:
    line, _ = command(["/nowhere/python3", "/bin/false", "/nowhere/python3"], b"", NONCE)

    done = subprocess.run(["sh", "-c", line], capture_output=True, check=False, stdin=None)
    frames = Frames(NONCE)
    list(frames.feed(done.stdout))

    # /bin/false ends with 1, like a program of ours that crashed: no further one is tried.
    assert done.returncode == 1
    assert frames.no_python() is None


def test_no_fit_python_is_told_by_name() -> None:
    line, _ = command(["/nowhere/python3", "also-not-there"], b"", NONCE)

    done = subprocess.run(["sh", "-c", line], capture_output=True, check=False)
    frames = Frames(NONCE)
    list(frames.feed(b"Welcome\n" + done.stdout))

    assert done.returncode == 3
    assert frames.no_python() == ["/nowhere/python3 not found", "also-not-there not found"]


@pytest.mark.parametrize("path", ["", "a'b", "a\\b", "a!b", "a\nb"])
def test_a_path_that_some_shell_would_change_is_refused(path: str) -> None:
    with pytest.raises(BadValues):
        command([path, *PYTHONS], b"", NONCE)


def test_the_line_holds_nothing_that_csh_or_fish_read_differently() -> None:
    line, _ = command(["/usr/bin/python 3", *PYTHONS], b"x", NONCE, sudo=True)

    assert not set(line) & set("\\!\n")
    assert shlex.split(line)[:4] == ["exec", "sudo", "-n", "sh"]


def unpacked(frames: list[bytes]) -> bytes:
    found = b""
    for one in frames:
        size = struct.unpack(">I", one[:4])[0]
        found += zlib.decompress(one[4:]) if size >> 31 else one[4:]
    return found


@pytest.mark.parametrize("slow", [False, True])
def test_contents_are_packed_only_where_the_line_is_slower_than_packing(*, slow: bool) -> None:
    content = b"".join(b"line %d of many that are alike\n" % i for i in range(60_000))
    frames = []

    for one in Packer().frames(io.BytesIO(content)):
        frames.append(one)
        if slow:
            time.sleep(len(one) / 1e6)

    assert unpacked(frames) == content
    sent = sum(map(len, frames))
    assert sent < len(content) / 3 if slow else sent > len(content) * 0.8


def test_random_bytes_are_sent_as_they_are() -> None:
    frames = list(Packer().frames(io.BytesIO(RANDOM)))

    assert unpacked(frames) == RANDOM
    assert sum(map(len, frames)) == len(RANDOM) + 4 * len(frames)


@given(st.binary(max_size=2000))
def test_any_content_arrives(content: bytes) -> None:
    assert unpacked(list(Packer().frames(io.BytesIO(content)))) == content


def test_the_program_is_a_program_of_any_fit_python() -> None:
    compile(zlib.decompress(job({"nonce": NONCE}, {"a": "é'\"\\\n"})), "job", "exec")
