"""Input made to harm the operator's side: each is three lines and an exit code, soon."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle as bundles
from deploy import listing, report
from deploy.agent.words import Verb
from deploy.carriers.local import parse_local
from deploy.difference import Side, unified
from deploy.errors import BadValues, StaleLock
from deploy.evidence import Evidence, parse
from deploy.gates import Visit
from deploy.layout import HERE, Layout
from deploy.wheel import Wheel, base_commit, unpack
from tests.table import Found, plants

HUGE = 100 << 20
MEMORY = 400 << 20  # bytes of address space that are enough to refuse anything
READ = {
    "manifest": "from deploy import submission; submission.load('big', layout)",
    "lock": "from deploy.lock import read_lock; read_lock(layout.lock('big'))",
    "hosts": "from deploy import inventory; inventory.load(layout.top / 'hosts.yaml')",
    "listing": "from deploy import listing; listing.read(layout.files('big'))",
}
PROGRAM = """
import sys
from pathlib import Path
from deploy.errors import BundleError
from deploy.layout import Layout
layout = Layout(Path(sys.argv[1]))
try:
    {act}
except BundleError as err:
    print(err)
    sys.exit(int(err.exit))
"""


def bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def place(what: str, top: Path) -> Path:
    """Where a checkout at `top` looks for a file of this kind; its folder is there."""
    layout = Layout(top)
    kept = {
        "manifest": layout.manifest("big"),
        "lock": layout.lock("big"),
        "hosts": top / "hosts.yaml",
        "listing": layout.files("big"),
    }
    path = kept.get(what, top / what)
    path.parent.mkdir(exist_ok=True)
    return path


def acted(act: str, top: Path) -> subprocess.CompletedProcess[str]:
    """Run one line of the product in a process of bounded memory, on a checkout at `top`."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(act=act), top],
        cwd=HERE.top,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=bounded,
    )


def yaml_lines(file: Any) -> None:
    line = b"key: [a, b, c]\n" * 4096
    while file.tell() < HUGE:
        file.write(line)


def one_line(file: Any) -> None:
    while file.tell() < HUGE:
        file.write(b"a" * (1 << 20))


@plants("100 MB of YAML")
@pytest.mark.slow
@pytest.mark.parametrize("fill", [yaml_lines, one_line])
@pytest.mark.parametrize("what", READ)
def test_a_hundred_megabytes_of_text_are_refused_in_three_lines(
    what: str, fill: Callable[[Any], None], tmp_path: Path, found: Found
) -> None:
    with place(what, tmp_path).open("wb") as file:
        fill(file)

    began = time.monotonic()
    done = acted(READ[what], tmp_path)

    assert done.returncode == (4 if what == "lock" else 2), done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert "bytes" in done.stdout
    assert time.monotonic() - began < 10
    found(f"exit {done.returncode}: its size, in {MEMORY >> 20} MB", "nothing of it was read")


NAMED = {
    **READ,
    "evidence": "from deploy import flow; flow.judge_file('big', layout.top / 'evidence', layout)",
    "run": "from deploy.measure import record; record.read(layout.top / 'run')",
    "profile": "from deploy.measure import profile; profile.summary(layout.top / 'profile', {})",
    "scores": "from deploy import measuring; measuring.scores(layout.top / 'scores')",
}


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 100 << 30)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


UNFIT = {
    os.mkfifo: "it is not a regular file",
    device: "it is not a regular file",
    sparse: "it has 107,374,182,400 bytes, more than the ",
}


@pytest.mark.parametrize(
    ("what", "make"),
    # A profile has no bound: it is read line by line.
    [(what, make) for what in NAMED for make in UNFIT if (what, make) != ("profile", sparse)],
)
def test_what_is_no_file_of_a_fit_size_is_refused_and_not_waited_for(
    what: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(place(what, tmp_path))

    done = acted(NAMED[what], tmp_path)

    assert done.returncode == (4 if what == "lock" else 2), done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert UNFIT[make] in done.stdout


@pytest.mark.parametrize("root", ["/" + "a/" * 3000, "b" * 6000, "~nobody-of-that-name/root"])
def test_a_folder_that_nobody_can_have_is_no_target(root: str) -> None:
    with pytest.raises(BadValues) as caught:
        parse_local(root)

    assert len(str(caught.value).splitlines()) == 3


def bomb(path: Path, declared: int, packed: bytes) -> None:
    """A wheel whose one file declares a size and unpacks to whatever is in it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("x-1.dist-info/RECORD", "")
        made.writestr("x/bomb.bin", b"")
    raw = path.read_bytes()
    # Both headers of the empty member get the sizes; its content is put between them.
    name = b"x/bomb.bin"
    local = raw.index(name) - 30
    end = local + 30 + len(name)
    head = bytearray(raw[local:end])
    struct.pack_into("<HH", head, 8, 8, 0)
    struct.pack_into("<III", head, 14, 0, len(packed), min(declared, 0xFFFFFFFF))
    tail = raw[raw.index(b"PK\1\2") :]
    old = raw.index(b"PK\1\2")
    shift = local + len(head) + len(packed) - old
    central = bytearray(tail)
    at = central.index(name) - 46
    struct.pack_into("<H", central, at + 10, 8)
    struct.pack_into("<III", central, at + 16, 0, len(packed), min(declared, 0xFFFFFFFF))
    eocd = central.rindex(b"PK\5\6")
    where = struct.unpack_from("<I", central, eocd + 16)[0]
    struct.pack_into("<I", central, eocd + 16, where + shift)
    path.write_bytes(raw[:local] + bytes(head) + packed + bytes(central))


@plants("a zip bomb as a wheel")
@pytest.mark.parametrize("declared", [1, 4096, 2**32 - 2])
def test_a_member_that_unpacks_to_more_than_it_declares_is_refused_and_writes_little(
    declared: int, tmp_path: Path, found: Found
) -> None:
    wheel = tmp_path / "bomb.whl"
    bomb(wheel, declared, zlib.compress(bytes(64 << 20), 9)[2:-4])

    with pytest.raises(StaleLock):
        unpack(Wheel(wheel, "0" * 64), tmp_path / "out")
    with pytest.raises(StaleLock):
        base_commit(Wheel(wheel, "0" * 64), tmp_path / "repo.git")

    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "repo.git.lock") in (
        [["bomb.whl"], ["bomb.whl", "repo.git.new"]]
    )
    found("exit 4: more than it declares", "nothing was written")


@plants("a zip bomb as a bundle")
def test_a_bundle_that_is_packed_small_and_unpacks_large_is_refused(
    tmp_path: Path, found: Found
) -> None:
    path = tmp_path / "bomb.pyz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
        made.writestr("plan.json", bytes(64 << 20))
    with pytest.raises(StaleLock) as caught:
        bundles.read(path)
    assert "compressed" in caught.value.why
    found(f"exit {caught.value.exit}: it is compressed", "nothing was written")


# --- what a target says


ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\r"


def poisoned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: poisoned(child) for key, child in value.items()}
    if isinstance(value, list):
        return [poisoned(child) for child in value]
    return value + ESCAPE if isinstance(value, str) and value not in KEPT else value


KEPT = {"evidence/1", "verify", "ok", "changed", "foreign"}
SAID = {
    "schema": "evidence/1",
    "verb": "verify",
    "outcome": "differs",
    "exit": 10,
    "plan": "",
    "tree": "",
    "met": "drifted",
    "files": [{"path": "vllm/a.py", "state": "changed", "why": "bytes", "found": {}}],
    "origin": {"empty": {"state": "shadowed", "file": "/x", "why": "y", "mend": "z"}},
    "traps": [{"kind": "k", "where": "w", "why": "y", "mend": "m", "harm": True}],
    "audit": {
        "owners": {"ours": ["a"]},
        "faults": ["f"],
        "files": [{"path": "p", "owner": "foreign", "why": "w"}],
    },
    "doctor": [{"level": "fault", "about": "a", "text": "t", "mend": "m"}],
    "service": {
        "faults": [{"text": "t", "warning": False}],
        "listeners": [{"address": "::", "port": 1, "pids": []}],
        "answers": [{"probe": "p", "error": "e"}],
        "run": {"folder": "f", "pid": 1, "state": "s"},
    },
    "error": {"what": "w", "why": "y", "fix": "f"},
    "incidental": {},
}


@plants("control characters in what a target says")
def test_nothing_that_a_target_says_moves_the_cursor(found: Found) -> None:
    evidence = Evidence(poisoned(SAID))
    visit = Visit(
        target="ssh:a" + ESCAPE, evidence=evidence, error=evidence.error, met="x" + ESCAPE
    )

    texts = [
        report.visit_text(visit),
        report.fleet_text([visit]),
        report.diff_text([visit], {visit.target: ""}),
    ]

    assert evidence.verb is Verb.VERIFY
    for text in texts:
        assert "owned" in text
        assert [c for c in text if c != "\n" and not c.isprintable()] == []
    found("the report: shown as escapes", "all the rest is shown")


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\xff\xfe", b"[" * 100_000, b"{}", b'{"schema": "evidence/1"}', b"NaN",
        b'{"schema": "evidence/1", "verb": "verify", "exit": 1e400}',
        b'{"schema": "evidence/1", "verb": "verify", "exit": 10, "files": [7]}',
        b'{"schema": "evidence/1", "verb": "verify", "exit": 10, "files": 7}',
        b'{"schema": "evidence/1", "verb": "verify", "exit": 10, "error": [1]}',
        b'{"schema": "evidence/1", "verb": ["verify"], "exit": 10}',
        b'{"schema": "evidence/1", "verb": "verify", "exit": 10, "traps": [{"harm": true}]}',
        b'{"schema": "evidence/1", "verb": "verify", "exit": 10, "origin": {"empty": "ok"}}',
        b'{"schema": "evidence/1", "verb": "verify", "exit": 10, "origin": ["ok"]}',
        b'{"schema": "evidence/1", "verb": "verify", "exit": 10, "audit": {"files": []}}',
        b'{"schema": "evidence/1", "verb": "verify", "exit": 10, "audit": [1]}',
    ],
)  # fmt: skip
def test_what_is_no_evidence_is_an_error_and_no_crash(text: bytes) -> None:
    with pytest.raises(BadValues):
        parse(text)


# --- differences


def side(data: bytes, mode: str = "0644") -> Side:
    return Side("0" * 64, len(data), mode, data)


def test_a_diff_shows_what_it_would_do_and_hides_nothing_behind_escapes() -> None:
    name = "vllm/\x1b[2Jx.py"
    old = {name: side(b"a\tb\n\x1b[31mred\n"), "vllm/b.py": side(b"same\n")}
    new = {name: side(b"a\tb\n\x1b[32mgreen\n"), "vllm/b.py": side(b"same\n", "0755")}

    text = unified(old, new, ("target", "plan"))

    assert "-\\x1b[31mred" in text
    assert "+\\x1b[32mgreen" in text
    assert " a\tb" in text
    assert "old mode 100644\nnew mode 100755" in text
    assert "\x1b" not in text


@plants("a binary diff")
def test_binary_and_huge_files_are_one_line_each(found: Found) -> None:
    gone = Side("1" * 64, 5_000_000)
    text = unified(
        {"a.so": gone}, {"a.so": Side("2" * 64, 7), "new.so": Side("3" * 64, 9)}, ("t", "p")
    )
    told = "Files differ, and are binary or large: "
    assert text.splitlines() == [
        f"{told}a.so (111111111111, 5000000 bytes -> 222222222222, 7 bytes)",
        f"{told}new.so (absent -> 333333333333, 9 bytes)",
    ]
    found("plan --diff: one line with both digests", "nothing else is shown")


@plants("a huge diff")
@pytest.mark.slow
def test_the_worst_megabyte_is_compared_in_no_time(found: Found) -> None:
    old = b"".join(b"%d\n" % (n * 7919 % 100_003) for n in range(140_000))[: 1 << 20]
    new = b"".join(b"%d\n" % (n * 104_729 % 100_003) for n in range(140_000))[: 1 << 20]
    began = time.monotonic()
    assert unified({"a": side(old)}, {"a": side(new)}, ("t", "p"))
    assert time.monotonic() - began < 20
    found("plan --diff: compared at once", "silent")


def test_the_users_own_git_settings_run_nothing_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ran"
    config = tmp_path / "config"
    config.write_text(
        f"[diff]\n external = touch {marker}\n colorMoved = zebra\n noprefix = false\n"
        f' mnemonicPrefix = true\n[diff "x"]\n textconv = touch {marker};\n[color]\n ui = always\n'
        f"[core]\n attributesFile = {tmp_path}/attributes\n pager = touch {marker}\n"
    )
    (tmp_path / "attributes").write_text("* diff=x -text\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))

    text = unified({"a.py": side(b"1\n")}, {"a.py": side(b"2\n")}, ("target", "plan"))

    assert "--- target/a.py\n+++ plan/a.py\n@@ -1 +1 @@\n-1\n+2\n" in text
    assert not marker.exists()


def test_links_are_compared_as_texts_and_never_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    link = Side("", 1, "link", str(secret).encode())
    text = unified({"a": side(b"1\n")}, {"a": link}, ("target", "plan"))
    assert f"+{secret}" in text
    assert "+secret\n" not in text


# --- listings


def test_a_listing_of_a_vendor_that_is_no_text_is_refused_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.files"
    path.write_bytes(b"files/1\nrubbish\n" + b"\xff\n")
    with pytest.raises(BadValues):
        listing.read(path)
    path.write_text("files/1\n" + "x\n" * 1000)
    with pytest.raises(BadValues) as caught:
        listing.read(path)
    assert "line 2" in caught.value.why
    assert "and 980 more" in caught.value.why


def test_json_of_a_task_is_one_value_even_with_hostile_names() -> None:
    shown = json.loads(report.as_json(poisoned(SAID)))
    assert shown["outcome"].endswith(ESCAPE)
