"""Check a training request as a whole, note flags that have no effect, and check the release of torch. No torch."""

from __future__ import annotations

import re
from dataclasses import replace
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from manifests.errors import DataError, InputError, LaunchError, OutputError, UsageError
from manifests.models import ConfigReader
from manifests.models.combinations import (
    check_combination,
    check_constant,
    check_divides,
    check_heads,
    constant_length,
)
from manifests.models.mtp import MtpLayers
from manifests.models.trainable import check_fields, check_modules, check_positions, generic_entry
from manifests.schema import Manifest, TrainingState
from runner.bundle.packed import Packed, check_tokenizer, open_packed
from runner.checkpoint.adapter_record import check_adapters, check_launched
from runner.checkpoint.data_position import find_data
from runner.checkpoint.outputs import check_apart, check_outputs, check_space
from runner.checkpoint.resume import Origin, check_fits, check_state_of_all, find_origins, remembered, resumed_state
from runner.config.entry_points import find_entry_point
from runner.config.flags import Device, TrainOptions, flag_of, recall
from runner.config.loss import LOSSES, LossOptions
from runner.config.optimizers import check_eps, optimizer_of
from runner.config.parallel_dims import ParallelDims, check_float32
from runner.config.schema import DATASETS, SYNTHETIC, BatchOptions, DataOptions
from runner.config.trained import check_trained
from runner.data.files import LINES, SUFFIXES, TEXT, file_nbytes, find_files, has_text
from runner.data.rows import RowForm, fields_of
from runner.preflight.combinations import (
    check_balance,
    check_sinks,
    combine,
    sharing_ranks,
    timetable_of,
)

LEAST = (2, 13)
TESTED = ("2.13.0", "2.14.1", "2.15.0")  # see docs/compatibility.md
_INSTALL = "pip install 'reshard[runner]'"
_NUM_FILES = 64  # of a source whose beginnings are read


def check_torch(release_name: str | None = None) -> str:
    """Check the release of torch, the installed one if None, and return a note if it is newer than those tested."""
    try:
        release_name = release_name or version("torch")
    except PackageNotFoundError as error:
        raise InputError("runner", "torch is not installed here", _INSTALL, code="system.missing-package") from error
    release = _release(release_name)
    if release < LEAST:
        raise InputError(
            f"torch {release_name}",
            f"expected {LEAST[0]}.{LEAST[1]} or newer, with the pipeline runtime that the runner uses",
            "pip install 'torch>=2.13,<2.16'",
            code="system.wrong-version",
        )
    if release > max(map(_release, TESTED)):
        return f"torch {release_name} is newer than the releases that were tested: {', '.join(TESTED)}"
    return ""


def has_gpu() -> bool:
    """Whether torch and this machine may have a GPU: NVIDIA's, AMD's (kfd), or that of WSL (dxg)."""
    return not is_cpu_build() and any(True for name in ("nvidia*", "kfd", "dxg") for _ in Path("/dev").glob(name))


def check_device(device: Device) -> None:
    """Check that ranks here can train on GPUs, if they are to."""
    if device == "cuda" and not has_gpu():
        problem = "torch here is a build for CPUs" if is_cpu_build() else "this machine has no GPU"
        raise UsageError("--device cuda", problem, "train on the CPU with --device cpu", code="launch.too-few-gpus")


def is_cpu_build() -> bool:
    """Whether there is no torch, or one without GPU support."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def check_request(launched: Packed, options: TrainOptions, world_size: int) -> ParallelDims:
    """Check, without torch, that these options fit a model and so many ranks, and return the parallel degrees."""
    check_places(options)
    check_model(launched)
    # What no number of ranks fixes is refused before ranks are counted.
    check_combination(sharing_ranks(launched.manifest, options))
    check_divides(launched.shape, launched.config, options.degrees.tensor, options.degrees.expert)
    check_heads(launched.config, options.degrees.context, options.degrees.context_method, options.degrees.tensor)
    check_launched(launched)
    check_trained(options, launched.shape)
    if options.optim.optimizer is not None:
        optimizer_of(options.optim, launched.shape)
    check_balance(launched, options, is_dtype_final=options.resume.source is None)
    degrees = options.degrees.resolve(launched.manifest.layout.num_ranks, world_size)
    if options.resume.source is None:  # a checkpoint may recall other batch sizes
        _check_step(launched, options, degrees)
    return degrees


def check_beginning(launched: Packed, options: TrainOptions, degrees: ParallelDims, *, dry_run: bool) -> None:
    """Check, without torch, that a run on this machine has its inputs, and can write its outputs.

    A dry run may be for another machine, whose disk has room.

    Ranks check all of this again. The checkpoints of `--resume auto` are left to them: they skip damaged ones.
    """
    check_sinks(options)
    check_apart(options, launched.root)
    check_outputs(options)
    if options.resume.source is None and options.lora is None and not dry_run:
        nbytes = 2 * launched.shape.num_params  # at least, in bfloat16 and without optimizer state: ranks know the rest
        check_space(options, checkpoint_nbytes=nbytes, weights_nbytes=nbytes)
    origins, training = find_origins(Origin(launched.root, launched.read), options), None
    if options.resume.source != "auto":
        (start,) = origins
        origin = launched if start.folder == launched.root else open_packed(start.read or start.folder)
        check_fits(origin, launched)
        training = resumed_state(origin, options.resume, is_launched=origin is launched)
        check_adapters(origin, options, training)
        check_state_of_all(origin, options, training)
        if training is not None:
            check_eps(training.optimizer, options.optim, options.given, origin.where)
        options = recall(options, remembered(training) if training is not None else {})
        _check_step(launched, options, degrees)
        check_balance(launched, options)
        check_length(launched, options)
    elif [origin.folder for origin in origins] == [launched.root] and launched.manifest.training is None:
        recall(options, {})  # which checks the defaults: nothing will be recalled
    for group, flag, name in (
        (LOSSES, "--loss", options.loss.entry_point),
        (DATASETS, "--data-class", options.data.dataset),
    ):
        if name is not None:
            find_entry_point(group, name, flag)
    check_documents("--data", options.data, options.loss)
    if options.eval_data is not None:
        check_evaluable(options.eval_data, options.loss)
    find_data(options, training.data if training else None, launched.tokenizer, launched.root)
    check_texts(launched, options)


def check_resume(launched: Packed, options: TrainOptions) -> None:
    """Check what the launched manifest and the flags alone say of `--resume`: folders of nodes may not be here."""
    if options.resume.source is None:
        resumed_state(launched, options.resume, is_launched=True)
    elif options.resume.source == "auto" and options.history is None:
        find_origins(Origin(launched.root, launched.read), options)


def check_world(manifest: Manifest, world_size: int) -> None:
    """Check that there are as many ranks for each pipeline rank of the manifest."""
    num_ranks = manifest.layout.num_ranks
    if world_size % num_ranks:
        raise LaunchError(
            "",
            f"manifest needs {num_ranks} ranks or a multiple, WORLD_SIZE is {world_size}",
            f"use --nproc-per-node {num_ranks}, or reshard pack MANIFEST --layout pp={world_size} --out DIR",
            code="launch.world-size",
        )


def check_places(options: TrainOptions) -> None:
    """Check that a run does not write in a folder that it reads, whose subfolders are searched for texts."""
    read = (*options.data.files, *(options.eval_data.files if options.eval_data else ()))
    places = (name for source in read for name in (source, *glob(source, recursive=True)))
    folders = [folder for folder in map(Path, places) if folder.is_dir()]
    for flag, path in options.folders.items():
        for folder in folders:
            if path.resolve().is_relative_to(folder.resolve()):
                raise UsageError(
                    f"{flag} {path}",
                    f"is inside {folder}, which is read as data with all its subfolders",
                    "choose another place" + _or_by_name(folder),
                    code="output.inside-data",
                )
    if options.history is not None and options.history.is_file():
        raise OutputError(
            f"--checkpoint {options.history}",
            "is a file",
            "choose a folder: each checkpoint is a subfolder of it",
            code="output.not-a-folder",
        )


def check_model(launched: Packed) -> None:
    """Check that the family supports every field of the config, as every rank does when it builds its stages."""
    config, where, shape = launched.config, "config.json", launched.shape
    if (entry := generic_entry(shape.architecture)) is not None and launched.manifest.model.description is None:
        check_fields(entry, ConfigReader(config, where))
        check_modules(entry, MtpLayers.trained_modules(entry, shape), launched.stage_modules, where)


def check_length(launched: Packed, options: TrainOptions) -> None:
    """Check that a model has positions for the sequence length of these options."""
    config = ConfigReader(launched.config, "config.json")
    check_positions(launched.shape.architecture, config, options.batch.seq_len)


def check_texts(launched: Packed, options: TrainOptions) -> None:
    """Check that there is a tokenizer, if a run reads texts."""
    if not options.data.has_rows and (options.data.sources != (SYNTHETIC,) or options.eval_data is not None):
        check_tokenizer(launched.root, "train on --data synthetic")


def check_evaluable(data: DataOptions, loss: LossOptions) -> None:
    """Check that evaluation data has an end, and begins with text."""
    if SYNTHETIC in data.sources:
        raise UsageError(
            "--eval-data",
            f"expected files, found {SYNTHETIC}, which is endless",
            "choose files to evaluate on",
            code="options.needs-documents",
        )
    check_documents("--eval-data", data, replace(loss, token_weights=None))  # which only training reads


def check_documents(flag: str, data: DataOptions, loss: LossOptions | None = None) -> None:
    """Check that each source has files, and the beginnings of the first ones; `flag` names the data.

    Those of a source of weight 0, or if bad documents are skipped, are not read. Rows have the fields that the loss
    reads, cross-entropy if None.
    """
    loss = loss or LossOptions()
    weights = () if loss.token_weights is None else (loss.token_weights,)
    fields = fields_of(data, RowForm(per_token=weights, has_all_fields=loss.entry_point is None))
    groups = data.groups if data.files else ()
    for names, weight in zip(groups, data.weights or (1.0,), strict=False):
        files = find_files(names)
        if data.skip_bad_documents or not weight:
            continue
        texts = [has_text(file, fields) for file in files[:_NUM_FILES]]
        if not any(texts) and len(texts) == len(files):
            problem, hint = "contains no text", "its files are empty: choose others"
            raise DataError(f"{flag} {', '.join(names)}", problem, hint, code="data.empty")


def notes(given_options: TrainOptions, options: TrainOptions, training: TrainingState | None) -> list[str]:
    """Return notes on what a run does, or does not do, that a user may not expect.

    `options` are the `given_options` with the values that the checkpoint stores; `training` is the state that the run
    resumes, if it does not start at step 0.
    """
    lines, first, last = [], (training.step if training else 0) + 1, options.steps
    if given_options.resume.source == "auto" and training is None and (history := options.history) is not None:
        lines.append(f"--resume auto: {history} has no checkpoint; starting at step 0 with the launched weights")
    if first <= last and options.checkpoint is None and options.save is None:
        lines.append("without --checkpoint DIR or --save DIR the trained weights are lost when the run ends")
    for name, steps in (("trace", options.traced), ("profile", options.profiled)):
        if steps and first <= last and not (steps.start <= last and steps.stop > first):
            lines.append(f"--{name} {given_options.values[name]} has no effect: the run takes steps {first} to {last}")
    if training is not None and training.data is None:
        lines.append("the checkpoint has no position in the data: --data is read from its first sequence")
    if training is not None and training.learning_rate is None and "lr" not in given_options.given:
        lines.append(f"the checkpoint has no learning rate: this run uses --lr {options.optim.lr}")
    if training is not None and training.dtype is None and "dtype" not in given_options.given:
        lines.append(f"the checkpoint has no dtype of training: this run uses --dtype {options.compute.dtype}")
    if options.resume.restart_data and training is None:
        lines.append("--restart-data has no effect: the run starts at step 0, and its data at the first sequence")
    may_pad = options.data.has_rows or (options.data.files and not options.data.pack)
    if options.balance.aux_loss and may_pad:
        lines.append("--router-aux-loss counts padding, which transformers leaves out where it gets an attention_mask")
    for name in ("min_lr", "decay_steps") if options.optim.decay == "constant" else ():
        if name in given_options.given and (value := given_options.values[name]):
            lines.append(f"{flag_of(name)} {value} is not used: with --decay constant the learning rate stays at --lr")
    taken = {} if training is None else remembered(training)
    if training is not None and options.compute.has_masters:
        taken.setdefault("master_dtype", options.compute.master_dtype)
    shown = [f"{flag_of(name)} {value}" for name, value in taken.items() if _is_taken(name, value, given_options)]
    if shown:
        lines.append(f"recalled from the checkpoint: {', '.join(shown)}")
    return lines


def is_less_than_a_step(data: DataOptions, batch: BatchOptions) -> bool:
    """Whether text files have fewer bytes than a step has tokens; Parquet is compressed, which may be more text.

    Without --packing this is not known: documents are padded.
    """
    if not data.pack or data.has_rows or not data.files:
        return False
    nbytes = 0
    for file in find_files(data.files):
        nbytes += file_nbytes(file)
        if file.suffix not in (TEXT, LINES) or nbytes >= batch.global_batch * batch.seq_len:
            return False
    return True


def _or_by_name(folder: Path) -> str:
    """Return the rest of a hint, where texts are in the folder itself: globs of them exclude its subfolders."""
    suffixes = sorted({file.suffix for file in folder.glob("*") if file.suffix in SUFFIXES and file.is_file()})
    shown = " ".join(f"'{folder}/*{suffix}'" for suffix in suffixes)
    return f", or name the files: {shown}" if shown else ""


def _is_taken(name: str, value: Any, given_options: TrainOptions) -> bool:
    """Whether a run without the checkpoint would use another value."""
    return name not in given_options.given and given_options.values[name] != value


def _check_step(launched: Packed, options: TrainOptions, degrees: ParallelDims) -> None:
    manifest, shape = launched.manifest, launched.shape
    check_combination(combine(manifest, options, timetable_of(manifest, options, degrees), degrees))
    splits = {"--cp": degrees.context > 1, "--document-mask": options.data.document_mask}
    for flag in (flag for flag, is_used in splits.items() if is_used):
        check_constant(flag, shape.architecture, options.batch.seq_len, constant_length(launched.config))
    if options.compute.dtype != "fp32" and shape.float32_suffixes:
        names = [name for name in shape.tensors if name.endswith(shape.float32_suffixes)]
        check_float32(shape.architecture, names, options.compute, degrees)


def _release(text: str) -> tuple[int, int]:
    """Return major and minor of a version such as 2.15.0a0+git1234."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
