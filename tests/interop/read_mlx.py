"""Compute the logits of a folder's model with mlx-lm on the CPU: python read_mlx.py FOLDER OUT.npy"""

import sys
from pathlib import Path

import mlx.core as mx  # type: ignore[import-not-found]
import numpy as np
from mlx_lm.utils import load_model  # type: ignore[import-not-found]

mx.set_default_device(mx.cpu)
model, _ = load_model(Path(sys.argv[1]))
np.save(sys.argv[2], np.array(model(mx.arange(12)[None])))
