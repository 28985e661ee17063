"""The receipt in an image: what a deploy of the same plan would have left in its site.

So `status`, `verify` and gate 5 know in a container of the image what is installed, and a deploy
finds nothing to do. It says of every original what it was and keeps none: the base image has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from typing import Any

from deploy.agent.plan import ABSENT, Plan
from deploy.agent.pyc import cache_file
from deploy.agent.receipt import HOME, RECEIPT, Receipt
from deploy.agent.words import canonical
from deploy.errors import Refused

from .base import Files, Seen

VERB = "build-image"  # in place of the agent's verb: nobody ran one here


def require_pristine(files: Files, site: str) -> None:
    """Raise Refused for a base that was deployed to: its originals would be lost for good."""
    if files.look(f"{site}/{HOME}").kind == "absent":
        return
    raise Refused(
        "the base image is not as its vendor made it",
        why=f"{site}/{HOME} says that an overlay was deployed to it",
        fix="name the vendor's image as base.image",
    )


def said(plan: Plan, inputs: str, base: str, epoch: int) -> dict[str, Any]:
    """The part of a receipt that does not come from files; its only clock is the head commit's."""
    since = datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "serial": 1,
        "plan": plan.digest,
        "name": plan.name,
        "identities": {
            "plan": plan.digest,
            "payload": plan.payload,
            "inputs": inputs,
            "tree": plan.tree,
        },
        "incidental": {"verb": VERB, "since": since, "plan": plan.digest, "base": base},
    }


def receipt(
    plan: Plan,
    site: str,
    files: Files,
    *,
    head: Mapping[str, Any],
    pycs: Mapping[str, bytes],
    python: Mapping[str, str],
    folders: Collection[str],
    removed: Mapping[str, Seen],
) -> bytes:
    """The receipt's bytes. `head` is what `said` gave; paths are relative to the site."""
    record = Receipt({**head, "python": dict(python)})
    for planned in plan.files:
        before = files.look(f"{site}/{planned.path}")
        want, state = planned.want, before.state
        if state.same_content(want) and (want.type != "file" or state.mode == want.mode):
            continue  # right before us: it has no original, and stays on a restore
        record.files[planned.path] = (ABSENT if want.absent else want).to_json()
        record.originals[planned.path] = {"kept": "", "state": state.to_json()}
    sources = {planned.path: planned.want.sha256 for planned in plan.files}
    record.pycs = {
        cache_file(module, python["tag"]): {
            "sha256": hashlib.sha256(body).hexdigest(),
            "source": sources[module],
        }
        for module, body in pycs.items()
    }
    record.folders = sorted(folders)
    record.removed = {path: [s.mode, s.uid, s.gid] for path, s in removed.items()}
    return canonical(record.to_json())


__all__ = ["RECEIPT", "receipt", "require_pristine", "said"]
