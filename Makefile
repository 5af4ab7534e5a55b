.POSIX:
.SUFFIXES:
.DELETE_ON_ERROR:

# The Pythons to try, in this order; `make setup PYTHON=/path/to/python3` names one.
PYTHON = python3.11 python3 python3.12 python3.13 python3.14
BIN = .venv/bin
# How long `make fuzz` fuzzes each decoder.
FUZZ_S = 600
PIP = $(BIN)/python -m pip install -qq
# Sets $$python to the first one that is new enough.
FIND_PYTHON = for python in $(PYTHON); do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	    python=; \
	done; \
	test -n "$$python" || { \
	    echo 'no Python 3.11 or newer among: $(PYTHON)' >&2; \
	    echo 'hint: install one, or name it: make setup PYTHON=/path/to/python3' >&2; \
	    exit 1; \
	}

.PHONY: help setup check types lint fast test test-all test-gpu test-pythons test-interop interop test-torch wording explore fuzz demo bench bench-peers docs performance architecture catalogue models errors fmt constraints release clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: .venv/.stamp  ## Build .venv: everything, at the versions of constraints.txt

# Side by side, as each but the tests is one process: types takes longest, so it starts first.
check: setup  ## Format, lint, types, arrows, fast tests
	$(MAKE) -j 2 types lint fast

types: setup
	$(BIN)/mypy

lint: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/python tools/architecture.py --check
	$(BIN)/python tools/errors.py --check
	$(BIN)/python tools/models.py --check
	$(BIN)/python tools/performance.py --check
	$(BIN)/python tools/site.py
	$(BIN)/python tools/compatibility.py --check

fast: setup
	$(BIN)/python -m pytest -q -n 2 -m "not process and not slow" --snapshot-disable-unused --ignore tests/process --ignore tests/gpu

# Ranks wait for each other and for timeouts: three tests at a time keep two cores busy.
test: check  ## check, and the tests that start processes
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "process and not slow and not gpu" tests/process tests/gpu

test-all: test interop explore  ## test, and the slow tests
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not gpu"

test-gpu: setup  ## Run what needs a GPU, and write bench/results/gpu-*.json; without one, say what it would run
	@$(BIN)/python tools/gpu.py

test-interop: setup interop  ## Run mlx-lm, DeepSpeed, and what vLLM, SGLang and llama.cpp read with, on packed folders and exports
	$(BIN)/python -m pytest -q -m slow tests/interop

interop: setup
	$(BIN)/python tools/interop.py

test-pythons:  ## Test the half without torch on Python 3.11 to 3.14, those that are here
	@$(FIND_PYTHON); "$$python" tools/pythons.py

# The registry's build of torch has CUDA packages, several GB, and runs on CPUs.
test-torch:  ## Run the suites on another release: make test-torch TORCH=2.15.0
	@$(FIND_PYTHON); \
	test -n "$(TORCH)" || { echo 'hint: make test-torch TORCH=2.15.0' >&2; exit 2; }; \
	"$$python" tools/compatibility.py --torch $(TORCH)

wording: setup  ## Renew the snapshots of messages that tests compare; review their diff
	$(BIN)/python -m pytest -q -m "not process and not slow" --snapshot-update

explore: setup
	$(BIN)/python -m pytest -q -n 2 -m hypothesis --hypothesis-profile=explore tests/fast

fuzz: explore  ## Fuzz every decoder, FUZZ_S seconds each; needs a wheel of atheris for this Python
	$(PIP) 'atheris>=3.0'
	set -e; for target in header manifest record archive alike pickle metadata text lines parquet tokenizer job runlog; do \
	    $(BIN)/python tests/fuzz/run.py $$target --seconds $(FUZZ_S); \
	done

demo: setup  ## From a Hugging Face folder to a training pipeline and back
	@./demo/run.sh

bench: setup  ## Run all benchmarks without peers' packages on a quiet machine, and write bench/results
	$(BIN)/python bench/all.py

# Peers have an environment of their own, with the torch and transformers of .venv.
PEERS = accelerate==1.15.0 fastsafetensors==0.5.0 humanize==4.17.0 mergekit==0.1.5 runai-model-streamer==0.17.0
bench-peers: setup  ## Time pack and load beside other libraries on a quiet machine, and write bench/results
	test -x .venv-peers/bin/python || $(BIN)/python -m venv .venv-peers
	@for packages in .venv-peers/lib/python*/site-packages; do \
	    printf '%s\n' "$$PWD" "$$(echo "$$PWD"/.venv/lib/python*/site-packages)" >"$$packages/shared.pth"; \
	done
	.venv-peers/bin/python -m pip install -qq --no-deps $(PEERS)
	.venv-peers/bin/python bench/all.py --peers

performance: setup  ## Write docs/performance.md and the README's figures from bench/results
	$(BIN)/python tools/performance.py

docs: setup  ## Build the documentation site, build/site
	$(BIN)/python tools/site.py
	@echo 'open build/site/index.html'

architecture: setup  ## Write docs/architecture.md from the imports
	$(BIN)/python tools/architecture.py

catalogue: setup  ## Write the table of architectures from the installed transformers
	$(BIN)/python tools/catalogue.py

models: setup  ## Write the table of architectures in docs/models.md
	$(BIN)/python tools/models.py

errors: setup  ## Write docs/errors.md from docs/errors/*.toml
	$(BIN)/python tools/errors.py

# build, twine and cyclonedx are tools of this target alone, in an environment of their own.
release:  ## Build dist/: wheel, sdist, bill of materials, checksums
	@$(FIND_PYTHON); set -e; rm -rf dist build/release build/installed; \
	"$$python" -m venv build/release; "$$python" -m venv build/installed; \
	build/release/bin/python -m pip install -qq build twine cyclonedx-bom; \
	build/release/bin/python -m build --outdir dist >build/release/log; \
	build/release/bin/twine check --strict dist/*; \
	build/installed/bin/python -m pip install -qq dist/*.whl; \
	build/release/bin/cyclonedx-py environment build/installed --output-file dist/sbom.json; \
	cd dist; sha256sum * >SHA256SUMS; cat SHA256SUMS

fmt: setup  ## Format, and fix what the linter can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# torch comes first, so that no other package chooses the build of it. uv is faster than pip, and does not read pip's
# settings: pip installs where these name an index, and where uv does not succeed.
# Meanwhile the other core compiles what each of pytest's workers would otherwise compile for itself.
COMPILED = import torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.pipelining, torch._dynamo
EVERYTHING = -c constraints.txt --no-build-isolation -e '.[runner,test,docs,dev]'
.venv/.stamp: pyproject.toml constraints.txt
	@$(FIND_PYTHON); \
	test -x $(BIN)/pip || { echo "setup: .venv from $$python"; "$$python" -m venv --clear .venv; }
	@echo 'setup: torch'
	@$(PIP) --no-compile -c constraints.txt torch uv
	@echo 'setup: everything else'
	@set -e; $(BIN)/python -c '$(COMPILED)' 2>/dev/null & \
	{ ! $(BIN)/python -m pip config list | grep -q '[.]index-url' && VIRTUAL_ENV=.venv $(BIN)/uv pip install -q $(EVERYTHING); } || $(PIP) $(EVERYTHING); \
	wait
	@touch $@

constraints:  ## Regenerate constraints.txt from the newest releases that pyproject.toml allows
	@$(FIND_PYTHON); set -e; \
	"$$python" -m venv --clear .constraints; \
	.constraints/bin/python -m pip install -qq $$(sed -n "/^torch==/p;/^triton==/p" constraints.txt); \
	.constraints/bin/python -m pip install -qq --no-build-isolation -e '.[runner,test,docs,dev]'; \
	.constraints/bin/python -m pip freeze --all --exclude-editable --exclude pip >.constraints/exact; \
	{ sed -n '/^#/p' constraints.txt; sed 's/+[^ ]*//' .constraints/exact; } >.constraints/new; \
	mv .constraints/new constraints.txt; \
	rm -rf .constraints

clean:  ## Remove .venv and every cache
	rm -rf .venv .venv-torch-* .venv-python-* .venv-interop .venv-peers .constraints build dist *.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
