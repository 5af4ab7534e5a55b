"""Build .venv-interop: programs that read Hugging Face folders, for tests/interop. `make test-interop` runs it.

mlx-lm is installed. Of vLLM, SGLang and llama.cpp only the Python files that find and read weights are unpacked, since
their packages bring CUDA or a compiler. What pip cannot get is named; its tests are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

HOME = Path(__file__).parents[1] / ".venv-interop"
_MLX = ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2")
# A package, how pip downloads it, and where the files that are unpacked are in it.
_UNPACKED = {
    "vllm": ("vllm==0.33.0", ("--only-binary", ":all:"), ("vllm/model_executor/model_loader/",)),
    "sglang": ("sglang==0.5.23", ("--only-binary", ":all:"), ("sglang/srt/model_loader/",)),
    # The converter is in no wheel: this is a source package that has llama.cpp in it.
    "llama.cpp": (
        "llama-cpp-python==0.3.36",
        ("--no-binary", "llama-cpp-python"),
        ("/vendor/llama.cpp/conversion/", "/vendor/llama.cpp/gguf-py/gguf/"),
    ),
}


def main() -> None:
    if not (HOME / "bin" / "python").exists():
        venv.create(HOME, with_pip=True, clear=True)
    if not (HOME / "mlx").exists() and _pip("install", "-q", *_MLX):
        (HOME / "mlx").touch()
    for name, (package, how, wanted) in _UNPACKED.items():
        if not (HOME / name).exists():
            _unpack(name, package, how, wanted)
    lacking = [name for name in ("mlx", *_UNPACKED) if not (HOME / name).exists()]
    if lacking:
        print(f"interop: not tested here, since pip could not get them: {', '.join(lacking)}", file=sys.stderr)


def _unpack(name: str, package: str, how: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=HOME) as folder:
        if not _pip("download", "-q", "--no-deps", "--dest", folder, *how, package):
            return
        archive, target = next(Path(folder).iterdir()), Path(folder) / "unpacked"
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(target, [each for each in wheel.namelist() if each.startswith(wanted)])
            found = target
        else:
            with tarfile.open(archive) as source:
                members = [each for each in source.getmembers() if any(part in each.name for part in wanted)]
                source.extractall(target, members, filter="data")
            found = next(target.glob("*/vendor/llama.cpp"))
        shutil.move(found, HOME / name)


def _pip(*args: str) -> bool:
    ended = subprocess.run([HOME / "bin" / "python", "-m", "pip", "--disable-pip-version-check", *args], check=False)
    return ended.returncode == 0


if __name__ == "__main__":
    main()
