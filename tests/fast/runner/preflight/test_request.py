"""Training requests seen as a whole: refused before any rank starts, or noted where something comes to nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from manifests.errors import CheckpointError, InputError, UserError
from runner.bundle.packed import Packed, open_packed
from runner.checkpoint.resume import Origin, remembered
from runner.commands import cli
from runner.config.flags import parse_training, recall
from runner.config.loss import BalanceOptions
from runner.preflight.combinations import balance_flags, check_balance, expert_notes
from runner.preflight.preflight import check_length, check_places, is_less_than_a_step, notes
from runner.preflight.start import read_start
from runner.rundir.records import write_run_record
from tests.builders import HEAD, edit_manifest, llama_config, pack, without_file, write_model
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.runner.models.decoders import save_decoder
from tests.fast.trained import STATE, write_trained

Wording = Callable[[str], None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, packed as `packed`, and `trained`, the same with moments after step 60."""
    place = tmp_path_factory.mktemp("requests")
    write_trained(place, "pp=2", num_hidden_layers=1)
    pack(place / "source", place / "packed")
    (place / "texts").mkdir()
    (place / "texts" / "a.txt").write_text("a text")
    return place


def refusal(place: Path, *training: str, packed: str = "packed", num_ranks: int = 2) -> UserError:
    """Return how `runner launch --dry-run` refuses these training options, with `place` as PLACE."""
    words = ["launch", f"PLACE/{packed}", "--dry-run", "--nproc-per-node", str(num_ranks), "--", *training]
    done = CliRunner().invoke(cli, [word.replace("PLACE", str(place)) for word in words])
    assert isinstance(done.exception, UserError), done.output
    error = done.exception
    return error.changed(
        where=error.where.replace(str(place), "PLACE"),
        problem=error.problem.replace(str(place), "PLACE"),
        hint=error.hint.replace(str(place), "PLACE"),
    )


EXPERTS = "Ernie4_5_MoeForCausalLM"  # whose routers stay in float32
HALF, RESUMED = ("--dtype", "bf16"), ("--resume", "auto", "--checkpoint", "PLACE/saved")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in one stage: of 4 heads, also with dynamic RoPE; of experts with routers in float32; and narrow ones."""
    place = tmp_path_factory.mktemp("shared")
    write_model(place / "llama")
    save_tiny(place / "experts", EXPERTS)
    save_decoder(place / "narrow", "tiny-opt", word_embed_proj_dim=16)
    rope = {"type": "dynamic", "factor": 2.0}
    write_model(place / "dynamic", llama_config(rope_scaling=rope, max_position_embeddings=16))
    for name in ("llama", "dynamic", "experts", "narrow"):
        pack(place / name, place / f"{name}-packed", "pp=1")
    return place


@pytest.mark.parametrize(
    ("model", "num_ranks", "flags", "where", "code"),
    [
        ("llama", 2, ("--ep", "2", "--dp-shard", "2"), "--ep", "options.ep-architecture"),
        ("experts", 3, ("--ep", "3", "--dp-shard", "3"), "--ep", "options.ep-divisor"),
        ("llama", 3, ("--cp", "3", "--cp-method", "ulysses", "--seq-len", "24"), "--cp", "options.cp-divisor"),
        ("llama", 2, ("--cp", "2", "--seq-len", "30"), "--seq-len", "options.cp-divisor"),
        ("llama", 2, ("--cp", "2", "--compile"), "--cp", "options.cp-combination"),
        ("llama", 2, ("--cp", "2", "--compile", *RESUMED), "--cp", "options.cp-combination"),
        ("llama", 2, ("--tp", "2", "--loss-chunk", "8", *RESUMED), "--loss-chunk", "options.tp-loss-chunk"),
        ("narrow", 2, ("--cp", "2"), "--cp", "options.cp-architecture"),
        ("experts", 2, (*HALF, "--dp-shard", "2"), "--dp-shard", "options.catalogue-combination"),
        ("experts", 2, (*HALF, "--cp", "2"), "--cp", "options.catalogue-combination"),
        ("experts", 2, (*HALF, "--dp-shard", "2", "--master-dtype", "fp32", "--reduce-dtype", "bf16"), "--dp-shard",
         "options.catalogue-combination"),
        ("dynamic", 2, ("--cp", "2", "--seq-len", "20"), "--cp", "options.cp-architecture"),
    ],
)  # fmt: skip
def test_degrees_that_a_model_cannot_have_are_refused_before_ranks_start(
    model: str, num_ranks: int, flags: tuple[str, ...], where: str, code: str, shared: Path, wording: Wording
) -> None:
    error = refusal(shared, "--data", "synthetic", *flags, packed=f"{model}-packed", num_ranks=num_ranks)
    assert (error.where, error.code) == (where, code)
    if code == "options.catalogue-combination":
        wording(str(error))


@pytest.mark.parametrize(
    ("architecture", "flags", "where"),
    [
        ("LlamaForCausalLM", {"bias_rate": 0.1}, "--router-bias-rate"),
        ("LlamaForCausalLM", {"aux_loss": 0.1}, "--router-aux-loss"),
        ("MixtralForCausalLM", {"bias_rate": 0.1}, "--router-bias-rate"),
        ("DeepseekV3ForCausalLM", {"aux_loss": 0.1}, "--router-aux-loss"),  # sigmoid, by groups, and biased
        ("Glm4MoeForCausalLM", {"aux_loss": 0.1}, "--router-aux-loss"),
        ("HunYuanMoEV1ForCausalLM", {"aux_loss": 0.1}, "--router-aux-loss"),
        ("MiniMaxM2ForCausalLM", {"bias_rate": 0.1}, "--router-bias-rate"),  # in bfloat16
    ],
)
def test_what_cannot_balance_experts_is_refused_by_architecture(
    architecture: str, flags: dict[str, float], where: str, place: Path, wording: Wording
) -> None:
    options = replace(parse_training(["--data", "synthetic", *HALF]), balance=BalanceOptions(**flags))
    with pytest.raises(UserError) as error:
        check_balance(with_experts(place, architecture), options)
    assert (error.value.code, error.value.where) == ("options.router", where)
    wording(str(error.value))


def with_experts(place: Path, architecture: str) -> Packed:
    """Return a packed model that says to be of another architecture, with experts unless it is a Llama."""
    packed = open_packed(place / "packed")
    experts = {} if architecture == "LlamaForCausalLM" else {"model.layers.0.mlp.experts.0.up_proj.weight": (1, 1)}
    shape = replace(packed.shape, architecture=architecture, tensors={**packed.shape.tensors, **experts})
    return replace(packed, shape=shape)


def test_flag_that_balances_experts_is_refused_before_ranks_start(place: Path) -> None:
    error = refusal(place, "--data", "synthetic", "--router-bias-rate", "0.1", "--resume", "auto", "--checkpoint", "x")
    assert (error.code, error.where) == ("options.router", "--router-bias-rate")


@pytest.mark.parametrize("flags", [("--dp-shard", "2", "--master-dtype", "fp32"), ("--dp-replicate", "2")])
def test_parameters_kept_in_float32_train_beside_bfloat16(flags: tuple[str, ...], shared: Path) -> None:
    words = ["launch", str(shared / "experts-packed"), "--dry-run", "--nproc-per-node", "2", "--"]
    assert CliRunner().invoke(cli, [*words, "--data", "synthetic", *HALF, *flags]).exit_code == 0


@pytest.mark.parametrize("flag", ["--log-dir", "--checkpoint", "--save", "--publish"])
@pytest.mark.parametrize("data", [("--data", "PLACE/texts"), ("--data", "synthetic", "--eval-data", "PLACE/texts/.")])
def test_run_does_not_write_where_it_reads(place: Path, flag: str, data: tuple[str, ...], wording: Wording) -> None:
    apart = () if flag == "--log-dir" else ("--log-dir", "PLACE/log")
    error = refusal(place, *data, *apart, flag, "PLACE/texts/x/../below")
    assert (error.code, error.where) == ("output.inside-data", f"{flag} PLACE/texts/x/../below")
    if flag == "--save" and "synthetic" not in data:
        wording(str(error))


def test_working_folder_is_no_data_where_the_log_goes_by_default(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place / "texts")
    assert refusal(place, "--data", ".").where.startswith("--log-dir runner-log/")
    assert refusal(place, "--data", "../text*").where.startswith("--log-dir runner-log/")


def test_working_folder_may_be_the_data_of_a_dataset_that_reads_it_by_itself(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place / "texts")
    check_places(parse_training(["--data", ".", "--data-class", "rows", "--log-dir", "log"]))


def test_checkpoints_are_not_saved_below_a_file(place: Path) -> None:
    error = refusal(place, "--data", "synthetic", "--checkpoint", "PLACE/texts/a.txt")
    assert (error.code, error.where) == ("output.not-a-folder", "--checkpoint PLACE/texts/a.txt")


@pytest.mark.parametrize("data", [("--data", "PLACE/texts"), ("--data", "synthetic", "--eval-data", "PLACE/texts")])
def test_texts_need_a_tokenizer(place: Path, data: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with without_file(place / "packed", "tokenizer.json"):
        assert refusal(place, *data).where == "PLACE/packed/tokenizer.json"


@pytest.mark.parametrize(
    ("line", "flags", "code"),
    [
        (b'{"body": "a text"}', (), "data.no-text"),
        (b'{"text": 5}', (), "data.no-text"),
        (b"not json", (), "data.not-json"),
        (b'{"body": "a text"}', ("--text-field", "body"), ""),
        (b'{"body": "a text"}', ("--skip-bad-documents",), ""),
        (b"  ", (), ""),
        (b'{"body": "' + b"x" * (1 << 20) + b'"}', (), ""),  # left to the ranks
    ],
)
def test_first_line_without_text_is_refused_before_ranks_start(
    line: bytes, flags: tuple[str, ...], code: str, place: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(line + b'\n{"text": "a text", "body": "a text"}\n')
    error = refusal(place, "--data", str(tmp_path), *flags)
    assert error.code == (code or "tokenizer.broken")  # what is looked at next
    if code:
        assert error.where == f"{tmp_path / 'a.jsonl'}:1"
        other = refusal(place, "--data", "synthetic", "--eval-data", str(tmp_path / "a.jsonl"), *flags)
        assert (other.code, other.where) == (code, error.where)


def test_a_model_with_experts_is_noted_to_be_unbalanced(wording: Wording) -> None:
    dense = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
    assert expert_notes(dense, BalanceOptions()) == ()
    notes_of = {}
    for name in (
        "block_sparse_moe.input_linear.weight",
        "mlp.experts.gate_up_proj",
        "moe.e_score_correction_bias",
    ):
        (notes_of[name],) = expert_notes((*dense, f"model.layers.0.{name}"), BalanceOptions())
        for balance in (BalanceOptions(bias_rate=0.001), BalanceOptions(aux_loss=0.01)):
            assert expert_notes((*dense, f"model.layers.0.{name}"), balance) == ()
    wording("\n".join(sorted({*notes_of.values()})))


ADDED = ("--router-bias-rate", "0.001")


@pytest.mark.parametrize(
    ("architecture", "flags", "is_moved"),
    [
        ("DeepseekV3ForCausalLM", (), True),
        ("DeepseekV3ForCausalLM", ("--resume", "auto", "--checkpoint", "c"), True),
        ("DeepseekV3ForCausalLM", ("--router-bias-rate", "0"), False),
        ("DeepseekV3ForCausalLM", ("--lora-rank", "2"), False),
        ("DeepseekV3ForCausalLM", ("--train-only", "norm"), False),
        ("DeepseekV3ForCausalLM", ("--resume", "c", "--resume-weights-only"), False),
        ("Qwen3MoeForCausalLM", (), False),  # its routers have no biases
        ("MiniMaxM2ForCausalLM", (), False),  # in bfloat16
        ("LlamaForCausalLM", (), False),
    ],
)
def test_biases_of_new_weights_move_by_the_rate_of_deepseek_v3(
    architecture: str, flags: tuple[str, ...], is_moved: bool, place: Path
) -> None:
    launched, options = with_experts(place, architecture), parse_training(["--data", "synthetic", *flags])
    new = replace(launched.manifest, source=replace(launched.manifest.source, kind="init"))
    trained = replace(new, training=open_packed(place / "trained").manifest.training)
    added = {
        name: balance_flags(replace(launched, read=replace(launched.read, manifest=manifest)), options)
        for name, manifest in (("packed", launched.manifest), ("new", new), ("trained", trained))
    }
    assert added == {"packed": (), "new": ADDED if is_moved else (), "trained": ()}


def test_ranks_are_launched_with_the_rate_of_new_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "DeepseekV3ForCausalLM", num_hidden_layers=2)
    pack(tmp_path / "model", tmp_path / "new", "pp=1")
    edit_manifest(tmp_path / "new", lambda document: document["source"].update(kind="init"))
    words = ["launch", str(tmp_path / "new"), "--dry-run", "--quiet", "--", "--data", "synthetic"]
    for flags in ((), ("--lora-rank", "2")):
        done = CliRunner().invoke(cli, [*words, *flags])
        assert done.exit_code == 0, done.output
        assert (" ".join(ADDED) in done.stdout) == (not flags)


@pytest.mark.parametrize(("flag", "name"), [("bias_rate", "router_bias_rate"), ("aux_loss", "router_aux_loss")])
def test_a_flag_that_the_launch_before_had_is_missed(flag: str, name: str) -> None:
    tensors = ("model.layers.0.mlp.experts.0.up_proj.weight",)
    launches = [{"options": {name: value}} for value in (0.1, 0.25, 0.0)]
    (note,) = expert_notes(tensors, BalanceOptions(), {"launches": launches})
    assert note.startswith(f"--{name.replace('_', '-')} 0.25 ")
    assert expert_notes(tensors, BalanceOptions(**{flag: 0.25}), {"launches": launches}) == ()
    (unbalanced,) = expert_notes(tensors, BalanceOptions(), {"launches": [*launches, launches[-1]]})
    assert not unbalanced.startswith("--")


@pytest.mark.parametrize(
    ("weights", "flags", "noted"),
    [
        ((0.2, 0.3, 0.1), (), 0.3),
        ((0.3, 0.1), ("--mtp-loss-weight", "0.1"), None),
        ((0.1, 0.3, 0.3), ("--mtp-loss-weight", "0.3"), None),
        ((0.3, 0.1, 0.1), (), None),
    ],
)
def test_a_weight_of_mtp_layers_that_the_launch_before_had_is_missed(
    place: Path, tmp_path: Path, weights: tuple[float, ...], flags: tuple[str, ...], noted: float | None
) -> None:
    """No checkpoint recalls it, and the loss that is printed does not show it."""
    launches = [{"options": {"mtp_loss_weight": weight}} for weight in weights]
    write_run_record(tmp_path, {"id": "x", "launches": launches})
    words = ["--data", "synthetic", "--steps", "70", "--resume", str(place / "trained"), "--log-dir", str(tmp_path)]
    start = read_start(open_packed(place / "packed"), Origin(place / "trained"), parse_training([*words, *flags]))
    said = [re.findall(r"[0-9]\.[0-9]+", note) for note in start.notes if "--mtp-loss-weight" in note]
    assert said == ([] if noted is None else [[str(noted), "0.1"]])


@pytest.mark.parametrize("is_flagged", [True, False], ids=["AdamW", "groups"])
def test_eps_of_a_checkpoint_that_no_run_trains_with_is_refused_by_its_name(
    place: Path, tmp_path: Path, is_flagged: bool
) -> None:
    trained = shutil.copytree(place / "trained", tmp_path / "trained")
    group = {**STATE["optimizer"]["groups"][0], "eps": 0.0}
    groups = [group] if is_flagged else [{**group, "beta1": 0.5, "eps": 1e-8, "fqns": [HEAD]}, group]
    edit_manifest(trained, lambda document: document["training"]["optimizer"].update(groups=groups))
    words = ["--data", "synthetic", "--steps", "70", "--resume", str(trained), "--log-dir", str(tmp_path)]
    launched, origin = open_packed(place / "packed"), Origin(trained)
    with pytest.raises(CheckpointError) as error:
        read_start(launched, origin, parse_training(words))
    assert (error.value.code, error.value.where) == ("resume.small-eps", f"{trained}/manifest.json")
    flag = ["--eps", "1e-8"] if is_flagged else ["--optimizer", "adamw"]
    assert flag[0] in error.value.hint
    start = read_start(launched, origin, parse_training([*words, *flag]))
    assert start.options.optim.plan is not None
    assert {group.eps for group in start.options.optim.plan.groups} == {1e-8}


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--microbatch", "16"), "options.batch-size"),
        (("--decay", "linear", "--warmup-steps", "80"), "options.decay-too-short"),
    ],
)
def test_flags_that_agree_with_the_checkpoint_alone_are_refused_without_one(
    place: Path, tmp_path: Path, flags: tuple[str, ...], code: str
) -> None:
    """The checkpoint's global batch is 16, and its decay ends at step 90."""
    launched = open_packed(place / "packed")
    words = ["--data", "synthetic", "--steps", "70", "--log-dir", str(tmp_path)]
    asked = parse_training([*words, *flags, "--resume", str(place / "trained")])
    options = read_start(launched, Origin(place / "trained"), asked).options
    assert (options.batch.global_batch, options.optim.decay_steps) == (16, 90)
    asked = parse_training([*words, *flags, "--resume", "auto", "--checkpoint", str(tmp_path / "none")])
    with pytest.raises(UserError) as error:
        read_start(launched, Origin(place / "packed"), asked)
    assert error.value.code == code


def test_a_file_of_the_manifest_that_is_missing_is_named(place: Path) -> None:
    source = place / "packed" / "source.json"
    source.rename(source.with_suffix(".kept"))
    try:
        with pytest.raises(InputError) as error:
            open_packed(place / "packed")
    finally:
        source.with_suffix(".kept").rename(source)
    assert (error.value.code, error.value.where) == ("manifest.missing-file", str(source))


def test_sequences_are_not_longer_than_learned_positions(place: Path) -> None:
    packed = open_packed(place / "packed")
    config = {"architectures": ["GPT2LMHeadModel"], "n_positions": 64}
    learned = replace(packed, config=config, shape=replace(packed.shape, architecture="GPT2LMHeadModel"))
    check_length(learned, parse_training(["--data", "synthetic", "--seq-len", "64"]))
    with pytest.raises(UserError) as error:
        check_length(learned, parse_training(["--data", "synthetic", "--seq-len", "65"]))
    assert error.value.where == "--seq-len"


def noted(origin: Packed, *training: str, is_resumed: bool = False) -> list[str]:
    asked = parse_training(["--data", "synthetic", *training])
    state = origin.manifest.training if is_resumed else None
    options = asked if state is None else recall(asked, remembered(state))
    return notes(asked, options, state)


@pytest.mark.parametrize(
    ("training", "flag"),
    [
        ((), "--checkpoint"),
        (("--steps", "0"), ""),
        (("--checkpoint", "c"), ""),
        (("--save", "s"), ""),
        (("--save", "s", "--steps", "2", "--trace", "5"), "--trace 5"),
        (("--save", "s", "--steps", "5", "--trace", "5-9"), ""),
        (("--save", "s", "--resume", "auto", "--restart-data"), "--restart-data"),
        (("--save", "s", "--resume-weights-only", "--resume", "d"), ""),  # refused without it: resumed_state
        (("--save", "s", "--lr", "0.1", "--min-lr", "1"), "--min-lr 1.0"),
        (("--save", "s", "--decay", "cosine", "--min-lr", "1e-5"), ""),
        (("--resume", "auto", "--checkpoint", "typo"), "--resume auto: typo"),
        (("--save", "s", "--decay-steps", "9"), "--decay-steps 9"),
    ],
)  # fmt: skip
def test_flag_without_effect_is_noted(place: Path, training: tuple[str, ...], flag: str, wording: Wording) -> None:
    found = noted(open_packed(place / "packed"), *training)
    assert len(found) == bool(flag)
    for note in found:
        assert flag in note
        wording(note)


@pytest.mark.parametrize(
    ("data", "is_noted"),
    [
        (("synthetic", "--no-packing"), False),
        (("a.txt",), False),
        (("a.txt", "--no-packing"), True),
        (("a.jsonl", "--tokenized"), True),
        (("rows", "--data-class", "rows"), True),
    ],
)
def test_padding_in_the_auxiliary_loss_of_routers_is_noted(data: tuple[str, ...], is_noted: bool) -> None:
    for coef, count in (("0", 0), ("0.01", int(is_noted))):
        options = parse_training(["--save", "s", "--router-aux-loss", coef, "--data", *data])
        assert len(notes(options, options, None)) == count


@pytest.mark.parametrize(("nbytes", "is_noted"), [(2, True), (63, True), (64, False)])
def test_data_of_less_than_a_step_is_noted(tmp_path: Path, nbytes: int, is_noted: bool) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * nbytes)
    options = parse_training(["--data", str(tmp_path), "--seq-len", "8", "--global-batch", "8"])
    assert is_less_than_a_step(options.data, options.batch) == is_noted
    assert not is_less_than_a_step(replace(options.data, pack=False), options.batch)


def test_what_a_run_takes_from_its_checkpoint_is_said(place: Path, wording: Wording) -> None:
    trained = open_packed(place / "trained")
    saving = ("--save", "s", "--steps", "90", "--trace", "60")
    *before, taken = noted(trained, *saving, "--lr", "0.1", "--microbatch", "2", is_resumed=True)
    assert [note.startswith("--trace 60 ") for note in before] == [True]
    wording(taken)
    assert noted(trained, "--save", "s", "--resume-weights-only") == []
    (taken,) = noted(trained, "--steps", "60", "--trace", "60", is_resumed=True)  # it has ended, and takes no step
    assert "--max-norm 0.5" in taken


def test_what_a_checkpoint_of_another_trainer_lacks_is_said(place: Path, tmp_path: Path, wording: Wording) -> None:
    trained = shutil.copytree(place / "trained", tmp_path / "trained")
    edit_manifest(trained, lambda document: document["training"].update(data=None, learning_rate=None, dtype=None))
    found = noted(open_packed(trained), "--save", "s", "--steps", "90", is_resumed=True)
    wording("\n".join(found[:3]))
    given = ("--lr", "0.1", "--dtype", "fp32")
    assert len(noted(open_packed(trained), "--save", "s", "--steps", "90", *given, is_resumed=True)) == 2
