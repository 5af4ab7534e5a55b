"""Layers for multi-token prediction (MTP), as DeepSeek-V3's files and others of that form have them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manifests.models import ModelShape
from manifests.models.catalogue import CatalogueEntry
from manifests.schema import TieGroup, TieMember

EMBEDDING, HEAD = "embed_tokens", "shared_head.head"
_OWN = frozenset(f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayers:
    """The MTP layers of a model's files, in the order they run."""

    modules: tuple[str, ...]
    copies: frozenset[str]  # what each has a copy of: the embedding, the head

    @classmethod
    def find(cls, entry: CatalogueEntry, shape: ModelShape | None) -> MtpLayers | None:
        """Return those of a packed model; None: it has none, or none that are trained.

        Those are of DeepSeek-V3's form, in models whose stages hand on nothing but the hidden state.
        """
        if shape is None or entry.mtp is None or entry.hands_on_trees:
            return None
        listed = [module for module in shape.modules if module.startswith(f"{entry.layers}.")]
        modules = tuple(listed[shape.num_layers :])
        leaves = [{fqn.removeprefix(f"{module}.") for fqn in shape.by_module()[module]} for module in modules]
        if not modules or not all(map(_OWN.issubset, leaves)):
            return None
        copies = (name for name in (EMBEDDING, HEAD) if all(f"{name}.weight" in names for names in leaves))
        return cls(modules=modules, copies=frozenset(copies))

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
