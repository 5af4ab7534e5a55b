"""."""

from __future__ import annotations

from manifests.schema import Manifest
from runner.bundle.packed import Packed, open_packed
from runner.checkpoint.data_position import find_data
from runner.checkpoint.outputs import check_outputs
from runner.checkpoint.resume import Origin, check_fits, find_origins, remembered, resumed_state
from runner.checkpoint.save_paths import check_apart
from runner.config.flags import TrainOptions, recall
from runner.config.parallel_dims import ParallelDims
from runner.pipeline.timetable import choose_timetable
from runner.preflight.combinations import (
    check_combination,
    check_divides,
    check_sinks,
    combine,
    share_of,
    tensor_parallel,
)
from runner.preflight.preflight import (
    check_evaluable,
    check_first_lines,
    check_length,
    check_model,
    check_places,
    check_texts,
)


def check_request(launched: Packed, options: TrainOptions, world_size: int) -> ParallelDims:
    """Check, without torch, that these options fit a model and so many ranks, and return the parallel degrees.

    Raises:
        UserError: what does not fit.
    """
    check_places(options)
    check_model(launched, options.compute.implementation)
    num_tensor = options.degrees.tensor  # what no number of ranks fixes is refused before ranks are counted
    check_combination(tensor_parallel(launched.manifest, options))
    check_divides(launched.config, num_tensor)
    degrees = options.degrees.resolve(launched.manifest.layout.num_ranks, world_size)
    if options.resume.source is None:  # a checkpoint may recall other batch sizes
        _check_step(launched.manifest, options, degrees)
    return degrees


def check_beginning(launched: Packed, options: TrainOptions, degrees: ParallelDims) -> None:
    """Check, without torch, that a run on this machine has its inputs, and can write its outputs.

    Ranks check all of this again. The checkpoints of `--resume auto` are left to them: they skip damaged ones.

    Raises:
        UserError: no such checkpoint, one of another model, no data, or an output that may not be replaced.
    """
    check_sinks(options)
    check_apart(options, launched.root)
    check_outputs(options)
    origins, training = find_origins(Origin(launched.root, launched.read), options), None
    if options.resume.source != "auto":
        (found,) = origins
        origin = launched if found.folder == launched.root else open_packed(found.read or found.folder)
        check_fits(origin, launched)
        training = resumed_state(origin, options.resume, is_launched=origin is launched)
        if training is not None:
            options = recall(options, remembered(training))
        _check_step(launched.manifest, options, degrees)
        check_length(launched, options)
    if options.eval_data is not None:
        check_evaluable(options.eval_data)
    if training is None and options.resume.source != "auto":  # a checkpoint may recall another field
        check_first_lines(options)
    find_data(options, training.data if training else None, launched.tokenizer, launched.root)
    check_texts(launched, options)


def _check_step(manifest: Manifest, options: TrainOptions, degrees: ParallelDims) -> None:
    batch = share_of(options.batch, degrees.data)
    timetable = choose_timetable(options.schedule, manifest, batch.num_microbatches)
    check_combination(combine(manifest, options, timetable, degrees))
