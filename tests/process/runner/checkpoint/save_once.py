"""A save of a rank that trains alone, in the place of this process: every number in it is its step."""

from __future__ import annotations

import traceback
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from manifests.errors import UserError
from manifests.schema import WEIGHTS, DataPosition, TrainingState
from runner.bundle.packed import open_packed
from runner.checkpoint.async_save import Saver
from runner.checkpoint.history import claim_history, claim_output
from runner.checkpoint.resume import remember
from runner.checkpoint.save import SaveContext, save
from runner.config.flags import parse_training
from stores.folders.publish import exchange
from tests.process.runner.checkpoint.save_worker import held_by

_TIMEOUT = timedelta(seconds=60)


def save_once(kind: str, packed: str, out: str, step: str) -> int:
    """Save into a history of which two are kept, or as `--save` does; return the command's exit code."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    try:
        if kind == "history":
            _save_in_history(Path(packed), Path(out), int(step))
        else:
            _save_weights(Path(packed), Path(out), int(step), force=kind == "forced save")
    except UserError as error:
        traceback.print_exc()
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _save_in_history(folder: Path, history: Path, step: int) -> None:
    packed = open_packed(folder)
    options = parse_training(["--data", "synthetic", "--checkpoint", str(history), "--keep", "2"])
    assert options.checkpoint is not None
    context = SaveContext(manifest=packed.manifest, root=packed.root, parents=(packed.read.parent,))
    held = held_by(0, packed)
    for piece in (piece for kinds in held.values() for pieces in kinds.values() for piece in pieces):
        piece.memory.fill_(step)
    data = DataPosition(num_sequences=step, digest="blake3:" + 64 * "0")
    with claim_history(history), Saver(context, options.checkpoint, held, _TIMEOUT) as saver:
        saver.save(held, remember(options, packed.shape, step=step, num_tokens=step, data=data))
        (report,) = saver.reports(wait=True)
    if report.failure is not None:
        raise report.failure


def _save_weights(folder: Path, out: Path, step: int, *, force: bool) -> None:
    packed = open_packed(folder)
    context = SaveContext(manifest=packed.manifest, root=packed.root, parents=(packed.read.parent,))
    held = {index: {WEIGHTS: kinds[WEIGHTS]} for index, kinds in held_by(0, packed).items()}
    for pieces in (pieces for kinds in held.values() for pieces in kinds.values()):
        for piece in pieces:
            piece.memory.fill_(step)
    with claim_output(out):
        training = TrainingState(step=step, num_tokens=step, dtype="F32")
        save(held, context, out, training, swap=exchange if force else None)
