"""Names of GPU architectures: the one asked for, and whether a code object fits a device."""

from __future__ import annotations

import re

from deploy.errors import BadValues

BARE = re.compile(r"gfx[0-9]+[0-9a-f]*")
FEATURE = re.compile(r"(sramecc|xnack|[a-z0-9-]+)([+-])")


def asked(text: str) -> str:
    """Return `text` if it is exactly one bare arch, in the only spelling that builds understand.

    The list of a source is matched against bare names, joined by `;`: with any other separator or
    with a feature nothing matches, and some builds then go on with another arch.
    """
    if BARE.fullmatch(text):
        return text
    if re.search(r"[,;\s]", text.strip()):
        several = [part for part in re.split(r"[,;\s]+", text) if part]
        raise _bad(text, f"it names {len(several)} archs; a bundle is for exactly one")
    if ":" in text:
        bare, _, features = text.partition(":")
        raise _bad(text, f"a feature such as :{features} makes the build drop it; say {bare}")
    raise _bad(text, "an arch is written like gfx936, in lower case")


def _bad(text: str, why: str) -> BadValues:
    return BadValues(
        f"kernels.arch {text!r} cannot be built",
        why=why,
        fix="write one bare arch, for instance `arch: gfx936`",
    )


def fits(device: str, code: str) -> bool:
    """True when a code object made for the target id `code` runs on the target id `device`.

    The processors must be equal; a feature that the code object states must be the device's, and
    one that it leaves out fits both settings.
    """
    theirs, features = _parts(device)
    mine, needed = _parts(code)
    return mine == theirs and all(features.get(k) == v for k, v in needed.items())


def _parts(target: str) -> tuple[str, dict[str, str]]:
    name, *features = target.split(":")
    found = (FEATURE.fullmatch(feature) for feature in features)
    return name, {m[1]: m[2] for m in found if m}
