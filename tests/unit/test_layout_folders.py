"""What must hold of the checkout as a whole: folders, names, texts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from deploy.layout import HERE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@lru_cache
def _tracked() -> tuple[Path, ...]:
    """The files that git knows and that are there."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=HERE.top, capture_output=True, check=True, timeout=60
    ).stdout.split(b"\0")
    paths = (HERE.top / name.decode() for name in names if name)
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


@lru_cache
def _texts() -> dict[Path, str]:
    """The texts among them."""
    found = {}
    for path in _tracked():
        data = path.read_bytes()
        if b"\0" not in data:
            found[path] = data.decode("utf-8", "replace")
    return found


def _project() -> dict:
    return tomllib.loads((HERE.top / "pyproject.toml").read_text())


@pytest.mark.parametrize("folder", ["docker", "kernels"])
def test_a_folder_named_like_a_package_holds_no_python_at_its_top(folder: str) -> None:
    assert sorted((HERE.top / folder).glob("*.py")) == []


@pytest.mark.parametrize("folder", ["docker", "kernels"])
def test_a_folder_without_python_hides_no_package_and_one_with_init_would(
    folder: str, tmp_path: Path
) -> None:
    """The trap itself: `import docker` from the checkout's top must give the SDK."""
    (tmp_path / folder).mkdir()
    packages = tmp_path / "packages" / folder
    packages.mkdir(parents=True)
    (packages / "__init__.py").write_text("")
    ask = f"import sys; sys.path.append({str(tmp_path / 'packages')!r}); import {folder} as m"
    ask += "; print(m.__file__)"

    def answer() -> str:
        command = [sys.executable, "-S", "-c", ask]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert answer() == str(packages / "__init__.py")
    (tmp_path / folder / "__init__.py").write_text("")
    assert answer() == str(tmp_path / folder / "__init__.py")


def test_import_docker_from_the_top_gives_the_sdk() -> None:
    ask = "import docker; print(docker.from_env.__name__, docker.__file__)"

    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=HERE.top, capture_output=True, text=True, check=True
    )

    name, file = done.stdout.split(maxsplit=1)
    assert name == "from_env"
    assert "site-packages" in file


def test_every_package_below_deploy_is_listed_for_installation() -> None:
    packages = {path.parent for path in (HERE.top / "deploy").rglob("__init__.py")}
    there = {".".join(folder.relative_to(HERE.top).parts) for folder in packages}

    assert there == set(_project()["tool"]["setuptools"]["packages"])


def test_every_folder_of_deploy_that_holds_python_is_a_package() -> None:
    python = [path for path in _tracked() if path.suffix == ".py"]
    folders = {path.parent for path in python if path.is_relative_to(HERE.top / "deploy")}

    assert [f for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_test_files_have_names_of_their_own_and_no_packages() -> None:
    tests = [path for path in _tracked() if path.is_relative_to(HERE.top / "tests")]
    names = Counter(path.name for path in tests if path.name.startswith("test_"))

    assert [name for name, count in names.items() if count > 1] == []
    homes = {path.parent for path in tests if path.name.startswith("test_")}
    assert [folder for folder in sorted(homes) if (folder / "__init__.py").exists()] == []


def test_git_changes_no_byte_of_any_file() -> None:
    assert (HERE.top / ".gitattributes").read_text() == "* -text\n"


def test_the_lock_pins_and_hashes_what_the_project_asks_for() -> None:
    project = _project()["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.match(r"[\w.-]+", text).group().lower() for text in asked}
    lock = (HERE.top / "requirements.lock").read_text()
    blocks = re.findall(r"(?m)^([\w.-]+)==\S+.*\\\n((?: +--hash=sha256:[0-9a-f]{64}.*\n)+)", lock)

    assert names - {name for name, _ in blocks} == set()
    assert len(blocks) == len(re.findall(r"(?m)^[^\s#]", lock))


# Documentation, names that stand for no host, and identifiers that only look like one (a schema's
# dialect, the first line of an LFS pointer, an SSH extension). Packages, images and models come
# from wherever the user's own tools look: no such host is named.
_HOSTS = {
    "docs.python.org", "peps.python.org", "git-scm.com", "www.w3.org", "example.com", "example.org",
    "json-schema.org", "git-lfs.github.com", "openssh.com", "keepachangelog.com",
}  # fmt: skip
_HOST = re.compile(r"(?<![\w.@/-])(?:[a-z0-9-]+\.)+(?:org|com|cn|io|net|ai|dev)(?![\w(.-])")


def _hosts(text: str) -> set[str]:
    """Host names as they stand in URLs, and bare ones in the commonest domains."""
    urls = set(re.findall(r"https?://(?:[^\s/@'\"]+@)?([A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+)", text))
    bare = {name for name in _HOST.findall(text) if name.endswith((".org", ".com", ".cn"))}
    return {name for name in urls | bare if not re.fullmatch(r"[\d.]+|.*\.(invalid|test)", name)}


def test_no_host_is_named_but_those_of_documentation() -> None:
    named = {str(p.relative_to(HERE.top)): _hosts(text) - _HOSTS for p, text in _texts().items()}

    assert {path: hosts for path, hosts in named.items() if hosts} == {}


def test_the_search_for_hosts_finds_them() -> None:
    url, bare = "some.host" + ".io", "reg.acme" + ".cn"
    text = f"see https://u:p@{url}/x, {bare}/image and 127.0.0.1, http://a.invalid"

    assert _hosts(text) == {url, bare}


def test_no_text_names_a_path_of_the_machine_it_was_written_on() -> None:
    here = {str(HERE.top), sys.base_prefix} - {"/usr", "/usr/local"}
    named = {p.name: [word for word in here if word in text] for p, text in _texts().items()}

    assert {name: words for name, words in named.items() if words} == {}


def test_no_text_speaks_of_issues_by_number() -> None:
    number = re.compile(r"(?i)\bissues? #?\d|(?<![\w&])#\d+\b(?!\w)")
    prose = {p: t for p, t in _texts().items() if p.suffix in (".py", ".md", ".sh", ".toml", ".j2")}

    assert {p.name: found for p, t in prose.items() if (found := number.findall(t))} == {}


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_a_readme_leads_to_every_page_of_docs_and_to_nothing_that_is_not_there(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (HERE.top / name).read_text(encoding="utf-8"))

    assert [link for link in links if not (HERE.top / link).exists()] == []
    assert {f"docs/{page.name}" for page in (HERE.top / "docs").glob("*.md")} <= set(links)


def test_what_a_run_makes_is_ignored_by_git() -> None:
    made = ["out/x", ".venv/x", ".venv.lock", "hosts.yaml", "deploy/__pycache__/x", ".mypy_cache/x"]

    done = subprocess.run(
        ["git", "check-ignore", *made], cwd=HERE.top, capture_output=True, text=True, check=False
    )

    assert done.stdout.split() == made


def test_shell_scripts_pass_shellcheck() -> None:
    texts = {path: text for path, text in _texts().items() if path.suffix != ".j2"}
    scripts = [path for path, text in texts.items() if re.match(r"#!/bin/(ba)?sh", text)]
    try:
        done = subprocess.run(
            ["shellcheck", "--external-sources", "--severity=warning", *scripts],
            cwd=HERE.top, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("apt-get install shellcheck")

    assert len(scripts) >= 4
    assert done.stdout == ""
