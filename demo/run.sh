#!/bin/sh
# From a Hugging Face folder to pipeline-parallel training, through the loss of a rank, and back, on a small model.
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
say "A small Llama 3.2 with tied embeddings and sharded files; tokenizer and text come from Python's own sources"
run python demo/make_model.py "$work"
run ls "$work/model"

say "Plan two stages"
run reshard plan "$work/model" --layout pp=2 --seq-len 128 --microbatch 4

say "Pack: one bundle per stage and a manifest. Export restores the folder byte for byte"
run reshard pack "$work/model" --layout pp=2 --out "$work/pp2"
run reshard verify "$work/pp2"
run reshard export "$work/pp2" --to hf --out "$work/untrained-again"
run diff -r "$work/model" "$work/untrained-again"

say "Train: each rank builds its own stage and reads only its own bundle"
recipe="--steps 30 --seq-len 128 --global-batch 32 --microbatch 4 --lr 3e-3 --warmup-steps 5"
# shellcheck disable=SC2086
run runner launch "$work/pp2/manifest.json" --nproc-per-node 2 -- \
    $recipe --data "$work/text/train.jsonl" --log-dir "$work/log"

say "The same with checkpoints, and a rank that is killed after step 23"
# shellcheck disable=SC2086
run python demo/kill_rank.py 1 23 "$work/checkpoints/step-000020" \
    runner launch "$work/pp2/manifest.json" --nproc-per-node 2 -- \
    $recipe --data "$work/text/train.jsonl" --log-dir "$work/log-killed" \
    --checkpoint "$work/checkpoints" --checkpoint-every 10
run ls "$work/checkpoints"

say "Reshard the last checkpoint to four ranks, weights and optimizer state, and check that no tensor changed"
run reshard pack "$work/checkpoints/step-000020" --layout pp=4 --out "$work/pp4"
run reshard diff "$work/checkpoints/step-000020" "$work/pp4"

say "Resume: options, data position and learning-rate schedule come from the checkpoint"
run runner launch "$work/pp4/manifest.json" --nproc-per-node 4 -- \
    --resume auto --steps 30 --data "$work/text/train.jsonl" --eval-data "$work/text/eval.jsonl" \
    --save "$work/trained" --log-dir "$work/log-resumed"
run python demo/draw_losses.py "$work/log" "$work/log-killed" "$work/log-resumed" "$work/losses.svg"

say "Export to Hugging Face: trained weights in the files and dtypes of the source"
run reshard export "$work/trained" --to hf --out "$work/exported"

say "Load the export with transformers: its evaluation loss must equal the pipeline's"
run python demo/check_export.py "$work/exported" "$work/text/eval.jsonl" "$work/log-resumed/metrics.jsonl"
