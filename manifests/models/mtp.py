"""Layers for multi-token prediction (MTP), as files have them. No torch.

# Note [Names of MTP layers]
DeepSeek-V3's files and others of that form have MTP layers after the decoder's, numbered on. Qwen3-Next's have one
beside the decoder: `mtp.layers.0` is a decoder layer like the last one, and `_BESIDE` has the names of the rest. Stages
have it under the names of DeepSeek-V3's form.

Source: Megatron-Bridge, `qwen3_next_bridge.py`; vLLM, `qwen3_next_mtp.py`; transformers 5.23, `conversion_mapping.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from manifests.models.catalogue import CatalogueEntry
from manifests.models.shape import ModelShape, Work
from manifests.schema import TieGroup, TieMember

EMBEDDING, HEAD = "embed_tokens", "shared_head.head"
COPIES, PROJECTION = (f"{EMBEDDING}.weight", f"{HEAD}.weight"), "eh_proj.weight"
BESIDE = "mtp"  # a module
_BESIDE = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
_WITH_ONE_BESIDE = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
_OWN = frozenset(f"{name}.weight" for name in _BESIDE)


def is_beside(architecture: str, module: str) -> bool:
    """Return whether a module of an architecture is an MTP layer beside its decoder."""
    return module == BESIDE and architecture in _WITH_ONE_BESIDE


def layer_number(architecture: str, module: str) -> int | None:
    """Return the number of a decoder or MTP layer, 0 of one beside the decoder; None: it is another module."""
    number = module.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0 if is_beside(architecture, module) else None


def count_layers(shape: ModelShape) -> int:
    """Return the number of MTP layers, of any form."""
    return sum(layer_number(shape.architecture, module) is not None for module in shape.optional)


def work_where_kept(shape: ModelShape, *, keeps_logits: bool) -> Mapping[str, Work]:
    """Return the work of each module, where the head has the logits of MTP layers: (1 + K) B rows, if it keeps any."""
    work, head = dict(shape.work), shape.modules[-1]
    for module in _mtp_modules(shape, shape.modules):
        work[module] -= shape.work[head]
        work[head] += shape.work[head] if keeps_logits else Work()
    return work


def count_borrowed(shape: ModelShape, modules: Collection[str], sizes: Mapping[str, Mapping[str, int]]) -> int:
    """Return the parameters of the embedding if a stage borrows it: Note [Borrowed weights] in runner/models/mtp.py."""
    embedding = shape.modules[0]
    users = (module for module in _mtp_modules(shape, modules) if f"{module}.{EMBEDDING}.weight" not in shape.tensors)
    return sum(sizes[embedding].values()) if embedding not in modules and any(users) else 0


def _mtp_modules(shape: ModelShape, modules: Iterable[str]) -> tuple[str, ...]:
    """Return those of these modules that are MTP layers of a form that is known."""
    return tuple(
        module
        for module in modules
        if f"{module}.{PROJECTION}" in shape.tensors or is_beside(shape.architecture, module)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayers:
    """The MTP layers of a model's files, in the order they run."""

    modules: tuple[str, ...]
    copies: frozenset[str] = frozenset()  # what each has a copy of: the embedding, the head
    in_stages: str = ""  # where stages have the one that is beside the decoder in files

    @classmethod
    def find(cls, entry: CatalogueEntry, shape: ModelShape | None) -> MtpLayers | None:
        """Return those of a packed model; None: it has none, or none that are trained.

        Those are of the forms of Note [Names of MTP layers], in models whose stages hand on nothing but the hidden
        state.
        """
        has_beside = is_beside(entry.architecture, BESIDE)
        if shape is None or entry.hands_on_trees or not (entry.mtp or has_beside):
            return None
        by_module = shape.by_module()
        listed = [module for module in shape.modules if module.startswith(f"{entry.layers}.")]
        if has_beside:
            layer, last = cls(modules=(BESIDE,), in_stages=f"{entry.layers}.{shape.num_layers}."), listed[-1]
            names = {f"{layer.in_stages}{leaf}" for leaf in _OWN}
            names |= {f"{layer.in_stages}{fqn.removeprefix(f'{last}.')}" for fqn in by_module[last]}
            return layer if set(map(layer.in_files, names)) == set(by_module.get(BESIDE, ())) else None
        modules = tuple(listed[shape.num_layers :])
        leaves = [{fqn.removeprefix(f"{module}.") for fqn in by_module[module]} for module in modules]
        if not modules or not all(map(_OWN.issubset, leaves)):
            return None
        copies = (name for name in (EMBEDDING, HEAD) if all(f"{name}.weight" in names for names in leaves))
        return cls(modules=modules, copies=frozenset(copies))

    @classmethod
    def trained_modules(cls, entry: CatalogueEntry, shape: ModelShape) -> tuple[str, ...]:
        """Return the modules that are trained: all but those that transformers ignores, unless these are among them."""
        mtp = cls.find(entry, shape)
        left_out = shape.optional.difference(mtp.modules if mtp else ())
        return tuple(module for module in shape.modules if module not in left_out)

    def in_files(self, fqn: str) -> str:
        """Return the name in files of a tensor by its name in DeepSeek-V3's form."""
        leaf = fqn.removeprefix(self.in_stages)
        if leaf == fqn:
            return fqn
        beside = _BESIDE.get(leaf.removesuffix(".weight"))
        return f"{BESIDE}.layers.0.{leaf}" if beside is None else f"{BESIDE}.{beside}.weight"

    def ties(self, entry: CatalogueEntry, stage_modules: Sequence[Sequence[str]]) -> Iterator[TieGroup]:
        """Yield what stages with these modules tie beside what the manifest says: copies, and what is borrowed."""
        stage_of = {module: stage for stage, modules in enumerate(stage_modules) for module in modules}
        for owner, copied in ((entry.inputs[0], EMBEDDING), (entry.outputs[-1], HEAD), (entry.outputs[0], "")):
            member = TieMember(fqn=f"{owner}.weight", stage=stage_of[owner])
            if copied in self.copies:
                replicas = {
                    TieMember(fqn=f"{module}.{copied}.weight", stage=stage_of[module]): None for module in self.modules
                }
            else:
                users = () if copied == HEAD else self.modules if copied else self.modules[:1]
                replicas = {TieMember(fqn=member.fqn, stage=stage_of[module]): None for module in users}
                replicas.pop(member, None)
            if replicas:
                yield TieGroup(owner=member, replicas=tuple(replicas))
