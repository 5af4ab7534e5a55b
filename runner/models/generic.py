"""Decoders of the catalogue, on transformers' own model classes: cut into stages with nothing known but their names."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation, revert_weight_conversion
from transformers.initialization import no_init_weights

from manifests.errors import InputError, ModelError
from manifests.models import ARCHITECTURES, ModelShape
from manifests.models.catalogue import CatalogueEntry
from manifests.models.config import ConfigReader
from manifests.models.mtp import MtpLayers
from manifests.models.trainable import NARROW, check_fields, check_modules, check_positions, modules_together
from manifests.schema import TieGroup
from runner.config.lora import LoraOptions
from runner.config.loss import MTP_WEIGHT
from runner.models.adapters import Adapters
from runner.models.computed_buffers import computed_buffers, with_buffers_alone
from runner.models.document_mask import mask_rows
from runner.models.family import BORROWED, Plan, RowInput
from runner.models.implementations import check_length, class_and_fields, without_implementations
from runner.models.mtp import MtpStage, add_mtp_layers, reference_of
from runner.models.regions import Region, keeping_views, pieces_in, regions_of
from runner.models.routers import recorded_routers
from runner.models.shrink import shrink
from runner.models.stage_of_any import StageOfAny, is_stand_in, longest_alike
from runner.models.tensor_plan import complete_plan, distribute_model, plans_of, shard_model, summed_by_plan
from runner.models.whole_model import WholeModel, evaluate_as_in_training
from runner.tensors.dtensor import local_of
from runner.tensors.local_shard import Piece, default_dtype
from runner.tensors.row_parts import RowParts

_RAISED = (StrictDataclassError, ArithmeticError, AssertionError, AttributeError, KeyError, TypeError, ValueError)
_PREFIX = "model."  # of names in `StageOfAny`
# What a pipeline has no use for. A tied head is a parameter of its own here; see `runner.training.ties`.
_CONFIG: Mapping[str, object] = {
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
    "return_dict": True,
    "tie_word_embeddings": False,
    "use_cache": False,
}
# Sizes of experts must be multiples of this for torch's grouped product in 16 bits.
_ALIGNMENT = 8


class Generic:
    """A decoder of the catalogue; see `runner.models.Family`."""

    row_inputs: tuple[RowInput, ...] = ()

    def __init__(
        self,
        entry: CatalogueEntry,
        config: Mapping[str, object],
        *,
        max_seq_len: int,
        where: str = "config.json",
        model_class: type[PreTrainedModel] | None = None,
        mtp: MtpLayers | None = None,
    ) -> None:
        self.architecture, self._where = entry.architecture, where
        self._float32_names: dict[torch.dtype, frozenset[str]] = {}
        self._max_seq_len = max_seq_len
        fields: Mapping[str, object] = without_implementations(config)
        reader = ConfigReader(fields, where)
        check_fields(entry, reader)
        check_positions(entry.architecture, reader, max_seq_len)
        described = ARCHITECTURES.get(entry.architecture)
        shape = described(reader) if described else None
        self._entry = entry = entry if shape is None else _with_modules(entry, shape)
        self._keeps_documents = False
        self.parts: RowParts | None = None  # with context parallelism
        self.mtp, self.mtp_weight = mtp, MTP_WEIGHT
        self.adapters: Adapters | None = None
        self.hands_on_trees = entry.hands_on_trees or NARROW in entry.inputs or mtp is not None
        with _refusals(self._where):
            self._class, self._given = (model_class, fields) if model_class else class_and_fields(entry, fields)
            config_class: Any = self._class.config_class
            read = config_class.from_dict(copy.deepcopy(dict(self._given)))
            self._is_tied = bool(entry.ties and read.tie_word_embeddings)
            self._config = config_class.from_dict({**copy.deepcopy(dict(self._given)), **_CONFIG})
            evaluate_as_in_training(self._config)
            # As in Mamba: what layers of a bfloat16 model hand on is float32.
            self.adds_in_float32 = bool(getattr(self._config.get_text_config(), "residual_in_fp32", False))
        if shape is not None:
            self._fit(shape, config)
        whole = self._build("meta")
        self._layers_name, num_layers = self._list_of_layers(whole)
        layers = [f"{entry.layers}.{index}" for index in range(num_layers)]
        self.modules: tuple[str, ...] = (*entry.inputs, *layers, *(mtp.modules if mtp else ()), *entry.outputs)
        if mtp:
            whole = self._whole("meta")
            if self._is_tied:
                problem, hint = "is not supported with MTP layers", "pack without them: --drop their modules"
                raise ModelError(f"{where}: tie_word_embeddings", problem, hint, code="config.mtp-layers")
        self.hidden_size: int = self._config.get_text_config().hidden_size
        self._regions = self._find_regions(whole)
        if shape is None:
            check_length(self._config, max_seq_len)
        else:
            self._check_parameters(shape)
        self._outside = self._paths_outside(whole)
        head = next(region for name in self._regions for region in self._regions[name]
                    if region.fqn == f"{entry.outputs[-1]}.weight")  # fmt: skip
        self.vocab_size = head.shape[0]

    def build(self, modules: tuple[str, ...]) -> nn.Module:
        """Build these modules, and no others, on the meta device, layers numbered as in the whole model."""
        check_modules(self._entry, self.modules, (modules,), self._where)
        model = self._with_adapters()
        complete_plan(model, self._layers_name)
        if self._keeps_documents or self.parts:
            mask_rows(model, self.parts)
        build = partial(MtpStage, mtp=self.mtp) if self.mtp else StageOfAny
        stage = build(model, self._entry, self._layers_name, frozenset(modules), self._outside)
        stage.parts = self.parts
        return stage

    def keep_documents(self) -> None:
        self._keeps_documents = True

    def add_adapters(self, lora: LoraOptions, *, checks_names: bool = False) -> None:
        """Build modules with adapters from now on; see Note [Adapters] in adapters.py."""
        head = self._outside[self._entry.outputs[-1]]
        self.adapters = Adapters.find(self._whole("meta"), lora, head, self._regions, self._in_files)
        if checks_names:
            self.adapters.check_names(self.architecture)
        self._regions |= {name: (region,) for name, region in self.adapters.tensors.items()}

    def _with_adapters(self) -> PreTrainedModel:
        model = self._whole("meta")
        if self.adapters:
            self.adapters.add_to(model)
        return model

    def split_rows(self, parts: RowParts) -> None:
        self.parts = parts

    def mtp_ties(self, stage_modules: Sequence[Sequence[str]]) -> tuple[TieGroup, ...]:
        return tuple(self.mtp.ties(self._entry, stage_modules)) if self.mtp else ()

    def init_buffers(self, module: nn.Module, device: torch.device) -> None:
        """Compute buffers that are in no file, in the dtypes that they have."""
        assert isinstance(module, StageOfAny)
        for name, part in module.model.named_modules():
            for leaf in part._non_persistent_buffers_set:
                if (buffer := part._buffers.get(leaf)) is not None:
                    part._buffers[leaf] = self._buffers[f"{name}.{leaf}".lstrip(".")].to(device, buffer.dtype)
            for leaf, value in vars(part).items():  # kept beside the buffer that it is the first value of
                if isinstance(value, torch.Tensor) and f"{name}.{leaf}" in self._buffers:
                    setattr(part, leaf, self._buffers[f"{name}.{leaf}"].to(device))

    def float32_names(self, dtype: torch.dtype) -> Collection[str]:
        """Return the names of what is float32 in a model that `from_pretrained` makes of this dtype.

        Of parameters and buffers in files, transformers lists some; others are declared as float32. Of computed
        buffers, some are made in float32, others (XGLM's positions, GPT's masks) in torch's default dtype.
        """
        if dtype not in self._float32_names:
            self._float32_names[dtype] = self._find_float32_names(dtype)
        return self._float32_names[dtype]

    def to_hf(self, name: str) -> str:
        prefix = BORROWED if name.startswith(BORROWED) else _PREFIX
        return self._regions[name.removeprefix(prefix)][0].fqn

    def pieces(self, name: str, memory: torch.Tensor, offset: tuple[int, ...]) -> tuple[Piece, ...]:
        if name.startswith(BORROWED):
            return ()
        pieces = (pieces_in(region, memory, offset) for region in self._regions[name.removeprefix(_PREFIX)])
        return tuple(piece for piece in pieces if piece is not None)

    @property
    def together(self) -> tuple[tuple[str, ...], ...]:
        """The modules that must be on one stage; `runner measure` runs them at a time."""
        return modules_together(self._entry)

    def tiny(self) -> Generic:
        """Return the family of a model of the same config, with all layers and small widths."""
        read = type(self._config).from_dict(copy.deepcopy(dict(self._given))).to_dict()
        small: Mapping[str, object] = shrink(read, self._max_seq_len)
        if self._entry.section:
            small = {self._entry.section: small}
        given = None if self._entry.section else self._class
        family = Generic(self._entry, small, max_seq_len=1, where=self._where, model_class=given, mtp=self.mtp)
        family.mtp_weight = self.mtp_weight
        family._config._experts_implementation = "eager"  # in any dtype and of any size, unlike grouped products
        if self.adapters:
            family.add_adapters(replace(self.adapters.lora, rank=min(self.adapters.lora.rank, 4)))
        return family

    def num_parameters(self) -> int:
        return sum(math.prod(region.shape) for regions in self._regions.values() for region in regions)

    def whole(self) -> WholeModel:
        """Return transformers' model with random weights on the CPU, ties and dropout as the config says."""
        with _refusals(self._where):
            config = type(self._config).from_dict(copy.deepcopy({**self._given, "use_cache": False}))
            evaluate_as_in_training(config)
            config._experts_implementation = self._config._experts_implementation
            model = self._class(config)
        if self.mtp:
            mtp = reference_of(self.mtp, model, self._layers_name, self._entry.outputs[0])
            return WholeModel(model, self._in_files, mtp, self.mtp_weight)
        if self.adapters:
            self.adapters.add_to(model)
        return WholeModel(model, self._in_files)

    def plans(self) -> Collection[Plan]:
        model = self._whole("meta")
        complete_plan(model, self._layers_name)
        return plans_of(model.tp_plan, model.ep_plan)

    def shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(module, StageOfAny)
        inputs = (module.model.get_submodule(self._outside[name]) for name in self._entry.inputs)
        whole = {*inputs, *(part for part in module.modules() if is_stand_in(part))}
        shard_model(module.model, mesh, module.embedding[0], whole, self._regions)
        parts = ((name, local_of(parameter)) for name, parameter in module.model.named_parameters())
        if any(_is_odd(name, part.shape[1:]) for name, part in parts if part.dim() == 3):  # of all experts in one
            module.model.config._experts_implementation = "eager"

    def distribute_experts(self, module: nn.Module, mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> None:
        assert isinstance(module, StageOfAny)
        distribute_model(module.model, mesh, tensor_mesh)

    def routers(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return recorded_routers(self._class, module)

    def summed_over_heads(self, module: nn.Module) -> Iterator[nn.Parameter]:
        assert isinstance(module, StageOfAny)
        return summed_by_plan(module.model, module.model.tp_plan)

    def padded_length(self, length: int, most: int) -> int:
        return longest_alike(self._config, length, most)

    def _fit(self, shape: ModelShape, config: Mapping[str, object]) -> None:
        """Compute experts of any width, and refuse two values of one field under two names: either may count."""
        for alias, name in self._config.attribute_map.items():
            if alias in config and name in config and config[alias] != config[name]:
                problem = f"{config[alias]!r} contradicts {name}, which is the same field and is {config[name]!r}"
                raise ModelError(
                    f"{self._where}: {alias}", problem, "leave the wrong one out", code="config.contradictory-fields"
                )
        if any(_is_odd(name, sizes) for name, sizes in shape.tensors.items()):
            self._config._experts_implementation = "eager"

    def _check_parameters(self, shape: ModelShape) -> None:
        """Refuse a transformers whose model has other tensors than the architecture's files."""
        by_module = shape.by_module()
        expected = {fqn: shape.tensors[fqn] for module in self.modules for fqn in by_module[module]}
        built = {region.fqn: region.shape for regions in self._regions.values() for region in regions}
        different = sorted(fqn for fqn in expected.keys() | built.keys() if expected.get(fqn) != built.get(fqn))
        if different:
            raise InputError(
                f"transformers {transformers.__version__}",
                f"its {self.architecture} differs in {len(different)} parameters, {different[0]} among them",
                "install the version that reshard[runner] asks for",
                code="system.wrong-version",
            )

    def _build(self, device: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
        config = copy.deepcopy(self._config)
        config.dtype = dtype or config.dtype
        with _refusals(self._where), torch.device(device), no_init_weights():
            return self._class(config)

    def _whole(self, device: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
        model = self._build(device, dtype)
        if self.mtp:
            with torch.device(device), no_init_weights():
                add_mtp_layers(self.mtp, model, self._layers_name, self._entry.outputs[0])
        return model

    @cached_property
    def _buffers(self) -> Mapping[str, torch.Tensor]:
        return dict(computed_buffers(with_buffers_alone(lambda: self._whole("cpu"))))

    def _find_float32_names(self, dtype: torch.dtype) -> frozenset[str]:
        if dtype.itemsize >= torch.float32.itemsize:
            return frozenset()
        with default_dtype(dtype):
            model = self._whole("meta", dtype)
        plan = model._get_dtype_plan(dtype)
        listed = build_glob_alternation(list(plan))[0].search if plan else lambda name: None
        stored = model.state_dict()
        names = {name for name, tensor in stored.items() if tensor.dtype == torch.float32 or listed(name)}
        names |= {name for name, buffer in computed_buffers(model) if buffer.dtype == torch.float32}
        if self._is_tied:  # to a parameter that has its own dtype
            name_of = {regions[0].fqn: name for name, regions in self._regions.items()}
            for owner, replica in self._entry.ties:
                names.discard(name_of[replica])
                names |= {name_of[replica]} if name_of[owner] in names else set()
        return frozenset(_PREFIX + name for name in names)

    def _list_of_layers(self, model: PreTrainedModel) -> tuple[str, int]:
        """Return the name in memory of the list of layers, and how many they are."""
        count = next(int(size) for name in self._entry.count
                     if isinstance(size := getattr(self._config.get_text_config(), name, None), int))  # fmt: skip
        lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count]
        return min(lists, key=lambda name: (name != self._entry.layers, name.count("."))), count

    def _find_regions(self, model: PreTrainedModel) -> dict[str, tuple[Region, ...]]:
        by_name: dict[str, tuple[Region, ...]] = {}
        alike: dict[tuple[str, torch.Size], tuple[str, tuple[Region, ...]]] = {}  # of the first layer that has them
        with keeping_views():
            for name, tensor in model.state_dict().items():
                number, leaf = self._place(name)
                in_files = f"{self._entry.layers}.{number}."
                if number is not None and (leaf, tensor.shape) in alike:
                    before, regions = alike[leaf, tensor.shape]
                    by_name[name] = tuple(
                        replace(region, fqn=in_files + region.fqn.removeprefix(before)) for region in regions
                    )
                    continue
                by_name[name] = self._regions_of(model, name, tensor)
                if number is not None and all(region.fqn.startswith(in_files) for region in by_name[name]):
                    alike[leaf, tensor.shape] = in_files, by_name[name]
        return by_name

    def _place(self, name: str) -> tuple[str | None, str]:
        """Return the number of the layer that files have a parameter in, if it is in one, and its name in the layer."""
        inside = name.removeprefix(f"{self._layers_name}.")
        number, _, leaf = inside.partition(".")
        is_beside = self.mtp is not None and self.mtp.in_files(name) != name
        return (None, name) if inside == name or is_beside else (number, leaf)

    def _regions_of(self, model: PreTrainedModel, name: str, tensor: torch.Tensor) -> tuple[Region, ...]:
        files = revert_weight_conversion(model, {name: tensor})
        regions = regions_of(tensor, {self._in_files(fqn): part for fqn, part in files.items()})
        if regions is None:
            problem = f"{name} of {self.architecture} is computed from tensors of files, not made up of them"
            hint = "it can be packed and exported, and not trained"
            raise ModelError(f"{self._where}: architectures", problem, hint, code="model.no-family")
        return regions

    def _in_files(self, fqn: str) -> str:
        """Return the name that files have for a tensor that the decoder's own files name `fqn`."""
        if not self._entry.section:
            return self.mtp.in_files(fqn) if self.mtp else fqn
        around, head = self._entry.layers.removesuffix("layers"), self._entry.outputs[-1]
        return (
            f"{around}{fqn.removeprefix('model.')}" if fqn.startswith("model.") else f"{head}.{fqn.partition('.')[2]}"
        )

    def _paths_outside(self, model: PreTrainedModel) -> dict[str, str]:
        """Return each module outside the layers and its name in memory."""
        in_memory = {name for name, _ in model.named_modules()}
        paths = {name: name for name in (*self._entry.inputs, *self._entry.outputs) if name in in_memory}
        for name, regions in self._regions.items():
            if name.startswith(f"{self._layers_name}."):
                continue
            module = next(candidate for candidate in self.modules if regions[0].fqn.startswith(f"{candidate}."))
            leaf = regions[0].fqn.removeprefix(module)
            beside_layers = ".".join(name.split(".")[: self._layers_name.count(".") + 1])
            paths[module] = name.removesuffix(leaf) if name.endswith(leaf) else beside_layers
        return paths


@contextmanager
def _refusals(where: str) -> Iterator[None]:
    """Run a block in which transformers reads a config; `where` is the config's name."""
    try:
        yield
    except _RAISED as error:
        message = " ".join(str(error).split())
        problem = f"transformers {transformers.__version__} refuses it: {message}"
        raise ModelError(where, problem, code="config.refused-by-transformers") from error


def _is_odd(fqn: str, sizes: Sequence[int]) -> bool:
    """Return whether torch's grouped product in 16 bits does not take experts of these sizes."""
    return ".experts." in fqn and any(size % _ALIGNMENT for size in sizes)


def _with_modules(entry: CatalogueEntry, shape: ModelShape) -> CatalogueEntry:
    """Return an entry with the modules before and after the layers that a config's model has."""
    modules = [module for module in shape.modules if module not in shape.optional]
    layers = [position for position, module in enumerate(modules) if module.startswith(f"{entry.layers}.")]
    return replace(entry, inputs=tuple(modules[: layers[0]]), outputs=tuple(modules[layers[-1] + 1 :]))
