"""Pack a model from Python, verify it, reshard it to another pipeline degree and export it again.

python examples/pack.py ./Llama-3.2-1B ./out
"""

import argparse
from pathlib import Path

import reshard


def show(done_nbytes: int, total_nbytes: int) -> None:
    print(f"\r{done_nbytes / 2**20:,.1f} of {total_nbytes / 2**20:,.1f} MiB", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder, or org/name@revision")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()

    planned = reshard.plan(
        args.model, "pp=2", assumed=reshard.Assumptions(seq_len=2048, dtype="bf16", master_dtype="fp32")
    )
    for stage, memory in zip(planned.stages, planned.forecast.memory.stages, strict=True):
        print(f"stage {stage.index}: {', '.join(stage.modules)}: {memory.total / 2**20:,.1f} MiB in training")

    packed = reshard.pack(args.model, args.out / "pp2", "pp=2", progress=show)
    print(f"\npacked {packed.num_tensors} tensors in {packed.num_stages} stages: {packed.path}")
    if not reshard.verify(args.out / "pp2", against=args.model).equal:
        raise SystemExit("the bundles differ from the model")

    reshard.pack(args.out / "pp2", args.out / "pp4", "pp=4")
    found = reshard.diff(args.out / "pp2", args.out / "pp4")
    print(f"resharded: {found.num_equal} tensors are equal, {found.num_moved} on another stage")

    try:
        exported = reshard.export(args.out / "pp4", args.out / "hf")
    except reshard.InputError as error:
        if error.code != "output.exists":
            raise
        raise SystemExit(f"{error.where} exists: {error.hint}") from error
    print(f"exported {exported.num_files} files, headers as in the source: {exported.identical}")


if __name__ == "__main__":
    main()
