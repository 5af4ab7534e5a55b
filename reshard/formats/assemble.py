"""What readers of other trainers' checkpoints share: the tensors that they find, as a checkpoint of one model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from manifests.errors import SourceError
from manifests.models import ModelShape, is_sized_by_files, model_shape
from manifests.models.config import CONFIG_NAME
from manifests.schema import Holds, ModelDescription, Source
from reshard.formats.auxiliary import names_weights
from reshard.formats.table import OpenOptions
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint, OriginalFiles
from reshard.tensors.comparison import check_coverage, drop_tensors, stored_in, trained_part, under_fqns, without_absent
from reshard.tensors.source_index import record_anew
from stores.base import Folder, InputFile, read_config
from stores.bundles import TensorAt

OPTIMIZER = "optimizer"  # what `drop` calls the optimizer state


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A config.json, and the shape of its model; None if that depends on the names of the tensors."""

    file: InputFile
    fields: Mapping[str, Any]
    shape: ModelShape | None


def read_model_config(file: InputFile, description: ModelDescription | None = None) -> ModelConfig:
    """Read the config.json of a model.

    Raises:
        InputError: it cannot be read, or is not a JSON object.
        ModelError: an unsupported architecture, or a description of another model.
    """
    fields, where = read_config(file), str(file)
    needs_tensors = is_sized_by_files(fields, where, description)
    return ModelConfig(file=file, fields=fields, shape=None if needs_tensors else model_shape(fields, where))


def config_in(folder: Folder) -> InputFile:
    """Return the config.json in a folder.

    Raises:
        SourceError: there is none.
    """
    if CONFIG_NAME not in folder.names():
        raise SourceError(
            f"{folder}/{CONFIG_NAME}",
            "no such file, and the checkpoint itself does not describe the model",
            "copy the config.json (and tokenizer files) of the Hugging Face model into the folder",
            code="source.no-config",
        )
    return folder.file(CONFIG_NAME)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensors:
    """The weights of a model, by FQN and in its order: all but those that were `dropped`, by their names in files."""

    shape: ModelShape
    weights: Mapping[str, TensorAt]
    dropped: tuple[str, ...]
    where: str
    description: ModelDescription | None = None

    @classmethod
    def cover(
        cls, weights: MutableMapping[str, TensorAt], config: ModelConfig, options: OpenOptions, where: str
    ) -> ModelTensors:
        """Check that weights are exactly those of the model.

        Raises:
            SourceError: some are missing, unknown or of the wrong shape.
            InputError: the source has nothing of a name that is dropped.
        """
        dropped = drop_tensors(weights, options.drop - {OPTIMIZER}, config.shape)
        shape = config.shape or model_shape(
            config.fields, str(config.file), stored_in(weights, where), options.description
        )
        weights = under_fqns(weights, shape)
        shape = without_absent(shape, weights)
        check_coverage(weights, shape, where, frozenset(dropped))
        ordered = {fqn: weights[fqn] for fqn in (*shape.tensors, *weights) if fqn in weights}
        return cls(shape=shape, weights=ordered, dropped=dropped, where=where, description=options.description)

    def cover_state(self, kind: Holds | str, state: MutableMapping[str, TensorAt]) -> dict[str, TensorAt]:
        """Check that one kind of optimizer state is of exactly the trained weights; return it in their order.

        Raises:
            SourceError: that of a weight is missing, unknown or of the wrong shape.
        """
        state = under_fqns(state, self.shape)
        ordered = {fqn: state[fqn] for fqn in (*self.weights, *state) if fqn in state and fqn not in self.dropped}
        check_coverage(ordered, trained_part(self.shape), f"{self.where}: {kind}", frozenset(self.dropped))
        return ordered

    def checkpoint(
        self, folder: Folder, files: Collection[str], auxiliary: tuple[AuxiliaryAt, ...], left_out: tuple[str, ...]
    ) -> Checkpoint:
        """Return the checkpoint without optimizer state. `files` have the tensors; slices of them are packed whole.

        Weights in other files, such as a model.safetensors beside them, are left out: readers would prefer them.
        """
        location, revision = folder.location, folder.revision
        left_out += tuple(item.path for item in auxiliary if names_weights(item.path))
        return Checkpoint(
            shape=self.shape,
            tensors=self.weights,
            auxiliary=tuple(item for item in auxiliary if not names_weights(item.path)),
            record=record_anew(self.weights.values(), self.dropped),
            source=Source(kind=folder.kind, location=location, revision=revision, left_out=left_out),
            originals=OriginalFiles(
                location=location, revision=revision, files={name: folder.file(name) for name in files}
            ),
            description=self.description,
            merges_slices=True,
        )
