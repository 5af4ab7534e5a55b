"""Manifests that agree with themselves, drawn by hypothesis, and one of every feature."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from manifests.placement import Placement, Style
from manifests.schema import (
    AuxiliaryFile,
    Layout,
    Manifest,
    Model,
    ModelDescription,
    OriginalFile,
    Parent,
    Shard,
    Source,
    Span,
    Stage,
    TieGroup,
    TieMember,
    TrainingState,
    Virtual,
)

COUNTS = st.integers(0, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64).map("blake3:".__add__)
PARTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\"), min_size=1, max_size=12)
NAMES = st.text("abcXYZ_09", min_size=1, max_size=6)
PATHS = st.lists(PARTS.filter(lambda part: part not in (".", "..")), min_size=1, max_size=3).map("/".join)


def digest_of(digit: str) -> str:
    return "blake3:" + 64 * digit


@st.composite
def descriptions(draw: st.DrawFn) -> ModelDescription:
    """Draw a description whose modules do not overlap."""
    names = NAMES.filter(lambda name: not name.isdecimal())
    modules = tuple(draw(st.lists(names, min_size=4, max_size=7, unique=True)))
    tied = tuple(draw(st.lists(NAMES, min_size=4, max_size=4, unique=True)))
    return ModelDescription(
        inputs=modules[:1],
        layers=modules[1:3],
        outputs=modules[3:4],
        count=(draw(NAMES), draw(NAMES)),
        width=draw(NAMES),
        tied=draw(st.booleans()),
        architecture=draw(st.none() | NAMES),
        ties=draw(st.sampled_from(((), (tied,), (tied[:2], tied[2:])))),
        buffers=tuple(draw(st.lists(NAMES, max_size=2))),
        ignored=tuple(draw(st.lists(NAMES.map(".".__add__), max_size=2))),
        spare=modules[4:],
        kinds=tuple(tuple(draw(st.lists(NAMES, min_size=1, max_size=2))) for _ in range(draw(st.integers(0, 2)))),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Draw a manifest that breaks no invariant."""
    style: Style = draw(st.sampled_from(("loop", "v")))
    num_ranks, num_virtual = draw(st.integers(1, 3)), 2 if style == "v" else draw(st.integers(1, 3))
    placement = Placement(num_stages=num_ranks * num_virtual, num_ranks=num_ranks, style=style)
    paths = iter(draw(st.lists(PATHS.filter("manifest.json".__ne__), min_size=12, max_size=12, unique=True)))
    modules = iter(draw(st.lists(TEXTS.filter(bool), min_size=18, max_size=18, unique=True)))
    held = [tuple(next(modules) for _ in range(draw(st.integers(0, 2)))) for _ in range(placement.num_stages)]
    virtual, spans = _virtual(draw, placement.num_stages)
    return Manifest(
        created_by=draw(TEXTS),
        model=Model(
            architecture=draw(TEXTS),
            num_layers=draw(COUNTS),
            num_params=draw(COUNTS),
            description=draw(st.none() | descriptions()),
        ),
        source=Source(
            kind=draw(TEXTS),
            location=draw(TEXTS),
            revision=draw(st.none() | TEXTS),
            left_out=tuple(draw(st.lists(TEXTS, max_size=2))),
        ),
        layout=Layout(
            spec=draw(TEXTS),
            style=style,
            num_stages=placement.num_stages,
            num_ranks=num_ranks,
            num_virtual=num_virtual,
            schedule=draw(st.none() | TEXTS),
        ),
        stages=tuple(
            _stage(draw, index, placement, held[index], here or next(paths)) for index, here in enumerate(spans)
        ),
        ties=_ties(draw, held),
        files=tuple(
            AuxiliaryFile(path=next(paths), nbytes=draw(COUNTS), digest=draw(DIGESTS))
            for _ in range(draw(st.integers(0, 2)))
        ),
        parents=tuple(Parent(location=draw(TEXTS), digest=draw(DIGESTS)) for _ in range(draw(st.integers(0, 2)))),
        training=None if virtual else draw(st.none() | st.builds(TrainingState, step=COUNTS, num_tokens=COUNTS)),
        virtual=virtual,
    )


def full_manifest() -> Manifest:
    """Give a manifest with every field filled: what tests/data/golden/manifest-v1.json says."""
    held = (("model.embed_tokens", "model.layers.0"), ("model.layers.1",), (), ("model.norm", "lm_head"))
    ranks = Placement(num_stages=4, num_ranks=2, style="v")
    return Manifest(
        created_by="reshard 0.1.0",
        model=Model(architecture="LlamaForCausalLM", num_layers=2, num_params=4_288),
        source=Source(
            kind="huggingface", location="/models/täst", revision="5d3a2f1", left_out=("original/consolidated.00.pth",)
        ),
        layout=Layout(
            spec="pp=2,style=v", style="v", num_stages=4, num_ranks=2, num_virtual=2, schedule="ZBVZeroBubble"
        ),
        stages=tuple(
            Stage(
                index=index,
                rank=ranks.rank_of(index),
                virtual=ranks.virtual_of(index),
                modules=modules,
                num_tensors=len(modules),
                num_params=64 * len(modules),
                nbytes=128 * len(modules),
                shards=(
                    Shard(
                        path=f"stage-{index:03d}/model.safetensors",
                        nbytes=4096 + 128 * len(modules),
                        digest=digest_of(str(index)),
                    ),
                )
                if modules
                else (),
            )
            for index, modules in enumerate(held)
        ),
        ties=(
            TieGroup(
                owner=TieMember(fqn="model.embed_tokens.weight", stage=0),
                replicas=(TieMember(fqn="lm_head.weight", stage=3),),
            ),
        ),
        files=(
            AuxiliaryFile(path="config.json", nbytes=612, digest=digest_of("c")),
            AuxiliaryFile(path="original/params.json", nbytes=180, digest=digest_of("e")),
            AuxiliaryFile(path="source.json", nbytes=2048, digest=digest_of("d")),
        ),
        parents=(Parent(location="/packed/pp4", digest=digest_of("f")),),
        training=TrainingState(step=300, num_tokens=1_228_800),
    )


def described_manifest() -> Manifest:
    """Give the full manifest of an architecture that is described: tests/data/golden/manifest-v1-described.json."""
    full = full_manifest()
    description = ModelDescription(
        inputs=("model.embed_tokens",),
        layers=("model.layers",),
        outputs=("model.norm", "lm_head"),
        count=("depth",),
        width="dim",
        tied=True,
        architecture="MyForCausalLM",
        ties=(("model.embed_tokens.weight", "lm_head.weight"),),
        buffers=("router.bias",),
        ignored=("inv_freq",),
        spare=("value_head",),
        mtp="num_mtp",
        kinds=(("attn.weight", "mlp.experts.*.weight"), ("attn.weight",)),
    )
    return replace(full, model=replace(full.model, architecture="MyForCausalLM", description=description))


def virtual_manifest() -> Manifest:
    """Give the full manifest with virtual bundles on all stages but one: tests/data/golden/manifest-v1-virtual.json.

    The head's bytes are the embedding's.
    """
    full = full_manifest()
    embedding = Span(file=0, begin=80, end=208)
    spans = {0: (embedding, Span(file=1, begin=72, end=200)), 3: (embedding, Span(file=1, begin=200, end=328))}
    return replace(
        full,
        stages=tuple(
            replace(stage, shards=() if stage.index in spans else stage.shards, spans=spans.get(stage.index, ()))
            for stage in full.stages
        ),
        training=None,
        virtual=Virtual(
            location="hf://org/name",
            revision="5d3a2f1",
            files=tuple(
                OriginalFile(path=path, nbytes=nbytes, pin=f"{nbytes} bytes, etag 9c1f", digest=digest_of(digit))
                for path, nbytes, digit in (("model-00001.safetensors", 208, "a"), ("more/model.safetensors", 328, "b"))
            ),
        ),
    )


def _stage(
    draw: st.DrawFn, index: int, placement: Placement, modules: tuple[str, ...], bundle: str | tuple[Span, ...]
) -> Stage:
    """Draw a stage whose bundle is at most one shard, at this path, or these spans."""
    spans, shards = (), ()
    if isinstance(bundle, tuple):
        spans, nbytes = bundle, sum(span.end - span.begin for span in bundle)
    else:
        num_shards = draw(st.integers(0, 1))
        shards = tuple(Shard(path=bundle, nbytes=draw(COUNTS), digest=draw(DIGESTS)) for _ in range(num_shards))
        nbytes = draw(st.integers(0, sum(shard.nbytes for shard in shards)))
    return Stage(
        index=index,
        rank=placement.rank_of(index),
        virtual=placement.virtual_of(index),
        modules=modules,
        num_tensors=draw(COUNTS),
        num_params=draw(COUNTS),
        nbytes=nbytes,
        shards=shards,
        spans=spans,
    )


def _virtual(draw: st.DrawFn, num_stages: int) -> tuple[Virtual | None, list[tuple[Span, ...]]]:
    """Draw two files, and cut them into spans that are dealt out to some of the stages."""
    spans: list[tuple[Span, ...]] = [()] * num_stages
    owners = draw(st.lists(st.none() | st.integers(0, num_stages - 1), max_size=4))
    if not any(owner is not None for owner in owners):
        return None, spans
    sizes = [0, 0]
    for owner, number in zip(owners, sorted(draw(st.integers(0, 1)) for _ in owners), strict=True):
        begin, sizes[number] = sizes[number], sizes[number] + draw(st.integers(1, 2**40))
        if owner is not None:
            spans[owner] += (Span(file=number, begin=begin, end=sizes[number]),)
    paths = draw(st.lists(PATHS, min_size=2, max_size=2, unique=True))
    files = tuple(
        OriginalFile(path=path, nbytes=nbytes, pin=draw(TEXTS), digest=draw(DIGESTS))
        for path, nbytes in zip(paths, sizes, strict=True)
    )
    location = draw(st.sampled_from(("/", "hf://", "s3://"))) + draw(TEXTS)
    return Virtual(location=location, revision=draw(st.none() | TEXTS), files=files), spans


def _ties(draw: st.DrawFn, held: list[tuple[str, ...]]) -> tuple[TieGroup, ...]:
    """Tie the weights of the first two modules, if there are two."""
    members = [
        TieMember(fqn=f"{module}.weight", stage=stage) for stage, modules in enumerate(held) for module in modules
    ][:2]
    if len(members) < 2 or draw(st.booleans()):
        return ()
    return (TieGroup(owner=members[0], replicas=(members[1],)),)
