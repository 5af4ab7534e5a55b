"""What holds for every test: one thread per process, no hub, no deadline but the timeout."""

import os

from hypothesis import settings

# Before anything imports torch, tokenizers or huggingface_hub; processes that tests start inherit it.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

# A shared machine stalls now and then: an example may take long, a test may not (`timeout`, pyproject.toml).
settings.register_profile("house", deadline=None)
settings.load_profile("house")
