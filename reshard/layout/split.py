"""torchtitan's split: equal stages, with embedding and head counted as a number of layers.

Source: torchtitan 0.3.0, `distributed/pipeline_parallel.py`, `_generate_llm_fqn_per_model_part` and
`_get_pipeline_metadata`.
"""

from __future__ import annotations

from itertools import accumulate

from reshard.layout.degrees import DEGREES, Degrees, Options, layout_of, read_words
from reshard.layout.model import Request, StageLayout
from reshard.layout.wording import counted

SPLIT_KEYS = (*DEGREES, "first", "last", "layers-per-stage")


def split_layers(num_stages: int, num_layers: int, first: int = 1, last: int = 1) -> tuple[int, ...]:
    """Return the number of decoder layers of each stage.

    The embedding counts as `first` layers, norm and head as `last`; all are distributed evenly, the
    remainder on the earliest stages.

    Raises:
        ValueError: a stage would be empty, or `first` or `last` exceeds its stage.
    """
    if num_stages == 1:
        return (num_layers,)
    effective = num_layers + first + last
    base, extra = divmod(effective, num_stages)
    if num_stages > effective:
        parts = f"{counted(num_layers, 'layer')}, first={first} and last={last}"
        raise ValueError(f"expected at most {counted(effective, 'stage')} ({parts}), found {num_stages}")
    for key, weight in (("first", first), ("last", last)):
        if weight > base:
            raise ValueError(f"{key}={weight} exceeds the smallest stage, which has {base}")
    counts = [base + (stage < extra) for stage in range(num_stages)]
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


def read_split(request: Request) -> StageLayout:
    """Read `pp=N[,vpp=K][,style=loop|v][,first=A][,last=B][,layers-per-stage=L][,schedule=NAME]`.

    MTP layers are on the head's stage, Megatron's default; torchtitan does not split them.

    Raises:
        LayoutError: an unknown key, an invalid value, or a split that torchtitan refuses.
    """
    options = Options(request, read_words(request.spec), SPLIT_KEYS)
    degrees = Degrees.read(options)
    inventory = request.inventory
    first, last = options.count("first", 0), options.count("last", 0)
    first, last = 1 if first is None else first, 1 if last is None else last
    effective = inventory.num_layers + first + last
    num_stages = None
    if layers_per_stage := options.count("layers-per-stage"):
        num_stages = -(-effective // layers_per_stage)
        _check_layers_per_stage(options, degrees, layers_per_stage, effective)
    num_stages = degrees.placement(request, num_stages).num_stages
    try:
        counts = split_layers(num_stages, inventory.num_layers, first, last)
    except ValueError as error:
        key = "pp" if num_stages > effective else "first" if str(error).startswith("first") else "last"
        most = effective // max(first, last, 1)
        per_rank = num_stages // (degrees.num_ranks or num_stages)
        hint = f"at most pp={most // per_rank}" + (f" with vpp={per_rank}" if per_rank > 1 else "")
        raise options.error(
            key, str(error), hint if most >= per_rank else "lower vpp", code="layout.uneven-split"
        ) from error
    cuts = list(accumulate(counts, initial=inventory.num_inputs))[1:-1]
    return layout_of(request, (0, *cuts, len(inventory.modules)), degrees)


def _check_layers_per_stage(options: Options, degrees: Degrees, asked: int, effective: int) -> None:
    """Raise if this number of layers per stage makes stages that are not a multiple of the ranks."""
    num_ranks = degrees.num_ranks
    num_stages = -(-effective // asked)
    if num_ranks is None or num_stages % num_ranks == 0:
        return
    fitting = [size for size in range(1, effective + 1) if -(-effective // size) % num_ranks == 0]
    nearest = min(fitting, key=lambda size: (abs(size - asked), size), default=None)
    raise options.error(
        "layers-per-stage",
        f"layers-per-stage={asked} makes {counted(num_stages, 'stage')}, not a multiple of {num_ranks} ranks",
        f"layers-per-stage={nearest} makes {-(-effective // nearest)}" if nearest else "lower pp",
        code="layout.indivisible-stages",
    )
