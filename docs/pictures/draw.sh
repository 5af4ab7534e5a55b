#!/usr/bin/env bash
# Regenerate the pictures of docs/layouts.md and docs/metrics.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

reshard plan tests/data/configs/llama-3.1-8b.json --layout pp=4 --gpu-memory 80GB --seq-len 4096 --microbatches 16 --dtype bf16 --master-dtype fp32 --force --draw docs/pictures/llama-3.1-8b-pp4.svg
reshard plan tests/data/configs/deepseek-v3.json --layout pp=16,vpp=2 --microbatches 32 --seq-len 4096 --dtype bf16 --force --draw docs/pictures/deepseek-v3-pp16-vpp2.svg
python bench/bubble.py --only "four ranks" --steps 10 --page docs/pictures/report-pp4.html
