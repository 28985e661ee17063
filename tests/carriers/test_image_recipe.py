"""The Dockerfile route: what is refused unsent, and what it shares with a loaded image."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import scripts
from deploy.agent.words import Verb
from deploy.carriers import Request, recipe
from deploy.carriers.assembly import Folders, Order, handed_in
from deploy.carriers.assembly import build as assemble
from deploy.carriers.container import ImageTarget
from deploy.carriers.engine import Engine, open_engine
from deploy.errors import BadValues, Refused
from deploy.image.config import Base
from tests.carriers import dock


def context(folder: Path, dockerfile: str, ignore: str | None = None, *names: str) -> Path:
    (folder / "Dockerfile").write_text(dockerfile)
    if ignore is not None:
        (folder / ".dockerignore").write_text(ignore)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize(
    "line",
    ["RUN --mount=type=cache,target=/ccache true", "RUN <<E\necho one\nE", "COPY <<'E' /a\nx\nE"],
)
def test_what_needs_buildkit_is_named_before_anything_is_sent(line: str) -> None:
    with pytest.raises(BadValues) as caught:
        recipe.require_plain(f"FROM base\n{line}\n")

    assert f"line 2: {line.splitlines()[0]}" in caught.value.why


@pytest.mark.parametrize(
    "line", ["RUN test 1 '<' 2", "# RUN <<E", "RUN x=$((1 << 2))", "RUN echo --mount"]
)
def test_what_only_looks_like_it_passes(line: str) -> None:
    recipe.require_plain(f"FROM base\n{line}\n")


def test_the_context_follows_the_ignore_file_in_its_order(tmp_path: Path) -> None:
    names = ("keep.so", "build/keep.txt", "build/x.o", "docs/d.md", ".git/HEAD", "a/m.py")
    ignore = "build\n!build/keep.txt\n/docs\n.git\n**/__pycache__\n"
    folder = context(tmp_path, "FROM x\n", ignore, *names, "a/__pycache__/m.pyc")

    found = recipe.read_context(folder)

    assert found.files == (".dockerignore", "Dockerfile", "a/m.py", "build/keep.txt", "keep.so")
    assert found.size == sum((folder / name).stat().st_size for name in found.files)


@pytest.mark.parametrize(
    ("ignore", "pattern"),
    [("*\n", "'*'"), ("*.so\n!other\n", "'*.so'"), ("*.so\n!x.so\n*\n", "'*'")],
)
def test_a_file_that_is_copied_and_not_sent_is_named_with_its_pattern(
    tmp_path: Path, ignore: str, pattern: str
) -> None:
    folder = context(tmp_path, "FROM x\nCOPY x.so \\\n  here/ /\n", ignore, "x.so", "here/a")

    with pytest.raises(BadValues) as caught:
        recipe.require_sources(recipe.read_context(folder))

    assert f"x.so: .dockerignore drops it by the pattern {pattern}" in caught.value.why


def test_a_file_that_is_copied_and_absent_is_named(tmp_path: Path) -> None:
    folder = context(tmp_path, "FROM x\nCOPY --from=other y /\nCOPY --chown=0 x.so /\n")

    with pytest.raises(BadValues) as caught:
        recipe.require_sources(recipe.read_context(folder))

    assert caught.value.why == "x.so: it is not there"


def test_a_folder_without_dockerfile_is_no_context(tmp_path: Path) -> None:
    with pytest.raises(BadValues, match="no build context"):
        recipe.read_context(tmp_path)


# --- on a real engine -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine() as found:
        yield found


def quiet(_: str) -> None:
    """Progress is not looked at here."""


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize("user", ["", "nobody"])
def test_the_dockerfile_makes_the_tree_and_run_config_of_the_loaded_image(
    engine: Engine, tmp_path: Path, user: str
) -> None:
    reference = dock.own("route")
    other = f"{reference.name}:2"
    with dock.base_image(engine, config={"User": user, "Entrypoint": ["/init"]}) as base:
        manifest = dock.manifest(base)
        made = dock.bundle(tmp_path, meaning=manifest.meaning())
        rendered = scripts.files(manifest, user=user)
        for one in rendered:
            (tmp_path / one.name).write_bytes(one.data)
        (tmp_path / "bundle.pyz").write_bytes(made.path.read_bytes())
        (tmp_path / "stray.bin").write_bytes(bytes(1 << 20))
        extras = handed_in(made, scripts.on_target(manifest))
        order = Order(bundle=made, base=base, reference=reference, epoch=dock.EPOCH, extras=extras)
        assemble(engine, order, Folders(tmp_path / "w", tmp_path / "c"))
        said: list[str] = []
        try:
            recipe.build(engine, tmp_path, other, said.append)
            loaded, built = (
                Base.from_inspect(engine.inspect(f"{reference.name}:{n}") or {}) for n in (1, 2)
            )
            found = [
                ImageTarget(f"{reference.name}:{n}").deliver(made, Request(verb=Verb.VERIFY))
                for n in (1, 2)
            ]
        finally:
            engine.remove_image(str(reference))
            engine.remove_image(other)

    assert [one.exit for one in found] == [0, 0], [one.error for one in found]
    assert found[0].tree == found[1].tree == made.plan.tree
    assert loaded.run_config == built.run_config
    assert said[0].startswith(f"context: {len(rendered) + 1} files, ")  # and no stray.bin


@pytest.mark.docker
def test_a_step_that_fails_leaves_no_image_and_no_container(engine: Engine, tmp_path: Path) -> None:
    def containers() -> set[str]:
        # Others use this engine, too; what a build leaves has ended.
        argv = ("docker", "ps", "-aq", "--filter", "status=exited", "--filter", "label=recipe")
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
        return set(done.stdout.split())

    dockerfile = f"FROM {dock.DEBIAN}\nLABEL recipe=1\nRUN true\nRUN exit 7\n"
    before = containers()

    with pytest.raises(Refused) as caught:
        recipe.build(engine, context(tmp_path, dockerfile), "dcu-test/fails:1", quiet)

    assert "7" in caught.value.why
    assert engine.inspect("dcu-test/fails:1") is None
    assert containers() == before


@pytest.mark.docker
def test_what_a_step_says_comes_line_by_line_and_without_colours(
    engine: Engine, tmp_path: Path
) -> None:
    speak = "printf 'to stdout\\n'; printf 'to stderr\\nand more\\n' >&2"
    folder = context(tmp_path, f"FROM {dock.DEBIAN}\nRUN {speak}; exit 7\n")
    said: list[str] = []

    with pytest.raises(Refused) as caught:
        recipe.build(engine, folder, "dcu-test/speaks:1", said.append)

    assert {"to stdout", "to stderr", "and more"} <= set(said)
    assert [line for line in (*said, caught.value.why) if not line.isprintable()] == []


@pytest.mark.docker
def test_a_context_over_the_limit_is_not_sent(engine: Engine, tmp_path: Path) -> None:
    folder = context(tmp_path, f"FROM {dock.DEBIAN}\nCOPY big /\n", None, "big")
    (folder / "big").write_bytes(bytes(5000))

    with pytest.raises(BadValues) as caught:
        recipe.build(engine, folder, "dcu-test/big:1", quiet, limit=4000)

    assert "the limit is 4000" in caught.value.why
    assert engine.inspect("dcu-test/big:1") is None


def test_the_rendered_dockerfile_is_plain_and_its_context_is_whole(tmp_path: Path) -> None:
    for one in scripts.files(dock.manifest("vendor:1")):
        (tmp_path / one.name).write_bytes(one.data)
    (tmp_path / "bundle.pyz").write_bytes(b"")
    (tmp_path / "secrets.env").write_text(json.dumps({"not": "sent"}))

    found = recipe.read_context(tmp_path)

    recipe.require_plain((tmp_path / "Dockerfile").read_text())
    recipe.require_sources(found)
    assert "secrets.env" not in found.files
