"""Config, manifest and archive: golden ids, and the laws that every way to make an image shares."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from deploy.image.archive import Image, Reference, archive_size, stream
from deploy.image.config import (
    Added,
    Base,
    Descriptor,
    config_document,
    content_id,
    run_config,
)
from deploy.image.layer import Entry, Kind, write_layer

EPOCH = 1_700_000_000
BELOW = "sha256:" + "a" * 64
BASE = Base(
    diff_ids=(BELOW,),
    config={
        "Env": ["PATH=/usr/bin:/bin"],
        "Cmd": ["bash"],
        "WorkingDir": "/srv",
        "Labels": None,
        "Hostname": "x",
    },
    layers=(Descriptor(digest=BELOW, size=1024),),
)
ADDED = Added(note="demo overlay", labels={"demo.manifest": "1"}, entrypoint=("/opt/demo/run.sh",))


def demo(folder: Path, base: Base = BASE, added: Added = ADDED) -> Image:
    path = folder / "layer.tar"
    entries = [
        Entry(path="opt/demo/run.sh", mode=0o755, data=b"#!/bin/sh\necho demo\n"),
        Entry(path="opt/demo/a.txt", data=b"demo\n"),
        Entry(path="opt/demo/old.txt", kind=Kind.WHITEOUT),
    ]
    with path.open("wb") as out:
        layer = dataclasses.replace(write_layer(entries, out, epoch=EPOCH), path=path)
    config = config_document(base, layer.diff_id, added, epoch=EPOCH)
    return Image(reference=Reference.parse("demo:1"), base=base, layer=layer, config=config)


def test_config_manifest_and_archive_have_their_known_digests(tmp_path: Path) -> None:
    image = demo(tmp_path)
    data = b"".join(stream(image))

    config = "319967c0303ebb79fd46f54a3e4a1df934ee49e0c7320a30772b41602fd81e10"
    manifest = "b7a9634f99979a2f88021a3b495d793a6c097f0a3c5b95bf9ad6148cf7b53c66"
    archive = "9aa44c953fcb35c398ca8de4e3f21a0631390ce97d9af78456ebe7889ae72437"
    assert image.config_id == f"sha256:{config}"
    assert image.manifest_id == f"sha256:{manifest}"
    assert hashlib.sha256(data).hexdigest() == archive
    assert len(data) == archive_size(image) == 20480


def test_every_blob_of_the_archive_hashes_to_its_name(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream(demo(tmp_path))))) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            if member.name.startswith("blobs/"):
                name = member.name.rpartition("/")[2]
                assert hashlib.sha256(content.read()).hexdigest() == name


def test_a_full_archive_holds_the_layers_of_the_base(tmp_path: Path) -> None:
    below = tmp_path / "below.tar"
    below.write_bytes(bytes(1024))
    digest = "sha256:" + hashlib.sha256(bytes(1024)).hexdigest()
    base = Base(diff_ids=(digest,), layers=(Descriptor(digest=digest, size=1024),))
    image = dataclasses.replace(demo(tmp_path, base), base_layers={digest: below})

    with tarfile.open(fileobj=io.BytesIO(b"".join(stream(image)))) as tar:
        names = tar.getnames()
        saved = json.load(tar.extractfile("manifest.json") or io.BytesIO())

    assert all(layer in names for layer in saved[0]["Layers"])


def test_an_entrypoint_of_ours_drops_the_command_that_was_written_for_another() -> None:
    document = json.loads(config_document(BASE, BELOW, ADDED, epoch=EPOCH))

    assert document["config"]["Entrypoint"] == ["/opt/demo/run.sh"]
    assert "Cmd" not in document["config"]


def test_without_an_entrypoint_the_base_keeps_its_own() -> None:
    added = Added(note="n")
    base = dataclasses.replace(BASE, config={"Entrypoint": ["/init"], "Cmd": ["sshd"]})

    config = json.loads(config_document(base, BELOW, added, epoch=EPOCH))["config"]

    assert (config["Entrypoint"], config["Cmd"]) == (["/init"], ["sshd"])


def test_variables_replace_the_base_ones_in_place_and_new_ones_follow() -> None:
    base = dataclasses.replace(BASE, config={"Env": ["B=1", "PATH=/bin", "A=1"]})
    added = Added(note="n", env={"A": "2", "Z": "9", "C": "8"})

    config = json.loads(config_document(base, BELOW, added, epoch=EPOCH))["config"]

    assert config["Env"] == ["B=1", "PATH=/bin", "A=2", "C=8", "Z=9"]


def test_a_base_without_environment_gets_the_path_that_builders_add() -> None:
    base = dataclasses.replace(BASE, config={})

    config = json.loads(config_document(base, BELOW, ADDED, epoch=EPOCH))["config"]

    assert config["Env"] == ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]


def test_history_has_one_entry_for_each_layer_and_no_clock() -> None:
    document = json.loads(config_document(BASE, BELOW, ADDED, epoch=EPOCH))

    assert len(document["history"]) == len(document["rootfs"]["diff_ids"]) == 2
    assert {entry["created"] for entry in document["history"]} == {"2023-11-14T22:13:20Z"}


@pytest.mark.parametrize("empty", [None, [], ""])
def test_a_run_config_is_one_value_however_an_engine_says_nothing(empty: object) -> None:
    assert run_config({"Cmd": empty}) == run_config({})


def test_the_content_id_ignores_what_builders_say_of_themselves() -> None:
    plain = content_id([BELOW], {"Env": ["A=1"], "Labels": {"a": "b"}}, "amd64")
    built = content_id(
        [BELOW],
        {"Env": ["A=1"], "Labels": {"a": "b", "io.buildah.version": "1"}, "Hostname": "h"},
        "amd64",
    )
    other = content_id([BELOW], {"Env": ["A=2"], "Labels": {"a": "b"}}, "amd64")

    assert plain == built != other


@pytest.mark.parametrize(
    ("text", "name", "tag", "full"),
    [
        ("demo", "demo", "latest", "docker.io/library/demo:latest"),
        ("demo:1", "demo", "1", "docker.io/library/demo:1"),
        ("team/demo:1", "team/demo", "1", "docker.io/team/demo:1"),
        (
            "host.example:5000/a/b",
            "host.example:5000/a/b",
            "latest",
            "host.example:5000/a/b:latest",
        ),
        ("localhost/a:2", "localhost/a", "2", "localhost/a:2"),
    ],
)
def test_a_reference_is_read_as_docker_reads_it(text: str, name: str, tag: str, full: str) -> None:
    reference = Reference.parse(text)

    assert (reference.name, reference.tag, reference.full) == (name, tag, full)
