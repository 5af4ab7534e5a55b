"""What people type by mistake: each is refused before anything starts, in a few lines, with what to type instead."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from reshard.cli import main as reshard_main
from runner.cli import main as runner_main
from tests.builders import llama_config, pack, write_model
from tests.fast.reshard.transforms.adapters import write_adapter

LAUNCH = "runner launch pp2 --"
TRAIN = f"{LAUNCH} --data text.txt"
NO_HINT = ""  # the message itself says what is accepted
MISTAKES = (
    # Words of other tools.
    (f"{TRAIN} --bf16", "--bf16", "--dtype bf16"),
    (f"{TRAIN} --batch-size 8", "--batch-size", "--global-batch"),
    (f"{TRAIN} --learning-rate 1e-3", "--learning-rate", "--lr"),
    (f"{TRAIN} --epochs 3", "--epochs", "--steps"),
    (f"{TRAIN} --num_train_epochs 3", "--num_train_epochs", "--steps"),
    (f"{TRAIN} --gradient-checkpointing", "--gradient-checkpointing", "--ac"),
    (f"{TRAIN} --output-dir out", "--output-dir", "--save"),
    (f"{TRAIN} --load checkpoints/step-10", "--load", "--resume"),
    (f"{TRAIN} --load broadcast", "--load", "--loading rows or broadcast"),
    (f"{TRAIN} --micro-batch-size 2", "--micro-batch-size", "--microbatch"),
    (f"{TRAIN} --no-pack", "--no-pack", "--no-packing"),
    (f"{TRAIN} --host-memory fast", "--host-memory", "--allocator"),
    ("runner launch pp2 --bf16", "--bf16", "after --"),
    ("runner train pp2", "train", "runner launch"),
    ("runner resume pp2", "resume", "--resume auto"),
    ("runner convert pp2", "convert", "reshard export"),
    ("runner info pp2", "info", "reshard inspect"),
    ("runner verify pp2", "verify", "reshard verify"),
    ("reshard convert model", "convert", "reshard export"),
    ("reshard info model", "info", "reshard inspect"),
    ("reshard train model", "train", "runner launch"),
    ("reshard resume model", "resume", "runner launch"),
    ("reshard status log", "status", "runner status"),
    ("reshard plan model --layout pp=2 --bf16", "--bf16", "--dtype bf16"),
    ("reshard pack model --layout pp=2 --out x --overwrite", "--overwrite", "--force"),
    ("reshard pack model --layout pp=2 --out x --memory 1GB", "--memory", "--io-memory"),
    # What the commands are without.
    ("reshard plan", "SOURCE", "./Llama"),
    ("reshard plan model", "--layout", "--gpus"),
    ("reshard pack model --out x", "--layout", "pp=2"),
    ("reshard pack model --layout pp=2", "--out", "--out"),
    ("reshard plan model --layout", "--layout", "pp=2"),
    ("reshard export pp2 --out x", "--to", "--to hf"),
    ("reshard plan model --gpus 8", "--gpu-memory", "80GB"),
    ("runner launch pp2", "--data", ".jsonl"),
    ("runner launch", "MANIFEST", "manifest.json"),
    ("runner eval pp2", "--data", ".jsonl"),
    # Typing errors, and values.
    ("reshard plan model --layot pp=2", "--layot", "--layout"),
    ("reshard plan model --lay pp=2", "--lay", "--layout"),
    ("reshard pakc model", "pakc", "pack"),
    (f"{TRAIN} --learing-rate 1", "--learing-rate", "--lr"),
    (f"{TRAIN} --warmup 5", "--warmup", "--warmup-steps"),
    (f"{TRAIN} --optimizer adma", "--optimizer adma", NO_HINT),
    (f"{TRAIN} --lr fast", "--lr", "--help"),
    (f"{TRAIN} --lr -1", "--lr", "--help"),
    (f"{TRAIN} --dtype bf61", "--dtype", "bf16"),
    (f"{TRAIN} --ac ful", "--ac", NO_HINT),
    (f"{TRAIN} --schedule ZBV", "--schedule", "ZBVZeroBubble"),
    (f"{TRAIN} --tp 3", "--tp", NO_HINT),
    (f"{TRAIN} --global-batch 7 --microbatch 2", "--global-batch", "6 or 8"),
    (f"{TRAIN} --trace 5-3", "--trace", NO_HINT),
    ("reshard plan model --layout pp2", "layout", "pp=2"),
    ("reshard plan model --layout 2", "layout", "pp=2"),
    ("reshard plan model --layout pp=99", "layout", "at most"),
    ("reshard plan model --layout nowhere.toml", "nowhere.toml", ".toml"),
    ("reshard plan model --layout pp=2 --gpu-memory 80", "--gpu-memory", "80GB"),
    ("reshard plan model --layout pp=2 --hardware h100", "--hardware", "--gpus"),
    ("reshard plan model --gpus sixty --gpu-memory 80GB", "--gpus", "--help"),
    ("reshard plan model pp=2", "unexpected", "--layout pp=2"),
    ("reshard plan model --layout pp=2 --from-run nowhere", "nowhere/times.json", "--trace"),
    ("reshard export pp2 --to hugging --out x", "--to", "--help"),
    # The wrong file, folder or order.
    (f"{LAUNCH} --data empty.txt", "--data empty.txt", "empty"),
    (f"{LAUNCH} --data nowhere.txt", "nowhere.txt", "path"),
    (f"{LAUNCH} --data not-utf8.txt", "not-utf8.txt:1", "iconv"),
    (f"{LAUNCH} --data other.jsonl", "other.jsonl:1", "--text-field"),
    (f"{TRAIN} --eval-data empty.txt", "--eval-data empty.txt", "empty"),
    (f"{TRAIN} --resume nowhere", "--resume nowhere", "typos"),
    (f"{TRAIN} --resume step-10", "--resume step-10", "--checkpoint"),
    (f"{TRAIN} --keep 2", "--keep", "--checkpoint"),
    (f"{TRAIN} --lora-target q_proj", "--lora-target", "--lora-rank"),
    (f"{TRAIN} --lora-rslora", "--lora-rslora", "--lora-rank"),
    (f"{TRAIN} --lora-from nowhere --lora-alpha 8", "--lora-alpha: conflicts with --lora-from", "remove one"),
    (f"{TRAIN} --eval-every 5", "--eval-every", "--eval-data"),
    (f"{TRAIN} --save pp2", "--save pp2", "folder"),
    (f"{TRAIN} --device cuda", "--device cuda", "--device cpu"),
    (f"{TRAIN} --device gpu", "--device: expected auto, cpu or cuda", "cuda"),
    (f"{TRAIN} --ema 2", "--ema: expected from 0 to below 1", "--help"),
    (f"{TRAIN} --schedule foo", "--schedule", "hint: known schedules"),
    (f"{LAUNCH} --data synthetic --seq-len 2000000000 --device cpu", "--device cpu", "--seq-len"),
    ("runner launch pp2 --data text.txt", "--data", "after --"),
    ("runner launch pp2 -- --data text.txt --nproc-per-node 2", "--nproc-per-node", "before --"),
    ("runner launch pp2 --nproc-per-node 3 -- --data text.txt", "manifest needs 2 ranks", "pp=3"),
    ("runner launch model -- --data text.txt", "model", "reshard pack"),
    ("runner launch nowhere -- --data text.txt", "nowhere", "typos"),
    ("runner launch pp2/config.json -- --data text.txt", "pp2/config.json", "manifest.json"),
    ("runner launch pp2/model-00001-of-00002.safetensors -- --data text.txt", "pp2/model-00001", "folder"),
    ("runner report nowhere", "nowhere", "log folder"),
    ("runner status nowhere", "nowhere/job.json", "--log-dir"),
    ("reshard plan s3:/bucket/model --layout pp=2", "s3:/bucket/model", "s3://bucket/model"),
    ("reshard pack modle --layout pp=2 --out x", "modle", "folder"),
    ("reshard pack model --layout pp=2 --out pp2", "pp2", "--force"),
    ("reshard pack https://huggingface.co/o/m --layout pp=2 --out x", "https", "hf://"),
    ("reshard verify model", "model", "reshard pack"),
    ("reshard export model --to hf --out x", "model", "reshard pack"),
    ("reshard inspect text.txt", "text.txt", "folder"),
    ("reshard inspect model", "model", "reshard pack"),
    ("reshard delta log pp2", "pp2: has no versions", "reshard delta publish"),
    ("reshard pack model --layout pp=2 --out model", "--out: overlaps the source", "beside"),
    ("reshard pack lfs --layout pp=2 --out x", "lfs/model.safetensors: is a pointer of Git LFS", "git lfs pull"),
    ("reshard pack empty --layout pp=2 --out x", "empty/config.json: is empty", "download"),
    (f"{LAUNCH} --data bad.jsonl", "bad.jsonl:1", "--skip-bad-documents"),
    (f"{LAUNCH} --data hf://org/text", "hf://org/text", "download it first"),
    (f"{LAUNCH} --data text.txt,other.jsonl", "text.txt,other.jsonl", "once for each"),
    (f"{LAUNCH} --data table.csv", "table.csv", ".jsonl"),
    (f"{TRAIN} --checkpoint pp2", "--checkpoint pp2", "beside"),
    (f"{TRAIN} --log-dir text.txt", "--log-dir text.txt", "folder"),
    (f"{TRAIN} --train-only xyz", "--train-only xyz", "regular expression"),
    (f"{TRAIN} --microbatch 16", "--global-batch", "use 16"),
    (f"{TRAIN} --publish-every 2", "--publish-every", "--publish DIR"),
    ("runner launch pp2 --nnodes 2 -- --data text.txt", "--nnodes", "without a scheduler"),
    ("runner launch --job job.toml", "job.toml: lr", "[training]"),
    ("runner prove pp2 --tp 2", "--tp", "after --"),
    ("runner eval pp2 --data text.txt --out scores.csv", "--out: expected a name that ends in .parquet", NO_HINT),
    ("runner logs nowhere", "nowhere/job.json", "--log-dir"),
    # What is pasted from a page, and words in another place.
    ("reshard plan model \N{EN DASH}layout pp=2", "unexpected: \N{EN DASH}layout", "type --layout pp=2"),
    (f"{TRAIN} \N{EM DASH}steps 10", "training options: unexpected: \N{EM DASH}steps 10", "type --steps 10"),
    ("reshard plan model --layout “pp=2”", "layout", "did you mean pp=2?"),
    ("reshard plan model --layout \uff50\uff50\uff1d2", "layout", "did you mean pp=2?"),
    ("reshard plan model --layout PP=2", "layout", "did you mean pp=2?"),
    ("reshard plan model --layout pp=2,tp=2", "layout", "--tp is a flag"),
    ("reshard plan model --layout pp=2 --tp 3", "--tp: expected a divisor", NO_HINT),
    ("reshard plan model --layout pp=2 --ep 2", "--ep: expected a divisor", "--dp-shard 2"),
    ("reshard --layout pp=2 pack model", "--layout", "flags follow the command"),
    ("reshard verify pp2 model", "unexpected: model", "--against"),
    ("reshard diff pp2", "B: is required", "reshard diff A B"),
    ("reshard merge model", "ADAPTER", "PEFT"),
    ("reshard export adapter --to hf --out x", "adapter: no manifest.json", "reshard merge BASE adapter"),
    ("reshard verify adapter", "adapter: no manifest.json", "reshard merge BASE adapter"),
    ("reshard inspect adapter", "adapter: no manifest.json", "reshard merge BASE adapter"),
    ("reshard pack adapter --layout pp=2 --out x", "adapter/config.json", "reshard merge BASE adapter"),
    ("runner launch adapter -- --data text.txt", "adapter: no manifest.json", "reshard merge BASE adapter"),
    ("reshard sign pp2", "--key", "docs/signing.md"),
    ("reshard push pp2", "ORG/NAME", "my-org"),
    # Units, empty variables, and words of other launchers.
    ("reshard plan model --gpus 8 --gpu-memory 81559", "--gpu-memory", "write 81559MB"),
    ("reshard plan model --gpus 8 --gpu-memory 80 GB", "--gpu-memory", "80GB"),
    ("reshard plan model --gpus 8 --gpu-memory 80GB --efficiency 33", "--efficiency: expected more than 0", "--help"),
    ("reshard pack model --layout pp=2 --out ''", "--out: is followed by an empty value", "variable"),
    (f"{LAUNCH} --data ''", "--data: is followed by an empty value", "variable"),
    ("reshard diff pp2 ''", "pp2: is followed by an empty value", "variable"),
    (f"{TRAIN} --train-only ''", "--train-only: is followed by an empty value", "variable"),
    (f"{TRAIN} --optimizer=", "--optimizer: is followed by an empty value", "variable"),
    ("reshard verify --quiet ''", "--quiet: is followed by an empty value", "variable"),
    ("runner cancel ''", "cancel: is followed by an empty value", "variable"),
    ("reshard pack model --layout pp=2 --out x --drop lm_heda", "--drop", "did you mean lm_head?"),
    ("reshard export pp2 --to safetensors --out x", "--to", "did you mean hf?"),
    ("reshard export pp2 --to vllm --out x", "--to", "vLLM reads a packed folder as it is"),
    (f"{TRAIN} --steps 1e3", "--steps: expected a whole number", "write 1000"),
    (f"{TRAIN} --steps 1,000", "--steps: expected a whole number", "write 1000"),
    (f"{TRAIN} --resume adapter", "--resume adapter", "--lora-from adapter"),
    (f"{TRAIN} --resume latest", "--resume latest", "--resume auto"),
    (f"{TRAIN} --save-every 5", "--save-every", "--checkpoint-every"),
    (f"{TRAIN} --lr-scheduler cosine", "--lr-scheduler", "--decay"),
    (f"{TRAIN} --log-interval 5", "--log-interval", "--log-every"),
    (f"{TRAIN} --report-to wandb", "--report-to", "--wandb"),
    (f"{TRAIN} --gpus 2", "--gpus", "--nproc-per-node N, before --"),
    ("runner launch pp2 --gpus 2 -- --data text.txt", "--gpus", "--nproc-per-node"),
    ("runner launch pp2 text.txt", "unexpected: text.txt", "--data"),
    ("runner launch --job job.yaml", "job.yaml: is not TOML", "[training]"),
    ("runner start pp2", "start", "runner launch"),
    ("runner prove pp2 --against nowhere", "nowhere/step.json", "typos"),
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    write_model(folder / "model", llama_config())
    pack(folder / "model", folder / "pp2", "pp=2")
    write_adapter(folder / "adapter")
    (folder / "text.txt").write_text("some text")
    (folder / "empty.txt").touch()
    (folder / "not-utf8.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "bad.jsonl").write_text("not json\n")
    (folder / "table.csv").write_text("a,b\n")
    (folder / "job.toml").write_text("lr = 1\n")
    (folder / "job.yaml").write_text("lr: 1\n")
    for name in ("lfs", "empty"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text((folder / "model" / "config.json").read_text() * (name == "lfs"))
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{0:064}\nsize 5\n"
        (folder / name / "model.safetensors").write_text(pointer)
    (folder / "other.jsonl").write_text('{"content": "x"}\n')
    return folder


@pytest.mark.parametrize("flag", ["--save", "--checkpoint"])
def test_disk_without_room_for_the_weights_is_refused_before_ranks_start(
    flag: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096, f_blocks=10))
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.argv", shlex.split(f"{TRAIN} --device cpu {flag} out"))
    with pytest.raises(SystemExit) as ended:
        runner_main()
    assert ended.value.code == 3
    assert f"error: {flag} " in (printed := capsys.readouterr().err)
    assert "[output.disk-full]" in printed
    assert "4.00 KiB" in printed


@pytest.mark.parametrize(("typed", "where", "cure"), MISTAKES, ids=[typed for typed, _, _ in MISTAKES])
def test_mistake_is_refused_in_a_few_lines_with_its_cure(
    typed: str, where: str, cure: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("ranks start")

    monkeypatch.setattr("os.execve", start)
    monkeypatch.setattr("runner.preflight.preflight.has_gpu", lambda: False)
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.argv", words := shlex.split(typed))
    with pytest.raises(SystemExit) as ended:
        (reshard_main if words[0] == "reshard" else runner_main)()
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert ended.value.code in (2, 3)
    assert printed.out == ""
    assert len(lines) <= 6
    assert lines[0].startswith(f"error: {where}")
    hint = next((line for line in lines if line.startswith("hint: ")), "")
    assert cure in hint
    assert not (place / "runner-log").exists()
