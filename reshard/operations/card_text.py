"""What the model card of a pushed checkpoint says about it."""

from __future__ import annotations

from manifests.schema import Manifest, Source
from manifests.sizes import show_bytes
from stores.address import SCHEME, parse_hub_address


def card_section(manifest: Manifest, digest: str, place: str) -> str:
    """Return the text on a checkpoint that is at `place` on the hub: source, revision, layout and digests."""
    layout, training, shards = manifest.layout, manifest.training, tuple(manifest.shards)
    name = place.rpartition("/")[2].partition("@")[0]
    base, revision = base_model_of(manifest.source), manifest.source.revision
    made_from = f"[{base}](https://huggingface.co/{base})" if base else "a folder"
    lines = [
        "## Checkpoint",
        "",
        f"- architecture: {_code(manifest.model.architecture)}, {manifest.model.num_params:,} parameters",
        f"- source: {made_from}" + (f", revision {_code(revision)}" if base and revision else ""),
        f"- layout: {layout.num_stages} pipeline stages on {layout.num_ranks} ranks ({_code(layout.spec)})",
        *([f"- training: step {training.step:,}, {training.num_tokens:,} tokens"] if training else []),
        f"- size: {show_bytes(sum(shard.nbytes for shard in shards))} in {len(shards)} shards",
        f"- `manifest.json`: {_code(digest)}, which roots the digest of every tensor",
        f"- written by {_code(manifest.created_by)}",
        "",
        "```sh",
        f"reshard verify {place}",
        f"reshard pack {place} --out ./{name}  # to train it; --layout reshards it",
        "```",
    ]
    return "\n".join(lines)


def base_model_of(source: Source) -> str | None:
    """Return the hub repository that a checkpoint was made from; None for a folder, whose path stays private."""
    if source.kind != "huggingface" or not source.location.startswith(SCHEME):
        return None
    address = parse_hub_address(source.location.removeprefix(SCHEME))
    return address.repo if address else None


def _code(text: str) -> str:
    """Return text as inline code: manifests may come from anywhere."""
    shown = "".join(" " if char in "`<>|\r\n" else char for char in text)
    return f"`{shown}`"
