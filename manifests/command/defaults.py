"""Defaults of the flags that `reshard plan` and training share."""

from typing import Final

SEQ_LEN: Final = 512  # tokens
SEARCH_SEQ_LEN: Final = 4096  # of `reshard plan --gpus`, whose launch command says it
GLOBAL_BATCH: Final = 8  # sequences
MICROBATCH: Final = 1  # sequences
DTYPE: Final = "fp32"
OPTIMIZER: Final = "adamw"
RECOMPUTE: Final = "none"
CONTEXT_METHOD: Final = "gather"
HARDWARE: Final = "h100"  # of `reshard plan`
GPUS_PER_NODE: Final = 8
