"""Manifests of training checkpoints: drawn by hypothesis, and one of every feature."""

from __future__ import annotations

import math
from base64 import b64encode
from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from manifests.optimizer_state import kinds_of
from manifests.schema import (
    MOMENTS,
    AlgorithmOption,
    BatchSizes,
    DataCursor,
    DataPosition,
    Decay,
    LearningRate,
    Manifest,
    OptimizerState,
    ParameterGroup,
    RandomState,
    Shard,
    SourcePosition,
    StateKind,
    StateShape,
    TrainedDtype,
    TrainingState,
)
from manifests.training_state import LARGEST_RATE
from tests.fast.manifests.drawn_manifests import COUNTS, DIGESTS, TEXTS, digest_of, full_manifest, manifests

NUMBERS = st.floats(0, allow_infinity=False).map(abs)  # a zero may be drawn with its sign
BETAS = st.floats(0, math.nextafter(1, 0)).map(abs)

RATES = st.floats(0, LARGEST_RATE).map(abs)
DTYPES = st.none() | st.sampled_from(get_args(TrainedDtype))
STATES = st.binary(max_size=12).map(b64encode).map(bytes.decode)
POSITIONS = st.builds(SourcePosition, epoch=COUNTS, item=COUNTS, offset=COUNTS)
CURSORS = st.builds(
    DataCursor,
    num_documents=COUNTS,
    num_tokens=COUNTS,
    sources=st.lists(POSITIONS, min_size=1, max_size=2).map(tuple),
)


@st.composite
def optimizers(draw: st.DrawFn) -> OptimizerState:
    names = draw(st.lists(st.lists(TEXTS, min_size=1, max_size=2), max_size=2))
    options: dict[str, Any] = {"beta1": BETAS, "beta2": BETAS, "eps": NUMBERS, "weight_decay": NUMBERS}
    later: dict[str, Any] = {}
    if draw(st.booleans()):  # version 2
        kinds = draw(st.lists(st.sampled_from(("exp_avg", "momentum_buffer", "ema")), unique=True).map(tuple))
        shapes = st.sampled_from(get_args(StateShape))
        declared = (
            StateKind(name=name, shape=draw(shapes), groups=draw(st.sampled_from(((), (0,))))) for name in kinds
        )
        later = {"kinds": tuple(declared), "ema": draw(BETAS)}
        options |= {
            "algorithm": st.none() | st.sampled_from(("Muon", "toy.optim.Signs")),
            "rate_factor": st.none() | NUMBERS,
            "skips_clipping": st.booleans(),
            "options": st.sampled_from(((), (AlgorithmOption(name="momentum", value="0.95"),))),
        }
    groups = [
        draw(st.builds(ParameterGroup, **options, fqns=st.just(tuple(f"{i} {j} {fqn}" for j, fqn in enumerate(fqns)))))
        for i, fqns in enumerate([[], *names])
    ]
    return OptimizerState(
        name=draw(st.sampled_from(("AdamW", "Adam"))), max_norm=draw(NUMBERS), groups=tuple(groups), **later
    )


@st.composite
def rates(draw: st.DrawFn) -> LearningRate:
    warmup_steps, stable_steps = draw(st.integers(0, 2**60)), draw(st.integers(0, 2**60))
    decay: Decay = draw(st.sampled_from(get_args(Decay)))
    least = 0 if decay == "constant" else warmup_steps + stable_steps + 1
    return LearningRate(
        peak=draw(RATES),
        warmup_steps=warmup_steps,
        decay=decay,
        decay_steps=draw(st.integers(least, 2**63 - 1)),
        minimum=draw(RATES),
        stable_steps=stable_steps,
    )


@st.composite
def batches(draw: st.DrawFn) -> BatchSizes:
    microbatch = draw(st.integers(1, 2**31))
    return BatchSizes(
        global_batch=microbatch * draw(st.integers(1, 2**31)),
        microbatch=microbatch,
        seq_len=draw(st.integers(1, 2**63 - 1)),
    )


@st.composite
def trained_manifests(draw: st.DrawFn) -> Manifest:
    """Draw a manifest that breaks no invariant and has training state, with moments or without."""
    bare = draw(manifests().filter(lambda manifest: manifest.virtual is None))
    optimizer, stages = draw(st.none() | optimizers()), list(bare.stages)
    if optimizer is not None:
        held = draw(st.integers(0, len(stages) - 1))
        shards = tuple(
            Shard(path=f"{holds}/ of stage", nbytes=draw(COUNTS), digest=draw(DIGESTS), holds=holds)
            for holds in (kind.name for kind in kinds_of(optimizer))
        )
        stages[held] = replace(stages[held], shards=stages[held].shards + shards)
    training = TrainingState(
        step=draw(COUNTS),
        num_tokens=draw(COUNTS),
        dtype=draw(DTYPES),
        compute_dtype=draw(DTYPES),
        reduce_dtype=draw(DTYPES),
        optimizer=optimizer,
        learning_rate=draw(st.none() | rates()),
        batch=draw(st.none() | batches()),
        data=draw(
            st.none() | st.builds(DataPosition, num_sequences=COUNTS, digest=DIGESTS, cursor=st.none() | CURSORS)
        ),
        random=tuple(
            RandomState(rank=rank, generator=draw(TEXTS), state=draw(STATES)) for rank in range(draw(st.integers(0, 2)))
        ),
    )
    return replace(bare, stages=tuple(stages), training=training)


def training_manifest() -> Manifest:
    """Give the full manifest with moments and state: what tests/data/golden/manifest-v1-training.json says."""
    full = full_manifest()
    stages = tuple(
        replace(
            stage,
            shards=stage.shards
            + tuple(
                replace(shard, path=f"stage-{stage.index:03d}/{holds}/model.safetensors", holds=holds)
                for shard in stage.shards
                for holds in MOMENTS
            ),
        )
        for stage in full.stages
    )
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    training = TrainingState(
        step=300,
        num_tokens=1_228_800,
        dtype="F32",
        compute_dtype="BF16",
        reduce_dtype="BF16",
        optimizer=OptimizerState(
            name="AdamW",
            max_norm=1.0,
            groups=(
                ParameterGroup(**options, weight_decay=0.1),
                ParameterGroup(**options, weight_decay=0.0, fqns=("model.norm.weight",)),
            ),
        ),
        learning_rate=LearningRate(
            peak=3e-4, warmup_steps=20, decay="cosine", decay_steps=1000, minimum=3e-5, stable_steps=500
        ),
        batch=BatchSizes(global_batch=32, microbatch=2, seq_len=128),
        data=DataPosition(
            num_sequences=9600,
            digest=digest_of("7"),
            cursor=DataCursor(
                num_documents=2613,
                num_tokens=17,
                sources=(
                    SourcePosition(epoch=1, item=702, offset=0),
                    SourcePosition(epoch=0, item=1, offset=65_536),
                ),
            ),
        ),
        random=(RandomState(rank=0, generator="cpu", state="AAEC"), RandomState(rank=1, generator="cpu", state="AwQF")),
    )
    return replace(full, stages=stages, training=training)


def grouped_manifest() -> Manifest:
    """Give a manifest of Muon, Adafactor and an EMA of weights: what manifest-v2-optimizer.json says."""
    trained = training_manifest()
    assert trained.training is not None
    blank = {"beta1": 0.0, "beta2": 0.0, "eps": 0.0}
    kinds = (
        StateKind(name="momentum_buffer", shape="parameter", groups=(0,)),
        StateKind(name="row_var", shape="rows", groups=(1,)),
        StateKind(name="ema", shape="parameter"),
    )
    optimizer = OptimizerState(
        name="Adafactor",
        max_norm=1.0,
        groups=(
            ParameterGroup(
                **blank,
                weight_decay=0.1,
                fqns=("model.layers.*_proj.weight",),
                algorithm="Muon",
                rate_factor=0.5,
                skips_clipping=True,
                options=(AlgorithmOption(name="momentum", value="0.95"),),
            ),
            ParameterGroup(**blank, weight_decay=0.0),
        ),
        kinds=kinds,
        ema=0.999,
    )
    stages = tuple(
        replace(
            stage,
            shards=tuple(shard for shard in stage.shards if shard.holds not in MOMENTS)
            + tuple(
                replace(shard, path=f"stage-{stage.index:03d}/{kind.name}/model.safetensors", holds=kind.name)
                for shard in stage.shards
                if shard.holds == MOMENTS[0]
                for kind in kinds
            ),
        )
        for stage in trained.stages
    )
    return replace(trained, stages=stages, training=replace(trained.training, optimizer=optimizer))
