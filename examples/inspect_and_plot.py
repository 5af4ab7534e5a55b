"""Inspect a packed model or a training checkpoint, and plot the bytes and the largest weight of each stage.

python examples/inspect_and_plot.py ./out/pp2 stages.svg
"""

import argparse
from collections import Counter

import matplotlib

import reshard

matplotlib.use("svg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed")
    parser.add_argument("picture", help="an .svg file to write")
    args = parser.parse_args()

    packed = reshard.open(args.packed)
    model, layout = packed.manifest.model, packed.layout
    print(f"{model.architecture}, {model.num_params:,} parameters, {layout.spec} on {layout.num_ranks} ranks")
    names, sizes, largest = [], [], []
    for stage in packed.stages:
        tensors = stage.tensors()
        dtypes = Counter(tensor.dtype for tensor in tensors.values())
        weights = stage.state_dict(dtype="fp32")  # numpy arrays; only this stage's bundle is read
        names.append(f"stage {stage.info.index}\nrank {stage.info.rank}")
        sizes.append(stage.info.nbytes / 2**20)
        largest.append(max(float(abs(weight).max()) for weight in weights.values()))
        print(f"stage {stage.info.index}: {len(tensors)} tensors {dict(dtypes)}, largest weight {largest[-1]:.3f}")

    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(6, 4), layout="constrained")
    top.bar(names, sizes)
    top.set_ylabel("MiB")
    bottom.bar(names, largest)
    bottom.set_ylabel("largest |weight|")
    figure.savefig(args.picture)
    print(f"drawn: {args.picture}")


if __name__ == "__main__":
    main()
