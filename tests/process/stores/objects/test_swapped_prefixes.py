"""Our own outputs in a bucket renamed, copied and swapped, whole or unfinished: no verb takes another's tensors.

The changes and the oracle, contents, are those of outputs on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stores.base import LOCK_NAME, PROGRESS_NAME
from tests.builders import Ended, reshard
from tests.fast.reshard.checks.test_swapped_outputs import CHANGES, contents
from tests.fast.trained import write_trained
from tests.process.stores.objects.buckets import BUCKET, objects_in, url_of
from tests.servers.s3 import Fault, MotoServer

Objects = Mapping[str, bytes]
MODELS = ("model", "other")
SHARD = ".safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two trained models of one architecture, with other values."""
    place = tmp_path_factory.mktemp("prefixes")
    for seed, name in enumerate(MODELS):
        write_trained(place / name, "pp=1", seed=seed, num_hidden_layers=2, tie_word_embeddings=True)
    return place


@pytest.fixture
def outputs(moto: MotoServer, place: Path) -> dict[str, Objects]:
    """Pack both into the bucket; return the objects of each."""
    for name in MODELS:
        if not objects_in(moto, name):
            assert pack(place, name, name).code == 0
    return {name: objects_in(moto, name) for name in MODELS}


def pack(place: Path, model: str, prefix: str, *flags: str) -> Ended:
    return reshard("pack", place / model / "trained", "--layout", "pp=2", "--out", url_of(prefix), "--json", *flags)


def put(moto: MotoServer, prefix: str, objects: Objects) -> None:
    client = moto.client()
    for name in objects_in(moto, prefix).keys() - objects.keys():
        client.delete_object(Bucket=BUCKET, Key=f"{prefix}/{name}")
    for name, data in objects.items():
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=data)


def write(folder: Path, objects: Objects) -> Path:
    for name, data in objects.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def check_verbs(place: Path, prefix: str, folder: Path) -> dict[str, int | str]:
    """Run every verb that reads on a prefix; what it makes has the model's contents, or is not there.

    Returns how each ended: its error code, or its exit code if it has no error.
    """
    expected, url = contents(place / "model" / "trained"), url_of(prefix)
    verbs = {
        "inspect": ("inspect", url, "--tensors"),
        "verify": ("verify", url),
        "check": ("check", url),
        "diff": ("diff", place / "model" / "trained", url),
        "pack": ("pack", url, "--layout", "pp=1", "--out", folder / "packed"),
        "export": ("export", url, "--to", "hf", "--out", folder / "exported"),
    }
    codes = {verb: how(reshard(*words, "--json")) for verb, words in verbs.items()}
    for verb, made in (("pack", folder / "packed"), ("export", folder / "exported")):
        if codes[verb] == 0:
            found = contents(made)
            assert {key: found[key].data for key in found} == {key: expected[key].data for key in found}, (verb, codes)
        else:
            assert not made.exists(), verb
    return codes


def how(ended: Ended) -> int | str:
    if ended.code != 3:
        return ended.code
    _, code, _ = ended.refusal
    return code


def check_packed_over(moto: MotoServer, place: Path, prefix: str, folder: Path) -> tuple[int | str, ...]:
    """Pack the model over what is there, without and with --force: nothing changes, or the output is the model's.

    Returns how each ended, as `check_verbs`.
    """
    codes = []
    for flags in ((), ("--force",)):
        before = objects_in(moto, prefix)
        codes.append(how(pack(place, "model", prefix, *flags)))
        if codes[-1] == 0:
            after = write(folder / f"after{len(flags)}", objects_in(moto, prefix))
            expected = contents(place / "model" / "trained")
            found = contents(after)
            assert {key: found[key].data for key in expected} == {key: expected[key].data for key in expected}
            assert reshard("verify", url_of(prefix)).code == 0
        else:
            kept = objects_in(moto, prefix)
            assert {name for name in before if kept.get(name) != before[name]} <= {LOCK_NAME, PROGRESS_NAME}
    return tuple(codes)


MISMATCH, SIZE, MISSING = "shard.digest-mismatch", "shard.wrong-size", "store.no-such-file"
# How verbs that read tensors end; `inspect` reads those of weights alone.
REFUSED = {
    **dict.fromkeys(CHANGES, MISMATCH),
    **dict.fromkeys(("shards swapped", "optimizer state of stages swapped"), SIZE),
    **dict.fromkeys(("stage folders swapped", "shard renamed"), MISSING),
}
OF_OPTIMIZER = (
    "optimizer state of stages swapped", "moments swapped", "optimizer state of another model",
    "weights in place of optimizer state",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_changed_prefix_is_refused_or_read_right_by_every_verb(
    name: str, moto: MotoServer, place: Path, outputs: dict[str, Objects], tmp_path: Path
) -> None:
    folders = {model: write(tmp_path / model, outputs[model]) for model in MODELS}
    CHANGES[name](folders["model"], folders["other"])
    paths = [path for path in folders["model"].rglob("*") if path.is_file()]
    prefix = f"changed-{list(CHANGES).index(name)}"
    put(moto, prefix, {path.relative_to(folders["model"]).as_posix(): path.read_bytes() for path in paths})
    refused = REFUSED[name]
    assert check_verbs(place, prefix, tmp_path) == {
        **dict.fromkeys(("diff", "pack", "export"), refused),
        **dict.fromkeys(("verify", "check"), 4),
        "inspect": 0 if name in OF_OPTIMIZER else refused,
    }
    assert check_packed_over(moto, place, prefix, tmp_path) == ("output.exists", "output.exists")


def shards_of(objects: Objects) -> dict[str, bytes]:
    return {name: data for name, data in objects.items() if name.endswith(SHARD)}


# What becomes of the model's unfinished output, given that of the other model.
UNFINISHED: dict[str, Callable[[Objects, Objects], Objects]] = {
    "renamed": lambda ours, _: ours,
    "swapped": lambda _, other: other,
    "shards of the other": lambda ours, other: {**ours, **shards_of(other)},
    "progress of the other": lambda ours, other: {**ours, PROGRESS_NAME: other[PROGRESS_NAME]},
    "lock of the other": lambda ours, other: {**ours, LOCK_NAME: other[LOCK_NAME]},
    "all but shards of the other": lambda ours, other: {**other, **shards_of(ours)},
}


@pytest.fixture
def unfinished(moto: MotoServer, place: Path) -> dict[str, Objects]:
    """Return what is left of packs whose last shards the store refused."""
    for name in MODELS:
        if objects_in(moto, f"half-{name}"):
            continue
        last = ("model-00002-of-00002", "stage-001")
        moto.fail(*(Fault(method="PUT", address=part, what="status", status=403, times=99) for part in last))
        assert pack(place, name, f"half-{name}").code == 3
        moto.fail()
    left = {name: objects_in(moto, f"half-{name}") for name in MODELS}
    assert all({LOCK_NAME, PROGRESS_NAME} <= objects.keys() and shards_of(objects) for objects in left.values())
    return left


@pytest.mark.parametrize(
    "change",
    [pytest.param(name, marks=() if name == "shards of the other" else pytest.mark.slow) for name in UNFINISHED],
)
def test_unfinished_output_of_another_is_not_resumed(
    change: str, moto: MotoServer, place: Path, unfinished: dict[str, Objects], tmp_path: Path
) -> None:
    """The same names, shapes and sizes: the output is the model's in the end, or the plan is refused."""
    prefix = f"moved-{list(UNFINISHED).index(change)}"
    put(moto, prefix, UNFINISHED[change](unfinished["model"], unfinished["other"]))
    assert set(check_verbs(place, prefix, tmp_path).values()) == {"store.unfinished"}
    is_resumed = change in ("renamed", "shards of the other")  # a shard that another pack wrote is written again
    expected = (0, "output.exists") if is_resumed else ("output.unfinished", 0)
    assert check_packed_over(moto, place, prefix, tmp_path) == expected
    assert reshard("verify", url_of(prefix), "--against", place / "model" / "trained").code == 0
