"""The tasks about images: build-image, render, reproduce -t image. tasks.py gathers them."""

from __future__ import annotations

from invoke import Context

from deploy.console import show_json, task


@task(
    example="./inv build-image -n demo",
    help={
        "tag": "the image's name (default: dcu-bundle/NAME)",
        "output": "oci:FILE writes the whole image, base included, and loads nothing",
        "pull": "pull the base by its locked digest when the engine does not hold it",
        "fresh": "believe no cache of earlier builds",
        "dockerfile": "build the rendered Dockerfile instead, with the engine's classic builder",
    },
)
def build_image(
    _: Context,
    name: str = "",
    tag: str = "",
    output: str = "",
    pull: bool = False,
    fresh: bool = False,
    dockerfile: bool = False,
    json: bool = False,
) -> int:
    """Assemble the locked image and load it; nothing happens when it is there already."""
    from deploy import imaging

    if dockerfile:
        built = imaging.build_dockerfile(name, tag=tag)
    else:
        built = imaging.build_image(name, tag=tag, output=output, pull=pull, fresh=fresh)
    if json:
        show_json(built.to_json())
    else:
        print(built.text)
    return 0


def reproduce_image(name: str, to: str, *, json: bool) -> int:
    """What `reproduce -t image` does; any other target is a wrong value."""
    from deploy import imaging
    from deploy.errors import BadValues

    kind, _, tag = to.partition(":")
    if kind != "image":
        raise BadValues(
            f"cannot reproduce into {to}",
            why="a submission is reproduced into a fresh root of this machine, or into an image",
            fix="leave -t out, or say -t image",
        )
    built, links = imaging.reproduce(name, tag=tag)
    if json:
        show_json({**built.to_json(), "links": links})
    else:
        print("\n".join(f"{row['link']:<18} {row['found']}" for row in links))
        print(f"the image {built.reference} is the locked one")
    return 0


@task(
    example="./inv render -n demo --output out/context",
    help={"output": "the folder to write into (default: out/NAME/rendered)"},
)
def render(_: Context, name: str = "", output: str = "", json: bool = False) -> int:
    """Write the launch scripts, ENVIRONMENT.md and the Dockerfile with the bundle beside them."""
    from deploy import imaging

    paths = imaging.render(name, output=output)
    if json:
        show_json({"schema": "render/1", "files": [str(path) for path in paths]})
    else:
        print("\n".join(map(str, paths)))
    return 0
