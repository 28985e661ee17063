"""The rendered files: golden texts, quoting of hostile values, shellcheck, and what is left out."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy import manifest as manifests
from deploy import scripts
from deploy.errors import BadValues
from deploy.layout import HERE
from deploy.manifest import Manifest
from deploy.scripts import ON_TARGET, files

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "scripts"
EXAMPLE = manifests.load(HERE.manifest("example"))
ALL = {
    *ON_TARGET,
    ".dockerignore",
    "Dockerfile",
}


def rendered(manifest: Manifest = EXAMPLE, **options: str) -> dict[str, str]:
    return {one.name: one.data.decode() for one in files(manifest, **options)}


def small(launch: str, extra: str = "") -> Manifest:
    text = f"""\
schema: 1
name: small
base: {{image: vendor:1, python: /usr/bin/python3, site: /usr/lib/python3/dist-packages}}
source: {{git: ., base: {"1" * 40}, head: {"2" * 40}, package: vllm}}
overlay: {{include: ["vllm/**"]}}
launch: {launch}
{extra}
"""
    return manifests.parse(text, "small")


@pytest.mark.parametrize(
    ("serve", "host"),
    [
        ("[]", "127.0.0.1"),
        ('["--host", "0.0.0.0"]', "127.0.0.1"),
        ('["--host=::"]', "localhost"),
        ('["--host", "127.0.0.2"]', "127.0.0.2"),
        ('["--host=192.0.2.7"]', "192.0.2.7"),
    ],
)
def test_a_start_asks_the_server_where_it_was_told_to_listen(serve: str, host: str) -> None:
    launch = f"{{dir: /root/submission, port: 8000, serve: {serve}}}"

    text = rendered(small(launch, "model: {path: /m, served_name: m}"))["start_vllm.sh"]

    assert f"\nhost={host}\nport=8000\n" in text


@pytest.mark.parametrize("name", sorted(ALL))
def test_the_example_renders_as_recorded(name: str) -> None:
    """DCU_TEST_UPDATE_GOLDEN=1 writes the records anew; read the difference before committing."""
    text = rendered()[name]

    if os.environ.get("DCU_TEST_UPDATE_GOLDEN"):
        GOLDEN.mkdir(parents=True, exist_ok=True)
        (GOLDEN / f"{name}.txt").write_bytes(text.encode())
    assert text == (GOLDEN / f"{name}.txt").read_bytes().decode()


def test_every_script_is_executable_and_every_text_ends_once() -> None:
    for one in files(EXAMPLE):
        assert one.mode == (0o755 if one.name.endswith(".sh") else 0o644)
        assert one.data.endswith(b"\n")
        assert not one.data.endswith(b"\n\n")


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is missing: apt-get install shellcheck")
    paths = []
    for name, text in rendered().items():
        if name.endswith(".sh"):
            (tmp_path / name).write_text(text)
            paths.append(name)

    done = subprocess.run(
        (checker, *sorted(paths)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stdout


def test_a_manifest_without_a_section_has_no_script_of_it() -> None:
    assert set(rendered(small("{dir: /srv, port: 8001}"))) == {
        "ENVIRONMENT.md",
        "start_vllm.sh",
        "stop_vllm.sh",
        "verify.sh",
        ".dockerignore",
        "Dockerfile",
        "docker-run.sh",
    }


def test_every_variable_of_the_manifest_is_listed_with_value_and_reason() -> None:
    text = rendered()["ENVIRONMENT.md"]

    assert EXAMPLE.launch is not None
    for name, variable in EXAMPLE.launch.env.items():
        assert f"| `{name}` | {variable.value} | {variable.why} |" in text


def test_a_table_cell_shows_what_was_typed() -> None:
    manifest = small('{dir: /srv, port: 1, env: {A: {value: "a|b`c", why: "x < y"}}}')

    assert "| `A` | a&#124;b&#96;c | x &#60; y |" in rendered(manifest)["ENVIRONMENT.md"]


# Any text that a YAML scalar may hold and a shell word can: quotes, blanks, newlines, dollars.
_WORDS = st.text(
    st.characters(
        blacklist_characters="\0\r\x85\u2028\u2029\ufeff", blacklist_categories=["Cs", "Cc"]
    )
    | st.sampled_from("'\"$`\\ *?;&|<>(){}[]#~!\n\t"),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(value=_WORDS)
def test_no_value_of_a_variable_is_run_or_changed_by_the_shell(value: str) -> None:
    import dataclasses

    from deploy.manifest import Variable

    base = small("{dir: /srv, port: 8001}")
    assert base.launch is not None
    env = {"A_NAME": Variable(value=value, why="a reason")}
    manifest = dataclasses.replace(base, launch=dataclasses.replace(base.launch, env=env))
    lines = rendered(manifest)["start_vllm.sh"].partition("export A_NAME=")[2]
    assigned = "A_NAME=" + lines.partition("\n\n# What shared")[0]

    done = subprocess.run(
        ("/bin/sh", "-c", f'{assigned}\nprintf %s. "$A_NAME"'),
        capture_output=True,
        timeout=20,
        check=True,
    )

    assert done.stdout.decode() == value + "."


def test_the_server_gets_exactly_the_words_of_the_manifest() -> None:
    text = rendered()["start_vllm.sh"]

    line = next(line for line in text.splitlines() if line.startswith("setsid nohup"))
    words = shlex.split(line)
    assert tuple(words[3 : words.index(">" + "$log")]) == EXAMPLE.serve_argv()


@pytest.mark.parametrize(
    ("flags", "refuses"),
    [
        ("{tensor-parallel-size: 4}", True),
        ("['--tensor-parallel-size=2']", True),
        ("['-tp', '2']", True),
        ("{tensor-parallel-size: 1}", False),
        ("{}", False),
    ],
)
def test_too_little_shared_memory_stops_a_start_only_where_ranks_share_it(
    flags: str, refuses: bool
) -> None:
    text = rendered(small(f"{{dir: /srv, port: 8001, serve: {flags}}}"))["start_vllm.sh"]

    assert ("not started: shared memory is too small" in text) is refuses


def test_the_dockerfile_stays_within_what_the_oldest_builder_knows() -> None:
    text = rendered()["Dockerfile"]

    assert "<<" not in text
    assert "--mount" not in text
    assert not [
        line for line in text.splitlines() if line.startswith(("CMD", "ENTRYPOINT", "USER"))
    ]
    runs = [line for line in text.splitlines() if line.startswith("RUN")]
    assert runs
    assert all(line.startswith("RUN . /opt/dtk/env.sh; ") for line in runs)


def test_a_base_that_runs_as_somebody_is_left_as_it_was() -> None:
    lines = rendered(base="vendor@sha256:" + "a" * 64, user="1000:1000")["Dockerfile"].splitlines()

    assert "FROM vendor@sha256:" + "a" * 64 in lines
    assert [line for line in lines if line.startswith("USER")] == ["USER 0", "USER 1000:1000"]


def test_a_launch_folder_that_a_dockerfile_cannot_say_is_refused() -> None:
    with pytest.raises(BadValues) as caught:
        rendered(small("{dir: '/srv/my folder', port: 8001}"))

    assert "launch.dir" in caught.value.what


def test_everything_that_the_dockerfile_copies_is_let_through() -> None:
    texts = rendered()
    copied = next(line for line in texts["Dockerfile"].splitlines() if line.startswith("COPY"))

    for word in copied.split()[1:-1]:
        assert f"!{word}" in texts[".dockerignore"].splitlines()


def test_no_rendered_file_names_a_digest_of_the_bundle() -> None:
    assert not [
        n
        for n, text in rendered().items()
        if ".pyz" in text.replace("bundle.pyz", "").replace("*.pyz", "")
    ]


def test_docker_run_asks_for_what_the_manifest_asks_for(tmp_path: Path) -> None:
    manifest = small(
        "{dir: /srv, port: 1, container: {devices: [/dev/null, /dev/not-there], shm_size: 16G,"
        f" mounts: [{{source: {tmp_path}, target: /in, read_only: yes}}], groups: [video],"
        " capabilities: [SYS_PTRACE], security: [seccomp=unconfined], ulimits: {memlock: '-1:-1'}}}"
    )
    script = tmp_path / "docker-run.sh"
    script.write_text(rendered(manifest)["docker-run.sh"])

    done = subprocess.run(
        ("/bin/sh", script, "--print", "--name", "one", "--", "sh", "-c", "it's"),
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )

    words = shlex.split(done.stdout)
    assert words[:2] == ["docker", "run"]
    assert words[words.index("--device") + 1] == "/dev/null"
    assert "/dev/not-there" not in words
    assert words[words.index("--volume") + 1] == f"{tmp_path}:/in:ro"
    assert words[words.index("--name") + 1] == "one"
    for option in (
        "--network=host",
        "--ipc=host",
        f"--shm-size={16 * 2**30}",
        "--group-add=video",
        "--cap-add=SYS_PTRACE",
        "--security-opt=seccomp=unconfined",
        "--ulimit=memlock=-1:-1",
    ):
        assert option in words
    assert words[-4:] == ["dcu-bundle/small", "sh", "-c", "it's"]


def test_docker_run_refuses_a_mount_that_the_host_lacks(tmp_path: Path) -> None:
    manifest = small(
        "{dir: /srv, port: 1, container: {mounts: [{source: /not/there, target: /in}]}}"
    )
    script = tmp_path / "docker-run.sh"
    script.write_text(rendered(manifest)["docker-run.sh"])

    done = subprocess.run(
        ("/bin/sh", script, "--print"), capture_output=True, text=True, timeout=20, check=False
    )

    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == "this host has no /not/there"
    assert len(done.stderr.splitlines()) == 3


def test_a_script_without_a_bundle_says_so_in_three_lines(tmp_path: Path) -> None:
    for name in ("start_vllm.sh", "stop_vllm.sh", "verify.sh"):
        (tmp_path / name).write_text(rendered()[name])

        done = subprocess.run(
            ("/bin/sh", tmp_path / name), capture_output=True, text=True, timeout=20, check=False
        )

        assert done.returncode == 3
        assert "holds no *.pyz" in done.stderr
        assert len(done.stderr.splitlines()) == 3


def test_a_script_with_two_bundles_does_not_choose(tmp_path: Path) -> None:
    (tmp_path / "verify.sh").write_text(rendered()["verify.sh"])
    for name in ("a.pyz", "b.pyz"):
        (tmp_path / name).touch()

    done = subprocess.run(
        ("/bin/sh", tmp_path / "verify.sh"), capture_output=True, text=True, timeout=20, check=False
    )

    assert done.returncode == 2
    assert "cannot tell which bundle is meant" in done.stderr


def test_a_start_without_the_program_says_so_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "bundle.pyz").write_text("import sys; sys.exit('the bundle was asked')\n")
    launch = f"{{dir: {tmp_path}, port: 8001, command: [vllm-that-is-nowhere, serve]}}"
    (tmp_path / "start_vllm.sh").write_text(rendered(small(launch))["start_vllm.sh"])

    done = subprocess.run(
        ("/bin/sh", tmp_path / "start_vllm.sh"),
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip

    first, *others = [line for line in done.stderr.splitlines() if not line.startswith("warning:")]
    assert done.returncode == 3
    assert first == (
        "not started: there is no program vllm-that-is-nowhere on the PATH of this container"
    )
    assert [line[:7] for line in others] == ["  why: ", "  fix: "]


def test_a_link_to_a_script_uses_what_lies_beside_the_script(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    (home / "bundle.pyz").write_text("import sys; sys.exit('this is the bundle')\n")
    texts = rendered(small(f"{{dir: {home}, port: 8001, command: [sleep]}}"))
    for name in ("start_vllm.sh", "stop_vllm.sh", "verify.sh"):
        (home / name).write_text(texts[name])
        (away / name).symlink_to(Path("../home") / name)

        done = subprocess.run(
            ("/bin/sh", name), cwd=away, capture_output=True, text=True, timeout=20, check=False
        )

        assert "this is the bundle" in done.stderr


def test_templates_are_the_ones_of_this_checkout() -> None:
    assert {p.name for p in scripts.TEMPLATES.glob("*.j2")} == {
        *(f"{n}.j2" for n in ALL - {".dockerignore"}),
        "dockerignore.j2",
        "prelude.sh.j2",
        "environment.sh.j2",
    }
