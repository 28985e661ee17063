"""The tasks that look: show, files, gc, completion. Gathered by tasks.py."""

from __future__ import annotations

from invoke import Context

from deploy.console import show_json, task

# Asks the very inv that is typed, wherever it lies; nothing has to be on PATH.
_BASH = """\
_inv_complete() {
    local found folder
    case $3 in
    -n | --name)
        folder=$(dirname -- "$1")/manifests
        found=$(ls -- "$folder" 2>/dev/null | sed -n '/[.]lock[.]yaml$/d; s/[.]yaml$//p')
        ;;
    *) found=$("$1" --complete -- inv "${COMP_WORDS[@]:1}" 2>/dev/null) ;;
    esac
    COMPREPLY=($(compgen -W "$found" -- "$2"))
}
complete -o default -F _inv_complete inv
"""


@task(example="./inv show -n demo")
def show(_: Context, name: str = "", to: str = "", json: bool = False) -> int:
    """Show every resolved value and where it comes from: manifest line, default, lock or host."""
    from deploy import provenance, report
    from deploy.layout import HERE

    targets = [text.strip() for text in to.split(",") if text.strip()]
    rows = provenance.rows(name, HERE, targets)
    if json:
        show_json({"schema": "show/1", "values": [row._asdict() for row in rows]})
    else:
        print(report.table([tuple(row) for row in rows], ""))
    return 0


@task(example="./inv files -n NAME -t container:ID")
def files(_: Context, name: str = "", to: str = "", json: bool = False) -> int:
    """List a vendor's package on a target as its vendor made it, into manifests/NAME.files."""
    from deploy import flow

    path, changed = flow.list_base(name, to)
    if json:
        show_json({"schema": "files/1", "path": str(path), "changed": changed})
    else:
        done = "written" if changed else "unchanged"
        print(f"{path} {done}: now run `./inv lock -n {path.stem}`")
    return 0


@task(
    example="./inv gc --yes",
    help={
        "yes": "remove what may go; without it nothing is removed",
        "engine": "also what calls left in the container engine: their containers, nameless images",
    },
)
def gc(_: Context, yes: bool = False, engine: bool = False, json: bool = False) -> int:
    """Show what is kept below out/, with size and age; remove what no lock names."""
    from deploy import caches, imaging, report
    from deploy.layout import HERE

    units = caches.survey(HERE)
    gone = caches.remove(units) if yes else []
    left = imaging.gc(yes=yes) if engine else []
    if json:
        show_json(report.caches_json(units, gone, left))
    else:
        print(report.caches_text(units, gone, left))
    return 0


@task(example="./inv completion > ~/.inv-completion; . ~/.inv-completion")
def completion(_: Context, json: bool = False) -> int:
    """Print what completes tasks and flags at the tab key in bash."""
    if json:
        show_json({"schema": "completion/1", "bash": _BASH})
    else:
        print(_BASH, end="")
    return 0
