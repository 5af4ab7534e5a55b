"""Write manifests/models/sizes.json: formulas of config fields for every tensor of the catalogue's architectures.

`python tools/sizes.py` writes the table from the installed transformers; `--check` exits with 1 where a formula does
not hold for its models. Names of architectures after that restrict either to these.

Models of many configs are built on the meta device. Formulas are fitted to some of them, and must give the names and
shapes of others, which were not looked at before: configs of random values, and the config class's own default.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers

from manifests.models import ARCHITECTURES
from manifests.models.catalogue import catalogued
from manifests.models.shape import Shape
from manifests.models.sizes import Sizes, make_sizes, tensors_of
from tools.formulas import Fitter
from tools.probing import NUMBER, NotFittedError, Prober

PATH = Path(__file__).parents[1] / "manifests" / "models" / "sizes.json"

_PROOFS = 12


def main() -> int:
    """Write or check the table; return the exit code."""
    only = [word for word in sys.argv[1:] if not word.startswith("--")]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    committed = json.loads(PATH.read_text()) if PATH.exists() else {"architectures": {}, "not_fitted": {}}
    if "--check" in sys.argv[1:]:
        return check(committed["architectures"], only)
    found, refused = dict[str, Any](), dict[str, str]()
    for name in only or [name for name in catalogued() if name not in ARCHITECTURES]:
        try:
            found[name] = describe(name)
        except NotFittedError as error:
            refused[name] = str(error)
        except Exception as error:  # whatever transformers raises of a config
            refused[name] = type(error).__name__
    if only:
        kept = {name: entry for name, entry in committed["architectures"].items() if name not in only}
        found = {**kept, **found}
        refused = {**committed["not_fitted"], **refused}
    PATH.write_text(render(found, {name: why for name, why in refused.items() if name not in found}))
    return 0


def check(tables: Mapping[str, Any], only: Iterable[str]) -> int:
    """Compare the tables with models of new configs; return the exit code."""
    wrong = []
    for name in only or tables:
        try:
            prove(Prober(getattr(transformers, name)), make_sizes(tables[name]))
        except NotFittedError as error:
            wrong.append(f"{name}: {error}: make catalogue")
    print(*wrong, sep="\n", end="", file=sys.stderr)
    return bool(wrong)


def describe(architecture: str) -> dict[str, Any]:
    """Return an architecture's table.

    Raises:
        NotFittedError: no formulas were found, or they do not hold for other configs.
    """
    prober = Prober(getattr(transformers, architecture))
    table = Fitter(prober).table()
    prove(prober, make_sizes(table))
    return table


def prove(prober: Prober, sizes: Sizes) -> None:
    """Compare the formulas with models of configs that they were not fitted to.

    Raises:
        NotFittedError: they differ.
    """
    made = 0
    for _ in range(4 * _PROOFS):
        sample = prober.draw(omit=0.3)
        if sample is None:
            continue
        made += 1
        for config in (sample.given, prober.whole(sample)):
            _compare(sizes, config, sample.tensors)
        if made == _PROOFS:
            break
    if made < _PROOFS // 2:
        raise NotFittedError("too few of its configs could be built")
    if (default := prober.sample({}, most=60_000)) is not None:
        _compare(sizes, {}, default.tensors)
        _compare(sizes, prober.whole(default), default.tensors)


def _compare(sizes: Sizes, config: Mapping[str, Any], tensors: Mapping[str, Shape]) -> None:
    try:
        found = tensors_of(sizes, config, "config.json")
    except Exception as error:
        raise NotFittedError(f"formulas fail for another config: {error}") from error
    if found == tensors:
        return
    odd = sorted(name for name in {*found, *tensors} if found.get(name) != tensors.get(name))[0]
    raise NotFittedError(f"formulas differ from another config's model at {NUMBER.sub('*', odd)}")


def render(found: Mapping[str, Any], refused: Mapping[str, str]) -> str:
    """Return the text of the table: a line for each group of names."""
    entries = []
    for name in sorted(found):
        lines = []
        for key, value in found[name].items():
            if key == "groups":
                lines.append(' "groups": [\n' + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]")
            else:
                lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
        entries.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    reasons = [f" {json.dumps(name)}: {json.dumps(refused[name])}" for name in sorted(refused)]
    return (
        f'{{\n"transformers": {json.dumps(transformers.__version__)},\n"architectures": {{\n'
        + ",\n".join(entries) + '\n},\n"not_fitted": {\n' + ",\n".join(reasons) + "\n}\n}\n"
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
