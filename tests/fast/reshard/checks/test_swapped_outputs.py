"""Our own outputs renamed, copied and swapped: every verb refuses what is wrong, or its result has the right contents.

The oracle is contents: tensors as the safetensors format says, read without our code. `other` is the same architecture
with other values, so that every name, shape and size fits.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.builders import Tensor, read_safetensors, reshard
from tests.fast.trained import write_trained
from tests.servers.hub import MEMBER, serve_hub, set_up

Change = Callable[[Path, Path], object]
ROOT_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NUM_SEEDS = 12  # of two changes at once


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("swapped")
    for seed, name in enumerate(("model", "other")):
        write_trained(place / name, "pp=2", seed=seed, num_hidden_layers=2, tie_word_embeddings=True)
    key = ec.generate_private_key(ec.SECP256R1())
    (place / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (place / "key.pub").write_bytes(public)
    return place


def swap(folder: Path, one: str, other: str) -> None:
    (folder / one).rename(folder / "aside")
    (folder / other).rename(folder / one)
    (folder / "aside").rename(folder / other)


def swapping(one: str, other: str) -> Change:
    return lambda out, _: swap(out, one, other)


def taking(*names: str) -> Change:
    """Return what copies these files from the other output."""
    return lambda out, other: [shutil.copyfile(other / name, out / name) for name in names]


EXP_AVG, EXP_AVG_SQ = (
    [f"stage-{stage:03d}/{kind}/model.safetensors" for stage in range(2)] for kind in ("exp_avg", "exp_avg_sq")
)
CHANGES: dict[str, Change] = {
    "shards swapped": swapping(*ROOT_SHARDS),
    "shard of another model": taking(ROOT_SHARDS[0]),
    "last shard of another model": taking(ROOT_SHARDS[1]),
    "manifest of another model": taking("manifest.json"),
    "all weights of another model": taking(*ROOT_SHARDS, "stage-001/tied/model.safetensors"),
    "tied weight of another model": taking("stage-001/tied/model.safetensors"),
    "optimizer state of stages swapped": swapping(*EXP_AVG),
    "moments swapped": swapping(EXP_AVG[0], EXP_AVG_SQ[0]),
    "stage folders swapped": swapping("stage-000", "stage-001"),
    "optimizer state of another model": taking(*EXP_AVG, *EXP_AVG_SQ),
    "weights in place of optimizer state": lambda out, _: shutil.copyfile(out / ROOT_SHARDS[0], out / EXP_AVG[0]),
    "shard renamed": lambda out, _: (out / ROOT_SHARDS[0]).rename(out / "model-00003-of-00003.safetensors"),
}


def contents(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Return every tensor of weights and optimizer state, by kind and name; copies must be equal."""
    tensors: dict[tuple[str, str], Tensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        kind = path.parent.name if path.parent.name.startswith("exp_avg") else "weights"
        for name, tensor in read_safetensors(path.read_bytes()).items():
            assert tensors.setdefault((kind, name), tensor).data == tensor.data, (path, name)
    return tensors


def check(place: Path, changes: list[Change], folder: Path) -> None:
    """Change a copy of an output, whose folder has another name too, and run every verb on it."""
    original, out = place / "model" / "trained", folder / "step-000099"
    shutil.copytree(original, out)
    for change in changes:
        change(out, place / "other" / "trained")
    expected = contents(original)
    verbs = {
        "inspect": ("inspect", out, "--tensors"),
        "verify": ("verify", out),
        "check": ("check", out),
        "diff": ("diff", original, out),
        "pack": ("pack", out, "--layout", "pp=1", "--out", folder / "packed"),
        "export": ("export", out, "--to", "hf", "--out", folder / "exported"),
    }
    codes = {verb: reshard(*words).code for verb, words in verbs.items()}
    codes["sign"] = reshard("sign", out, "--key", place / "key.pem").code
    codes["signed"] = reshard("verify", out, "--public-key", place / "key.pub").code
    assert set(codes.values()) <= {0, 3, 4}, codes
    assert 0 not in (codes["verify"], codes["signed"]), codes
    assert codes["diff"] != 0, codes
    for verb, made in (("pack", folder / "packed"), ("export", folder / "exported")):
        if codes[verb] == 0:
            found = contents(made)
            assert {key: found[key].data for key in found} == {key: expected[key].data for key in found}, (verb, codes)
        else:
            assert not made.exists(), verb


@pytest.mark.parametrize("name", CHANGES)
def test_swapped_output_is_refused_or_read_right_by_every_verb(name: str, place: Path, tmp_path: Path) -> None:
    check(place, [CHANGES[name]], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_output_with_two_swaps_is_refused_or_read_right_by_every_verb(seed: int, place: Path, tmp_path: Path) -> None:
    pairs = [pair for pair in itertools.combinations(CHANGES, 2) if "shard renamed" not in pair]
    check(place, [CHANGES[name] for name in random.Random(seed).choice(pairs)], tmp_path)


def test_renamed_output_is_the_same_output(place: Path, tmp_path: Path) -> None:
    out = shutil.copytree(place / "model" / "trained", tmp_path / "step-000099")
    for words in (("verify", out), ("check", out), ("diff", place / "model" / "trained", out)):
        ended = reshard(*words)
        assert ended.code == 0, ended.err


# huggingface_hub 1.33 passes files to httpx in the old way.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_swapped_output_is_not_pushed_or_verify_refuses_what_was(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub() as hub:
        set_up(monkeypatch, hub, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", MEMBER)
        assert reshard("push", place / "model" / "trained", "org/whole").code == 0
        assert reshard("verify", "hf://org/whole").code == 0
        for number, (name, change) in enumerate(CHANGES.items()):
            out, repository = tmp_path / str(number), f"org/swapped-{number}"
            shutil.copytree(place / "model" / "trained", out)
            change(out, place / "other" / "trained")
            pushed = reshard("push", out, repository).code
            assert pushed in (0, 3, 4), name
            if pushed == 0:
                assert reshard("verify", f"hf://{repository}").code in (3, 4), name
