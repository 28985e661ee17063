"""The frame of the tests: what `./inv test` chooses, sets up, forbids to skip and accounts for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.layout import HERE

_TEST = '''
import pytest

def test_one():
    """Passes."""

@pytest.mark.docker
def test_two():
    """Needs a service."""

@pytest.mark.live
def test_three():
    """Needs the live server."""

def test_four():
    pytest.skip("there is one Python version on this machine")
'''


class Frame:
    """A folder with this project's frame: conftest.py and provision.sh, and one test file."""

    def __init__(self, top: Path) -> None:
        self.top = top
        (top / "tests/provision.d").mkdir(parents=True)
        for name in (
            "tests/conftest.py", "tests/table.py", "tests/provision.sh", "pyproject.toml"
        ):  # fmt: skip
            shutil.copy(HERE.top / name, top / name)
        self.service("docker", "exit 0")
        self.service("live", "exit 0")
        self.test(_TEST)

    def service(self, name: str, status: str) -> None:
        """A service whose `status` is these lines of shell; `start` and `stop` leave a note."""
        cases = (f"status) {status}", f"stop) echo stop {name}", f"*) echo $1 {name}")
        script = "case $1 in\n" + "".join(f"{case} ;;\n" for case in cases) + "esac\n"
        (self.top / f"tests/provision.d/{name}.sh").write_text(script)

    def test(self, text: str) -> None:
        (self.top / "tests/test_frame.py").write_text(text)

    def run(self, *argv: str, ci: bool = False) -> tuple[int, dict, str]:
        tally = self.top / "tally.json"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--tally={tally}"]
        env = {name: value for name, value in os.environ.items() if name != "CI"}
        env.update({"CI": "true"} if ci else {})
        done = subprocess.run(
            [*command, *argv], cwd=self.top, env=env, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        return done.returncode, json.loads(tally.read_text()), done.stdout


@pytest.fixture
def frame(tmp_path: Path) -> Frame:
    return Frame(tmp_path)


def test_what_was_skipped_is_counted_by_reason_before_the_closing_line(frame: Frame) -> None:
    code, tally, out = frame.run()

    assert code == 0
    assert tally["passed"] == 2
    assert tally["reasons"] == {
        "the live server was not asked for (--live)": 1,
        "there is one Python version on this machine": 1,
    }
    assert re.search(r"(?m)^ +1  there is one Python version on this machine$", out)
    assert re.search(r"2 passed, 2 skipped in [\d.]+s", out.splitlines()[-1])


def test_the_live_server_is_used_when_asked_for(frame: Frame) -> None:
    _, tally, _ = frame.run("--live")

    assert (tally["passed"], tally["skipped"]) == (3, 1)


def test_a_missing_service_is_a_skip_with_its_reason_and_mend(frame: Frame) -> None:
    frame.service("docker", "echo 'no engine answers' >&2; exit 1")

    code, tally, _ = frame.run()

    reason = "docker is not set up (no engine answers): tests/provision.sh start docker"
    assert code == 0
    assert tally["reasons"][reason] == 1


def test_in_ci_what_could_be_installed_must_not_be_skipped(frame: Frame) -> None:
    frame.service("docker", "echo 'no engine answers' >&2; exit 1")

    code, tally, out = frame.run(ci=True)

    assert code == 1
    assert tally["error"] == 1
    assert "CI must not skip what can be installed" in out


def test_in_ci_a_skip_inside_a_test_that_names_a_package_fails_too(frame: Frame) -> None:
    frame.test('import pytest\ndef test_it():\n    pytest.skip("apt-get install strace")\n')

    assert frame.run(ci=False)[0] == 0
    assert frame.run(ci=True)[0] == 1


def test_in_ci_what_cannot_be_had_may_be_skipped(frame: Frame) -> None:
    frame.service("docker", "echo 'needs 25 GB of disk, 3 are free' >&2; exit 77")

    code, tally, _ = frame.run(ci=True)

    assert code == 0
    assert tally["reasons"]["docker cannot be had here: needs 25 GB of disk, 3 are free"] == 1


def test_a_developers_git_and_python_variables_do_not_reach_the_tests(
    frame: Frame, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame.test(
        "import os\n"
        "def test_it():\n"
        '    assert not {"GIT_DIR", "PYTHONHASHSEED", "DCU_MANIFEST"} & set(os.environ)\n'
        '    assert os.environ["https_proxy"] == "kept"\n'
    )
    for name in ("GIT_DIR", "DCU_MANIFEST"):
        monkeypatch.setenv(name, "planted")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("https_proxy", "kept")

    assert frame.run()[0] == 0


def _provision(frame: Frame, *argv: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(frame.top / "tests/provision.sh"), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_provision_runs_the_script_of_each_name_and_one_failure_hinders_no_other(
    frame: Frame,
) -> None:
    (frame.top / "tests/provision.d/docker.sh").write_text("exit 3\n")

    done = _provision(frame, "start", "docker", "live")

    assert done.stdout == "start live\n"
    assert done.returncode == 3
    assert "docker: start ended with 3" in done.stderr


def test_provision_asks_a_script_only_what_it_knows(frame: Frame) -> None:
    (frame.top / "tests/provision.d/docker.sh").write_text("echo installed\n")

    assert _provision(frame, "start", "docker").stdout == "installed\n"
    assert _provision(frame, "stop", "docker").stdout == ""
    assert _provision(frame, "stop", "live").stdout == "stop live\n"


def test_provision_without_a_word_says_how_it_is_called(frame: Frame) -> None:
    done = _provision(frame)

    assert done.returncode == 2
    assert "tests/provision.sh start" in done.stderr


def test_every_script_of_a_service_belongs_to_a_marker() -> None:
    from deploy.tasks import develop

    scripts = {path.stem for path in (HERE.top / "tests/provision.d").glob("*.sh")}

    assert scripts - develop._SERVICES - {"tools", "kernels"} == set()


def test_the_services_of_an_area_are_read_from_its_markers(tmp_path: Path) -> None:
    from deploy.tasks import develop

    text = "import pytest\npytestmark = [pytest.mark.slow, pytest.mark.docker]\n"
    (tmp_path / "test_a.py").write_text(f"{text}\n@pytest.mark.live\ndef test_x(): ...\n")

    assert develop._services([tmp_path], live=True) == ["docker", "live"]
    assert develop._services([tmp_path], live=False) == ["docker"]


def _inv(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HERE.top / "inv", *argv], capture_output=True, text=True, timeout=120, check=False
    )


def test_an_unknown_area_is_told_with_those_that_exist() -> None:
    done = _inv("test", "--area", "nowhere")

    assert done.returncode == 2
    assert re.search(r"fix: choose one of .*unit", done.stderr)


@pytest.mark.slow
def test_an_area_runs_and_with_json_stdout_is_one_value() -> None:
    done = _inv("test", "--area", "unit", "--fast", "--json", "--match", "test_git_changes_no_byte")

    value = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (value["passed"], value["failed"]) == (1, 0)


@pytest.mark.slow
def test_a_match_that_selects_nothing_is_no_success() -> None:
    assert _inv("test", "--area", "unit", "--fast", "--match", "no_such_test").returncode == 2


def test_an_unknown_bench_is_told_with_those_that_exist() -> None:
    done = _inv("bench-self", "--area", "nowhere")

    assert done.returncode == 2
    assert re.search(r"fix: choose one of .*inv", done.stderr)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_shows_the_command_that_ci_runs(name: str) -> None:
    text = (HERE.top / name).read_text("utf-8")

    assert re.search(r"(?m)^ *\$? ?\./inv test( +#.*| {2,}.*)?$", text)


def test_ci_runs_the_one_test_command_and_stops_what_it_started() -> None:
    script = (HERE.top / ".ci/run").read_text()

    assert re.search(r"(?m)^cd .* && \./inv test </dev/null$", script)
    assert re.search(r"trap 'sh .*provision\.sh\" stop ", script)


def test_fragments_of_the_changelog_are_named_and_written_as_they_are_read() -> None:
    names = sorted(path.name for path in (HERE.top / "changes").glob("*.md"))
    wrong = [n for n in names if not re.fullmatch(r"[a-z0-9-]+\.(feature|bugfix|doc|misc)\.md", n)]

    draft = ("build", "--draft", "--version", "9.9", "--date", "a day")
    done = subprocess.run(
        [sys.executable, "-m", "towncrier", *draft],
        cwd=HERE.top, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    assert wrong == ["template.md"]
    assert "## 9.9 (a day)" in done.stdout
    assert done.stdout.count("\n- ") == len(names) - 1
