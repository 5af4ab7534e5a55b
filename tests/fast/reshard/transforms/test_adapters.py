"""Merging adapters: values rounded once, untouched bytes, several adapters, and refusals that write nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from manifests.models import model_shape
from manifests.models.adapters import digest_of_base
from reshard.tensors.lazy import MemoryFile
from reshard.transforms.arithmetic import merged_blocks
from reshard.transforms.terms import Term
from stores.bundles import TensorAt
from tests.builders import Tensor, llama_config, llama_shapes, pack, read_safetensors, refusal, run, write_model
from tests.fast.manifests.models.built import read_config
from tests.fast.reshard.transforms.adapters import MODULES, PREFIX, adapter_tensors, float32, write_adapter

Q = "model.layers.0.self_attn.q_proj"
UNSELECTED = (("target_modules", ["q_proj"]), ("modules_to_save", ["v_proj"]), ("layers_to_transform", 1))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model of small values in bfloat16 and float32."""
    tensors = {}
    for number, (fqn, shape) in enumerate(llama_shapes(llama_config()).items()):
        tensor = float32(shape, 1000 + number)
        if "q_proj" in fqn:
            bits = np.frombuffer(tensor.data, "<u4") >> 16
            tensor = Tensor(dtype="BF16", shape=shape, data=bits.astype("<u2").tobytes())
        tensors[fqn] = tensor
    write_model(tmp_path / "base", tensors=tensors, num_shards=2)
    return tmp_path / "base"


def values_of(tensor: Tensor) -> Any:
    if tensor.dtype == "BF16":
        return (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4").astype(float).reshape(tensor.shape)
    return np.frombuffer(tensor.data, "<f4").astype(float).reshape(tensor.shape)


def product_of(tensors: dict[str, Tensor], module: str) -> Any:
    a, b = (values_of(tensors[f"{PREFIX}{module}.lora_{half}.weight"]) for half in "AB")
    return b @ a


def test_merged_values_are_rounded_once_and_other_tensors_keep_their_bytes(base: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors()
    write_adapter(tmp_path / "adapter", tensors)
    ended = run("merge", base, tmp_path / "adapter", "--out", tmp_path / "out", "--json")
    assert json.loads(ended.out)["num_merged"] == len(MODULES)
    before, after = (all_tensors(folder) for folder in (base, tmp_path / "out"))
    assert [fqn for fqn in before if before[fqn] != after[fqn]] == [
        fqn for fqn in before if fqn.removesuffix(".weight") in MODULES
    ]
    for module in MODULES:
        old, new = before[f"{module}.weight"], after[f"{module}.weight"]
        exact = values_of(old) + 2 * product_of(tensors, module)
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        if new.dtype == "F32":
            assert np.array_equal(values_of(new), exact.astype("<f4").astype(float))
        else:
            bits = np.frombuffer(new.data, "<u2").astype("<u4")
            for neighbor in (bits + 1, bits - 1):  # of which none is nearer
                other = (neighbor << 16).view("<f4").astype(float).reshape(new.shape)
                assert (np.abs(values_of(new) - exact) <= np.abs(other - exact)).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_middles_of_all_neighboring_bf16_are_rounded_by_the_exact_value(sign: int) -> None:
    codes = np.arange(0x7F7F, dtype=np.uint32)  # all finite values but the largest
    lower, upper = (((codes + step) << 16).view(np.float32).astype(float) for step in (0, 1))
    middles = (lower + upper) / 2
    expected = np.concatenate([codes + (codes & 1), codes, codes + 1, codes[:1]]) | (0x8000 if sign < 0 else 0)
    exact = np.concatenate([middles, np.nextafter(middles, lower), np.nextafter(middles, upper), [0]])
    a, b = at("F64", exact[None] * sign), at("F64", np.ones((3, 1)))
    base = np.zeros((3, len(exact)), "<u2")
    base[1:, -1] = 0x7FC0, 0xFF80  # a NaN, and an infinity, which change no other value of their blocks
    merged = b"".join(map(bytes, merged_blocks(at("BF16", base), (Term(a=a, b=b, rank=1),))))
    rows = np.frombuffer(merged, "<u2").reshape(base.shape)
    assert np.array_equal(rows[0, :-1], expected[:-1])
    assert np.array_equal(rows[1:], np.stack([[*expected[:-1], code] for code in (0x7FC0, 0xFF80)]))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_blocks_that_reuse_memory_are_merged_as_the_whole_matrix(dtype: str) -> None:
    noise, shape = np.random.default_rng(0), (600, 512)  # 256 rows at a time, and fewer at the end
    plain = noise.standard_normal(shape).astype("<f4")
    base = (plain.view("<u4") >> 16).astype("<u2") if dtype == "BF16" else plain.astype(f"<f{int(dtype[1:]) // 8}")
    values = (base.astype("<u4") << 16).view("<f4").astype(float) if dtype == "BF16" else base.astype(float)
    b, a = (noise.integers(-8, 8, sizes) / 8 for sizes in ((600, 2), (2, 512)))  # whose product is exact
    merged = b"".join(map(bytes, merged_blocks(at(dtype, base), (Term(a=at("F64", a), b=at("F64", b), rank=2),))))
    exact = values + b @ a
    if dtype == "BF16":
        codes = np.frombuffer(merged, "<u2").astype("<u4").reshape(shape)
        result, *others = (
            (near << 16).view("<f4").astype(float) for near in (codes, codes + 1, codes - (codes & 0x7FFF != 0))
        )
        assert all((np.abs(result - exact) <= np.abs(other - exact)).all() for other in others)
    else:
        assert merged == exact.astype(base.dtype).tobytes()


def test_pack_merges_as_merge_does_and_keeps_digests_of_the_rest(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    run("merge", base, adapter, "--out", tmp_path / "merged")
    packed = pack(base, tmp_path / "packed", "pp=2")
    merged = pack(packed, tmp_path / "packed-merged", "pp=4", "--adapter", adapter)
    run("export", merged, "--to", "hf", "--out", tmp_path / "exported")
    assert all_tensors(tmp_path / "exported") == all_tensors(tmp_path / "merged")
    kept = {fqn for fqn in all_tensors(base) if fqn.removesuffix(".weight") not in MODULES}
    digests = [digests_in(folder) for folder in (packed, merged)]
    assert {fqn for fqn in digests[0] if digests[0][fqn] == digests[1][fqn]} == kept


def test_tokenizer_of_an_adapter_that_is_not_the_model_s_is_noted(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    for name, text in (("tokenizer.json", "{}"), ("tokenizer_config.json", "{}")):
        (base / name).write_text(text)
        (adapter / name).write_text(text)
    (adapter / "vocab.json").write_text("{}")
    run("merge", base, adapter, "--out", tmp_path / "same")
    assert caplog.messages == []
    (adapter / "tokenizer_config.json").write_text("[]")
    (adapter / "chat_template.jinja").write_text("a template")
    (adapter / "README.md").write_text("a card")
    for command in (("merge", base, adapter), ("pack", base, "--layout", "pp=2", "--adapter", adapter)):
        caplog.clear()
        run(*command, "--out", tmp_path / command[0])
        (note,) = caplog.messages
        assert f" {adapter} was trained with its own chat_template.jinja and tokenizer_config.json, " in note
        assert (tmp_path / command[0] / "tokenizer_config.json").read_text() == "{}"


def test_modules_that_were_saved_as_a_whole_replace_those_of_the_model(base: Path, tmp_path: Path) -> None:
    head = float32((40, 16), 7)
    write_adapter(
        tmp_path / "adapter", {**adapter_tensors(), f"{PREFIX}lm_head.weight": head}, modules_to_save=["lm_head"]
    )
    run("merge", base, tmp_path / "adapter", "--out", tmp_path / "out")
    assert all_tensors(tmp_path / "out")["lm_head.weight"] == head


def test_saved_modules_are_those_whose_names_end_as_peft_compares_them(base: Path, tmp_path: Path) -> None:
    norms = {"model.norm.weight", "model.layers.2.input_layernorm.weight"}
    saved = {f"{PREFIX}{name}": float32((16,), number) for number, name in enumerate(sorted(norms))}
    write_adapter(tmp_path / "adapter", {**adapter_tensors(), **saved}, modules_to_save=["norm"])
    run("merge", base, tmp_path / "adapter", "--out", tmp_path / "out")
    merged = all_tensors(tmp_path / "out")
    assert {name: merged[name] for name in norms} == {name: saved[f"{PREFIX}{name}"] for name in norms}


def test_ranks_alphas_and_rslora_scale_each_module(base: Path, tmp_path: Path) -> None:
    tensors = {**adapter_tensors((Q,), rank=4), **adapter_tensors(MODULES[1:])}
    write_adapter(tmp_path / "adapter", tensors, rank_pattern={"layers.0.self_attn.q_proj": 4}, use_rslora=True,
                  alpha_pattern={"layers.3.self_attn.v_proj": 8})  # fmt: skip
    run("merge", base, tmp_path / "adapter", "--out", tmp_path / "out")
    v = "model.layers.3.self_attn.v_proj"
    exact = values_of(all_tensors(base)[f"{v}.weight"]) + 8 / 2**0.5 * product_of(tensors, v)
    assert np.array_equal(values_of(all_tensors(tmp_path / "out")[f"{v}.weight"]), exact.astype("<f4").astype(float))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"use_dora": True}, "source.adapter-kind"),
        ({"peft_type": "LOHA"}, "source.adapter-kind"),
        ({"r": 3}, "source.other-adapter"),
        *(({name: value}, "source.other-adapter") for name, value in UNSELECTED),
        ({"drop": f"{PREFIX}{Q}.lora_A.weight"}, "source.bad-adapter"),
        ({"add": (f"{PREFIX}{Q}.lora_magnitude_vector", (16,))}, "source.adapter-kind"),
        ({"add": (f"{PREFIX}lm_head.weight", (40, 16))}, "source.other-adapter"),
        ({"add": (f"{PREFIX}lm_head.weight", (41, 16)), "modules_to_save": ["lm_head"]}, "source.other-adapter"),
        ({"add": (f"{PREFIX}{Q}.lora_A.weight", (2, 8))}, "source.other-adapter"),
        ({"rename": ("layers.0.", "layers.9.")}, "source.other-adapter"),
        ({"empty": True}, "source.bad-adapter"),
        ({"missing": "adapter_config.json"}, "source.bad-adapter"),
    ],
)
def test_adapter_of_another_kind_or_model_is_refused(
    change: dict[str, Any], code: str, base: Path, tmp_path: Path
) -> None:
    tensors = adapter_tensors()
    tensors.pop(change.pop("drop", None), None)
    if added := change.pop("add", None):
        tensors[added[0]] = float32(added[1], 1)
    if renamed := change.pop("rename", None):
        tensors = {name.replace(*renamed): tensor for name, tensor in tensors.items()}
    if change.pop("empty", False):
        tensors = {}
    missing = change.pop("missing", None)
    adapter = write_adapter(tmp_path / "adapter", tensors, **change)
    if missing:
        (adapter / missing).unlink()
    refused = refusal("merge", base, adapter, "--out", tmp_path / "out")
    assert refused.found[:2] == (3, code)
    assert not list(tmp_path.glob("*out*"))


def test_adapter_of_other_weights_of_the_same_shape_is_refused(base: Path, tmp_path: Path) -> None:
    packed = pack(base, tmp_path / "packed")
    digests = digests_in(packed)
    right, wrong = (digest_of_base((f"{module}.weight", digests[f"{module}.weight"] + end) for module in MODULES)
                    for end in ("", "0"))  # fmt: skip
    assert right is not None
    assert wrong is not None
    write_adapter(tmp_path / "right", metadata={"base_digest": right})
    write_adapter(tmp_path / "wrong", metadata={"base_digest": wrong})
    run("merge", packed, tmp_path / "right", "--out", tmp_path / "out")
    refused = refusal("merge", packed, tmp_path / "wrong", "--out", tmp_path / "no")
    assert refused.found[:2] == (3, "source.other-adapter")


def trained_on(tensors: dict[str, Tensor], num_slices: int) -> dict[str, str]:
    """Return the metadata of an adapter of `MODULES` of a model that ranks had in slices."""
    texts = {}
    for fqn in (f"{module}.weight" for module in MODULES):
        data, step = tensors[fqn].data, -(-len(tensors[fqn].data) // num_slices)
        slices = [data[begin : begin + step] for begin in range(0, len(data), step)]
        digest = blake3("".join(blake3(part).hexdigest() for part in slices).encode()).hexdigest()
        texts[fqn] = " ".join((tensors[fqn].dtype, digest, *(str(len(part)) for part in slices)))
    return {"base_tensors": json.dumps(texts)}


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("flags", [("merge",), ("pack", "--layout", "pp=2", "--adapter")])
def test_base_without_digests_or_in_slices_is_compared_as_it_is_read(
    num_slices: int, flags: tuple[str, ...], base: Path, tmp_path: Path
) -> None:
    tensors, fqn = all_tensors(base), f"{MODULES[-1]}.weight"
    last = replace(tensors[fqn], data=tensors[fqn].data[:-4] + np.float32(0.5).tobytes())
    write_model(tmp_path / "other", tensors={**tensors, fqn: last}, num_shards=2)
    adapter = write_adapter(tmp_path / "adapter", metadata=trained_on(tensors, num_slices))
    plain = write_adapter(tmp_path / "plain")
    verb, *others = flags
    for right, wrong in (
        (base, tmp_path / "other"),
        (pack(base, tmp_path / "a"), pack(tmp_path / "other", tmp_path / "b")),
    ):
        for name, of_base in (("compared", adapter), ("plain", plain)):
            run(verb, right, *others, of_base, "--out", tmp_path / f"{name}-{right.name}")
        assert all_tensors(tmp_path / f"compared-{right.name}") == all_tensors(tmp_path / f"plain-{right.name}")
        refused = refusal(verb, wrong, *others, adapter, "--out", tmp_path / "out")
        assert refused.found == (3, "source.other-adapter", str(adapter))
        assert not list(tmp_path.glob("*out*"))
    both = ("merge", base, plain, adapter, adapter, "--out")
    run(*both, tmp_path / "both")
    assert refusal(*both[:1], tmp_path / "other", *both[2:], tmp_path / "out").found[:2] == (3, "source.other-adapter")


def test_base_of_another_dtype_is_not_compared(base: Path, tmp_path: Path) -> None:
    text = trained_on(all_tensors(base), 2)["base_tensors"]
    metadata = {"base_tensors": text.replace("BF16", "F16").replace("F32", "F64")}
    run("merge", base, write_adapter(tmp_path / "adapter", metadata=metadata), "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("F32 00 4", "source.bad-adapter"),
        (["F32"], "source.bad-adapter"),
        (f"F32 {0:064}", "source.bad-adapter"),
        (f"BF16 {0:064} 0 99999", "source.other-adapter"),
    ],
)
def test_record_of_the_base_that_lies_is_refused(value: object, code: str, base: Path, tmp_path: Path) -> None:
    metadata = {"base_tensors": json.dumps({f"{Q}.weight": value})}
    adapter = write_adapter(tmp_path / "adapter", metadata=metadata)
    assert refusal("merge", base, adapter, "--out", tmp_path / "out").found[:2] == (3, code)


def test_adapter_that_was_written_anew_is_read_anew(base: Path, tmp_path: Path) -> None:
    for seed in (0, 500):
        write_adapter(tmp_path / "adapter", adapter_tensors((Q,), seed=seed))
        run("merge", base, tmp_path / "adapter", "--out", tmp_path / str(seed))
    shutil.copytree(tmp_path / "adapter", tmp_path / "copy")
    run("merge", base, tmp_path / "copy", "--out", tmp_path / "fresh")
    merged = [all_tensors(tmp_path / name) for name in ("0", "500", "fresh")]
    assert merged[0] != merged[1] == merged[2]


def test_merge_that_would_part_tied_tensors_is_refused(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = {fqn: float32(shape, number) for number, (fqn, shape) in enumerate(llama_shapes(config).items())}
    tensors["lm_head.weight"] = embedding = tensors["model.embed_tokens.weight"]
    write_model(tmp_path / "base", config, tensors)
    rows, columns = embedding.shape
    head = {f"{PREFIX}lm_head.lora_A.weight": float32((2, columns), 1),
            f"{PREFIX}lm_head.lora_B.weight": float32((rows, 2), 2)}  # fmt: skip
    write_adapter(tmp_path / "adapter", head, target_modules=["lm_head"])
    refused = refusal("merge", tmp_path / "base", tmp_path / "adapter", "--out", tmp_path / "out")
    assert refused.found[:2] == (3, "source.tied-values-differ")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("flags", [("merge",), ("pack", "--layout", "pp=2", "--adapter")])
def test_embedding_of_its_own_is_refused_where_the_head_is_tied_to_it(flags: tuple[str, ...], tmp_path: Path) -> None:
    """peft computes with the adapter's embedding and the base's head; its merge_and_unload unties the two."""
    config = llama_config(tie_word_embeddings=True)
    write_model(tmp_path / "base", config)
    embedding = {f"{PREFIX}model.embed_tokens.weight": float32((40, 16), 1)}
    write_adapter(tmp_path / "adapter", {**adapter_tensors((Q,)), **embedding}, modules_to_save=["embed_tokens"])
    verb, *others = flags
    refused = refusal(verb, tmp_path / "base", *others, tmp_path / "adapter", "--out", tmp_path / "out")
    assert refused.found == (3, "source.adapter-kind", str(tmp_path / "adapter"))


def test_head_that_peft_saved_beside_its_adapter_is_the_models_or_refused(base: Path, tmp_path: Path) -> None:
    rows, columns = (head := all_tensors(base)["lm_head.weight"]).shape
    tensors = {f"{PREFIX}lm_head.lora_A.weight": float32((2, columns), 1),
               f"{PREFIX}lm_head.lora_B.weight": float32((rows, 2), 2)}  # fmt: skip
    copy = f"{PREFIX}lm_head.base_layer.weight"
    narrow = replace(head, dtype="F16", data=np.frombuffer(head.data, "<f4").astype("<f2").tobytes())
    for name, saved in (("without", {}), ("with", {copy: head}), ("narrow", {copy: narrow})):
        write_adapter(tmp_path / name, {**tensors, **saved}, target_modules=["lm_head"])
        run("merge", base, tmp_path / name, "--out", tmp_path / f"merged-{name}")
        assert all_tensors(tmp_path / f"merged-{name}") == all_tensors(tmp_path / "merged-without")
    write_adapter(tmp_path / "other", {**tensors, copy: float32(head.shape, 3)}, target_modules=["lm_head"])
    for model, adapter in ((base, "other"), (tmp_path / "merged-with", "with")):
        refused = refusal("merge", model, tmp_path / adapter, "--out", tmp_path / "out")
        assert refused.found == (3, "source.other-adapter", str(tmp_path / adapter))


@pytest.mark.parametrize(("num_experts", "rank"), [(8, 2), (7, 2), (8, 4), (9, 2)])
def test_adapter_of_fewer_experts_or_of_another_rank_is_refused(num_experts: int, rank: int, tmp_path: Path) -> None:
    config = read_config("tiny-qwen3-moe")
    shapes = model_shape(config).tensors
    write_model(tmp_path / "base", config, {fqn: float32(shape, 1) for fqn, shape in shapes.items()})
    experts = "model.layers.0.mlp.experts"
    rows, columns = shapes[f"{experts}.0.down_proj.weight"]
    tensors = {f"{PREFIX}{experts}.lora_A.weight": float32((2 * num_experts, columns), 2),
               f"{PREFIX}{experts}.lora_B.weight": float32((rows, 2 * num_experts), 3)}  # fmt: skip
    fields = {"r": rank, "target_modules": None, "target_parameters": ["mlp.experts.down_proj"]}
    asked = (
        "merge",
        tmp_path / "base",
        write_adapter(tmp_path / "adapter", tensors, **fields),
        "--out",
        tmp_path / "out",
    )
    if (num_experts, rank) == (8, 2):
        assert json.loads(run(*asked, "--json").out)["num_merged"] == 8
    else:
        assert refusal(*asked).found == (3, "source.other-adapter", str(tmp_path / "adapter"))


def test_fan_in_fan_out_of_a_linear_module_is_passed_over(base: Path, tmp_path: Path) -> None:
    for name, flag in (("plain", False), ("fan", True)):
        write_adapter(tmp_path / name, adapter_tensors((Q,)), fan_in_fan_out=flag)
        run("merge", base, tmp_path / name, "--out", tmp_path / f"merged-{name}")
    assert all_tensors(tmp_path / "merged-fan") == all_tensors(tmp_path / "merged-plain")


def test_values_that_are_not_finite_are_refused(base: Path, tmp_path: Path) -> None:
    adapter, tensors = write_adapter(tmp_path / "adapter"), adapter_tensors()
    for weight in ("nan", "inf"):
        refused = refusal("merge", base, adapter, "--weight", weight, "--out", tmp_path / "out")
        assert refused.found == (2, "options.invalid-value", "--weight")
    for module in (Q, Q.replace("q_proj", "v_proj")):  # of bfloat16 and of float32
        values = np.frombuffer(tensors[name := f"{PREFIX}{module}.lora_A.weight"].data, "<f4").copy()
        values[3] = np.nan
        write_adapter(tmp_path / "nan", {**tensors, name: replace(tensors[name], data=values.tobytes())})
        refused = refusal("merge", base, tmp_path / "nan", "--out", tmp_path / "out")
        assert refused.found[:2] == (3, "source.would-overflow")
    assert not list(tmp_path.glob("*out*"))


def test_weights_and_adapters_must_be_as_many(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    refused = refusal("merge", base, adapter, "--weight", "1", "--weight", "2", "--out", tmp_path / "out")
    assert refused.found == (2, "options.conflict", "--weight")


def at(dtype: str, values: Any) -> TensorAt:
    data = values.tobytes()
    return TensorAt(dtype, dtype, values.shape, MemoryFile("f", data, dtype), 0, len(data))


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {fqn: tensor for path in sorted(folder.glob("*.safetensors"))
            for fqn, tensor in read_safetensors(path.read_bytes()).items()}  # fmt: skip


def digests_in(packed: Path) -> dict[str, str]:
    from reshard.formats.open import open_source

    return {fqn: tensor.digest or "" for fqn, tensor in open_source(str(packed)).tensors.items()}
