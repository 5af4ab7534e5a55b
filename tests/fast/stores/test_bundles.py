"""Which tensors a stage stores, and where: from original files as from shards, and from the hub by ranges alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from manifests.digest import digest_bytes
from manifests.schema import Layout, Manifest, Model, OriginalFile, Source, Span, Stage, TieGroup, TieMember, Virtual
from stores.bundles import Bundles
from stores.local import LocalFile
from stores.open import open_manifest
from tests.builders import (
    INDEX,
    Tensor,
    files_in,
    index_of,
    llama_config,
    pack,
    random_tensors,
    run,
    weights_path,
    write_model,
    write_safetensors,
)
from tests.refusals import refused
from tests.servers.hub import Hub

OWNER, REPLICAS = "a.weight", ("b.weight", "c.weight")


def write_original(folder: Path, tensors: dict[str, Tensor]) -> tuple[OriginalFile, int]:
    """Write a file of tensors, and return its entry and where its data begin."""
    path = folder / "model.safetensors"
    write_safetensors(path, tensors)
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    digest, fingerprint = digest_bytes(data[:begin]), LocalFile(path).fingerprint
    return OriginalFile(path=path.name, nbytes=len(data), pin=fingerprint, digest=digest), begin


def two_stages(folder: Path, original: OriginalFile, spans: Sequence[tuple[Span, ...]]) -> Manifest:
    """Give a manifest of modules a, b and c, which share a weight: a on one stage, b and c on another."""
    owner, *replicas = (
        TieMember(fqn=fqn, stage=stage) for fqn, stage in zip((OWNER, *REPLICAS), (0, 1, 1), strict=True)
    )
    return Manifest(
        created_by="a test",
        model=Model(architecture="Abc", num_layers=0, num_params=4),
        source=Source(kind="huggingface", location=str(folder)),
        layout=Layout(spec="pp=2", style="loop", num_stages=2, num_ranks=2, num_virtual=1),
        stages=tuple(
            Stage(
                index=index, rank=index, virtual=0, modules=modules, num_tensors=1, num_params=4,
                nbytes=sum(span.end - span.begin for span in here), shards=(), spans=here,
            )
            for index, (modules, here) in enumerate(zip((("a",), ("b", "c")), spans, strict=True))
        ),
        ties=(TieGroup(owner=owner, replicas=tuple(replicas)),),
        virtual=Virtual(location=str(folder), files=(original,)),
    )  # fmt: skip


def test_bytes_of_an_owner_elsewhere_stand_for_every_member_of_its_group_on_the_stage(tmp_path: Path) -> None:
    original, begin = write_original(tmp_path, {OWNER: Tensor(dtype="U8", shape=(4,), data=b"abcd")})
    span = Span(file=0, begin=begin, end=begin + 4)
    manifest = two_stages(tmp_path, original, ((span,), (span,)))
    bundles = Bundles(manifest, tmp_path / "nowhere")
    assert [tensor.name for tensor in bundles.tensors_on(manifest.stages[0])] == [OWNER]
    replicas = bundles.tensors_on(manifest.stages[1])
    assert tuple(tensor.name for tensor in replicas) == REPLICAS
    assert {(tensor.file, tensor.begin, tensor.end) for tensor in replicas} == {
        (LocalFile(tmp_path / "model.safetensors"), begin, begin + 4)
    }


@pytest.mark.parametrize(("begin", "end"), [(1, 4), (0, 3), (1, 3), (0, 5), (4, 7), (3, 8), (8, 9)])
def test_span_that_cuts_a_tensor_is_refused(begin: int, end: int, tmp_path: Path) -> None:
    four = Tensor(dtype="U8", shape=(4,), data=b"abcd")
    original, first = write_original(tmp_path, {OWNER: four, "a.bias": four})
    manifest = two_stages(tmp_path, original, ((Span(file=0, begin=first + begin, end=first + end),), ()))
    code, where = refused(lambda: Bundles(manifest, tmp_path).tensors_on(manifest.stages[0]))
    assert (code, where) == ("manifest.wrong-span", f"stages[0].spans: {tmp_path}/model.safetensors")


def push_in_order(hub: Hub, folder: Path) -> str:
    """Push a model of 8 MiB, with its layers in order in two files."""
    config = llama_config(hidden_size=256, intermediate_size=1024)
    tensors = random_tensors(config)
    write_model(folder, config, tensors)
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    shards = {"model-1.safetensors": names[:20], "model-2.safetensors": names[20:]}
    for shard, held in shards.items():
        write_safetensors(folder / shard, {fqn: tensors[fqn] for fqn in held})
    (folder / INDEX).write_bytes(index_of(shards, sum(len(tensor.data) for tensor in tensors.values())))
    return hub.push("org/model", files_in(folder))


def test_virtual_bundles_on_the_hub_are_read_by_their_own_bytes_at_their_commit(hub: Hub, tmp_path: Path) -> None:
    commit = push_in_order(hub, tmp_path / "source")
    headers = 2 * 128 << 10  # of two files, read with what follows them
    pack("hf://org/model", tmp_path / "virtual", "pp=4", "--virtual")
    virtual = open_manifest(tmp_path / "virtual").manifest.virtual
    assert virtual is not None
    assert (virtual.location, virtual.revision) == ("hf://org/model", commit)
    weights = [request for request in hub.take_requests() if request.is_cdn and request.range]
    assert sum(request.nbytes for request in weights) == headers

    hub.push("org/model", {"config.json": b"{}"})  # the branch moves on
    run("pack", tmp_path / "virtual", "--stages", "1", "--out", tmp_path / "part")
    sent = sum(request.nbytes for request in hub.take_requests())
    stage = open_manifest(tmp_path / "part").manifest.stages[1]
    assert stage.nbytes <= sent <= 1.02 * stage.nbytes + headers + 20_000  # and a listing of the commit

    pack(tmp_path / "source", tmp_path / "whole", "pp=4")
    alone, in_root = tmp_path / "part/stage-001/model.safetensors", tmp_path / "whole" / weights_path(1, 4)
    assert alone.read_bytes() == in_root.read_bytes()


def test_a_stage_asks_the_hub_for_the_headers_of_its_own_files_alone(hub: Hub, tmp_path: Path) -> None:
    commit = push_in_order(hub, tmp_path / "source")
    pack("hf://org/model", tmp_path / "virtual", "pp=4", "--virtual")
    hub.take_requests()
    manifest = open_manifest(tmp_path / "virtual").manifest
    tensors = Bundles(manifest, tmp_path / "virtual").tensors_on(manifest.stages[0])
    asked = {request.path for request in hub.take_requests() if request.path.endswith(".safetensors")}
    assert asked == {f"/org/model/resolve/{commit}/model-1.safetensors"}
    assert {str(tensor.file) for tensor in tensors} == {f"hf://org/model@{commit}/model-1.safetensors"}
    index = json.loads((tmp_path / "source" / INDEX).read_text())["weight_map"]
    assert {tensor.name for tensor in tensors} <= {fqn for fqn, file in index.items() if file == "model-1.safetensors"}
