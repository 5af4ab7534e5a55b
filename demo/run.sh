#!/bin/sh
# From a Hugging Face folder to a training pipeline and back, on a small model built on the spot.
set -eu
cd "$(dirname "$0")/.."
work=${DEMO_DIR:-build/demo}
PATH="$PWD/.venv/bin:$PATH"
export PATH OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

say() { printf '\n\033[1m# %s\033[0m\n' "$1"; }
run() {
    printf '$ %s\n' "$*"
    "$@"
}

rm -rf "$work"
say "A small Llama: 3.2's shape, tied embeddings, sharded files; its tokenizer and text from Python's own sources"
run python demo/make_model.py "$work"
run ls "$work/model"

say "What would two stages be?"
run reshard plan "$work/model" --layout pp=2 --seq-len 128 --microbatch 4

say "Pack: one bundle per stage, and a manifest"
run reshard pack "$work/model" --layout pp=2 --out "$work/pp2"
run reshard verify "$work/pp2"

say "Train: each rank builds and reads only its own stage"
run runner launch "$work/pp2/manifest.json" --nproc-per-node 2 -- \
    --steps 30 --seq-len 128 --global-batch 32 --microbatch 4 --lr 3e-3 --warmup-steps 5 \
    --data "$work/text/train.jsonl" --eval-data "$work/text/eval.jsonl" \
    --save "$work/trained" --log-dir "$work/log"

say "Back to Hugging Face: untrained weights byte for byte, trained ones in the same files"
run reshard export "$work/pp2" --to hf --out "$work/untrained-again"
run diff -r "$work/model" "$work/untrained-again"
run reshard export "$work/trained" --to hf --out "$work/exported"

say "transformers loads the export: the loss on the evaluation text must be the pipeline's last"
run python demo/check_export.py "$work/exported" "$work/text/eval.jsonl" "$work/log/metrics.jsonl"
