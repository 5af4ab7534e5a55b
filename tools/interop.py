"""Build .venv-interop: programs that read what reshard writes, for tests/interop. `make test-interop` runs it.

mlx-lm is installed, and DeepSpeed and megatron-core in environments of their own, with the torch and transformers of
the one that runs this. Of vLLM, SGLang, llama.cpp, PEFT and accelerate only the Python files are unpacked, since their
packages bring CUDA, a compiler or another torch; and of the newest megatron-core, which asks for a newer Python. What
pip cannot get is named; its tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

HOME = Path(__file__).parents[1] / ".venv-interop"
_CONSTRAINTS = HOME.with_name("constraints.txt")  # the versions of all packages that this file does not name
_MLX = ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2", "sentencepiece==0.2.3")
# A package, how pip downloads it, and where the files that are unpacked are in it.
_UNPACKED = {
    "vllm": ("vllm==0.33.0", ("--only-binary", ":all:"), ("vllm/",)),
    "sglang": ("sglang==0.5.23", ("--only-binary", ":all:"), ("sglang/srt/",)),
    "peft": ("peft==0.21.2", ("--only-binary", ":all:"), ("peft/", "peft-")),
    "accelerate": ("accelerate==1.15.0", ("--only-binary", ":all:"), ("accelerate/", "accelerate-")),
    "megatron-0.19": (
        "megatron-core==0.19.0",
        ("--only-binary", ":all:", "--python-version", "3.12"),
        ("megatron/",),
    ),
    # The converter is in no wheel: this is a source package that has llama.cpp in it.
    "llama.cpp": (
        "llama-cpp-python==0.3.36",
        ("--no-binary", "llama-cpp-python"),
        ("/vendor/llama.cpp/conversion/", "/vendor/llama.cpp/gguf-py/gguf/"),
    ),
}
_SHARED = ("einops==0.8.2", "psutil==7.2.2")
# Packages with an environment of their own, and what they need besides torch. Without CUDA, DeepSpeed is Python alone;
# its package is a source package that asks for torch while it is built.
_OWN = {
    "deepspeed": (
        "deepspeed==0.19.8",
        (*_SHARED, "hjson==3.1.0", "msgpack==1.2.4", "ninja==1.13.2", "py-cpuinfo==9.0.0"),
    ),
    "megatron": ("megatron-core==0.16.1", _SHARED),
}


def main() -> None:
    if not (HOME / "bin" / "python").exists():
        venv.create(HOME, with_pip=True, clear=True)
    if not (HOME / "mlx").exists() and _pip("install", "-q", *_MLX):
        (HOME / "mlx").touch()
    for name, (package, needs) in _OWN.items():
        if not (HOME / name).exists():
            _install_apart(HOME / name, package, needs)
    for name, (package, how, wanted) in _UNPACKED.items():
        if not (HOME / name).exists():
            _unpack(name, package, how, wanted)
    lacking = [name for name in ("mlx", *_OWN, *_UNPACKED) if not (HOME / name).exists()]
    if lacking:
        print(f"interop: not tested here, since pip could not get them: {', '.join(lacking)}", file=sys.stderr)


def _unpack(name: str, package: str, how: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=HOME) as folder:
        if not _pip("download", "-q", "--no-deps", "--dest", folder, *how, package):
            return
        archive, target = next(Path(folder).iterdir()), Path(folder) / "unpacked"
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                names = [name for name in wheel.namelist() if name.startswith(wanted)]
                wheel.extractall(target, [name for name in names if name.endswith((".py", "/METADATA"))])
            found = target
        else:
            with tarfile.open(archive) as source:
                members = [each for each in source.getmembers() if any(part in each.name for part in wanted)]
                source.extractall(target, members, filter="data")
            found = next(target.glob("*/vendor/llama.cpp"))
        shutil.move(found, HOME / name)


def _install_apart(place: Path, package: str, needs: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=HOME) as folder:
        made = Path(folder, place.name)
        venv.create(made, with_pip=True)
        (packages,) = made.glob("lib/python*/site-packages")
        shared = [path for path in sys.path if path.endswith("site-packages")]  # a .venv may borrow from another
        (packages / "shared.pth").write_text("\n".join(shared))
        built = ("install", "-q", "--no-deps", "--no-build-isolation", package)
        if all(_pip(*args, home=made) for args in (("install", "-q", "setuptools", "wheel==0.48.0", *needs), built)):
            shutil.move(made, place)


def _pip(*args: str, home: Path = HOME) -> bool:
    command = [home / "bin" / "python", "-m", "pip", "--disable-pip-version-check", *args]
    env = {**os.environ, "DS_BUILD_OPS": "0", "PIP_CONSTRAINT": str(_CONSTRAINTS)}
    return subprocess.run(command, check=False, env=env).returncode == 0


if __name__ == "__main__":
    main()
