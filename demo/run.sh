#!/bin/sh
# From a Hugging Face folder to a training pipeline, through the death of a rank, and back, on a small model.
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

say "Pack: one bundle per stage, and a manifest; and back, byte for byte"
run reshard pack "$work/model" --layout pp=2 --out "$work/pp2"
run reshard verify "$work/pp2"
run reshard export "$work/pp2" --to hf --out "$work/untrained-again"
run diff -r "$work/model" "$work/untrained-again"

say "Train: each rank builds and reads only its own stage"
recipe="--steps 30 --seq-len 128 --global-batch 32 --microbatch 4 --lr 3e-3 --warmup-steps 5"
# shellcheck disable=SC2086
run runner launch "$work/pp2/manifest.json" --nproc-per-node 2 -- \
    $recipe --data "$work/text/train.jsonl" --log-dir "$work/log"

say "The same once more with checkpoints, and a rank that dies after step 23"
# shellcheck disable=SC2086
run python demo/kill_rank.py 1 23 "$work/checkpoints/step-000020" \
    runner launch "$work/pp2/manifest.json" --nproc-per-node 2 -- \
    $recipe --data "$work/text/train.jsonl" --log-dir "$work/log-killed" \
    --checkpoint "$work/checkpoints" --checkpoint-every 10
run ls "$work/checkpoints"

say "Four ranks are free now: cut the last checkpoint anew, weights and Adam's moments, and prove that none changed"
run reshard pack "$work/checkpoints/step-000020" --layout pp=4 --out "$work/pp4"
run reshard diff "$work/checkpoints/step-000020" "$work/pp4"

say "Go on where the checkpoint was: the recipe, the data's place and the schedule are in it"
run runner launch "$work/pp4/manifest.json" --nproc-per-node 4 -- \
    --resume auto --steps 30 --data "$work/text/train.jsonl" --eval-data "$work/text/eval.jsonl" \
    --save "$work/trained" --log-dir "$work/log-resumed"
run python demo/draw_losses.py "$work/log" "$work/log-killed" "$work/log-resumed" "$work/losses.svg"

say "Back to Hugging Face: trained weights in the files and the dtype of the source"
run reshard export "$work/trained" --to hf --out "$work/exported"

say "transformers loads the export: the loss on the evaluation text must be the pipeline's last"
run python demo/check_export.py "$work/exported" "$work/text/eval.jsonl" "$work/log-resumed/metrics.jsonl"
