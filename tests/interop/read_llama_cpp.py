"""Read a folder's tensors with the converter of llama.cpp: python read_llama_cpp.py LLAMA_CPP FOLDER OUT.npz"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, sys.argv[1])
import conversion  # type: ignore[import-not-found]
import gguf  # type: ignore[import-not-found]
from conversion import ModelBase
from conversion.base import LazyTorchTensor  # type: ignore[import-not-found]

folder, out = Path(sys.argv[2]), Path(sys.argv[3])
architecture = ModelBase.load_hparams(folder, False)["architectures"][0]
model = conversion.get_model_class(architecture)(folder, gguf.LlamaFileType.ALL_F32, out.with_suffix(".gguf"))
tensors = {name: LazyTorchTensor.to_eager(read()) for name, read in model.model_tensors.items()}
np.savez(out, **{name: tensor.float().numpy() for name, tensor in tensors.items()})
