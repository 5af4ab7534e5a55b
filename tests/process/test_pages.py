"""The commands of README and docs, run page by page as a reader would, on small models and servers on loopback."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.builders import files_in, llama_config, random_tensors, reshard, write_model
from tests.fast.trained import write_trained
from tests.pages import NOT_RUN, ROOT, RUN, blocks_of, run_blocks, search_path
from tests.process.runner.models.test_own_models import imported
from tests.servers.hub import MEMBER, serve_hub
from tests.servers.s3 import MotoServer

pytestmark = pytest.mark.timeout(600)

SOURCE = "Llama-3.2-1B"
CONFIGS = ROOT / "tests" / "data" / "configs"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the demo's model, its text and a pack in two stages, once for all pages."""
    place = tmp_path_factory.mktemp("demo")
    imported(ROOT / "demo" / "make_model.py").main(place)
    (place / "model").rename(place / SOURCE)
    pack(place / SOURCE, "pp=2", place / "pp2")
    return place


def pack(source: Path, layout: str, out: Path | str) -> None:
    ended = reshard("pack", source, "--layout", layout, "--out", out)
    assert ended.code == 0, ended.err


# What a page's reader has, by the names of `Run.needs`


@pytest.fixture
def model(demo: Path, tmp_path: Path) -> None:
    for name in (SOURCE, "text"):
        shutil.copytree(demo / name, tmp_path / name)
    lines = (demo / "text" / "eval.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "held-out.jsonl").write_text("".join(lines[:3]))


@pytest.fixture
def pp2(demo: Path, tmp_path: Path) -> None:
    for name in ("pp2", f"{SOURCE}-pp2", "packed"):
        shutil.copytree(demo / "pp2", tmp_path / name)


@pytest.fixture
def tiny_model(tmp_path: Path) -> None:
    write_model(tmp_path / SOURCE, llama_config(tie_word_embeddings=True))
    pack(tmp_path / SOURCE, "pp=2", tmp_path / f"{SOURCE}-pp2")


@pytest.fixture
def configs(tmp_path: Path) -> None:
    """Return what is planned from a config alone, and a layout file for it."""
    shutil.copy(CONFIGS / "deepseek-v3.json", tmp_path)
    shutil.copy(CONFIGS / "llama-3.1-70b.json", tmp_path / "config.json")
    reshard("plan", tmp_path / "deepseek-v3.json", "--layout", "pp=4", "--write", tmp_path / "stages.toml")


@pytest.fixture
def last_run(tmp_path: Path, pp2: None) -> None:
    runner = Path(sys.executable).parent / "runner"
    flags = ("--data", "synthetic", "--steps", "2", "--seq-len", "16", "--global-batch", "2")
    subprocess.run([runner, "launch", "./pp2", "--", *flags], cwd=tmp_path, check=True, timeout=120)


@pytest.fixture
def cluster(tmp_path: Path, moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "Llama-3.1-405B"
    config = llama_config(num_hidden_layers=16, num_key_value_heads=4, max_position_embeddings=4096)
    for folder in (source, tmp_path / "data" / source.name):
        write_model(folder, config)
    for out in (tmp_path / "data" / "70B-pp4", "s3://checkpoints/70B-pp4"):
        pack(source, "pp=4,vpp=4", out)
    shutil.copytree(tmp_path / "text", tmp_path / "data" / "text")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


@pytest.fixture
def own_model(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True, architectures=["MyForCausalLM"], model_type="mine")
    tensors = random_tensors(config)
    del config["tie_word_embeddings"]
    write_model(tmp_path / "my-model", config, tensors)


@pytest.fixture
def trained(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    write_trained(tmp_path / "run", "pp=2").rename(tmp_path / "checkpoints" / "step-000100")


@pytest.fixture
def hub(tmp_path: Path, tiny_model: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with serve_hub() as hub:
        hub.push("meta-llama/Llama-3.2-1B", files_in(tmp_path / SOURCE))
        place = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": MEMBER}
        # Servers of Xet are not on loopback.
        for name, value in {**place, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        yield
        assert set(hub.files("my-org/Llama-3.2-1B-pp2")) >= {"manifest.json", "README.md"}
        assert "stage-000/exp_avg/model.safetensors" in hub.files("my-org/run", "step-100")


@pytest.fixture
def torchtitan(tmp_path: Path, tiny_model: None) -> None:
    step, source = tmp_path / "outputs" / "checkpoint" / "step-1000", tmp_path / "models" / "Llama-3.1-8B"
    titan = ("--to", "dcp", "--for", "torchtitan", "--out", step)
    assert reshard("export", tmp_path / f"{SOURCE}-pp2", *titan).code == 0
    shutil.copytree(tmp_path / SOURCE, source)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if run.trains else []) for page, run in RUN.items()]
)
def test_blocks_of_a_page_do_what_it_says(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run = RUN[page]
    for need in run.needs:
        request.getfixturevalue(need)
    run_blocks((ROOT / page).read_text(), tmp_path, run, NOT_RUN.get(page, ()))
    for check in CHECKS.get(page, ()):
        check(tmp_path)


def loads(*names: str) -> Callable[[Path], None]:
    def check(folder: Path) -> None:
        from transformers import AutoModelForCausalLM  # slow to import, and most pages do without

        for name in names:
            AutoModelForCausalLM.from_pretrained(folder / name)

    return check


def has_report(folder: Path) -> None:
    assert (folder / "build/start/report.html").stat().st_size > 10_000


# What a page's commands leave, beyond that they end well.
CHECKS: Mapping[str, tuple[Callable[[Path], None], ...]] = {
    "README.md": (loads("build/try/trained", "build/try/exported"),),
    "docs/checkpoints.md": (loads("hf"),),
    "docs/start.md": (loads("build/start/trained", "build/start/exported"), has_report),
}


@pytest.mark.slow
def test_example_of_the_demo_prints_what_it_shows_until_it_trains(demo: Path, tmp_path: Path) -> None:
    """Sizes are the same on every machine; losses and times, which follow, are not."""
    (shown,) = (block.text for block in blocks_of((ROOT / "docs/demo.md").read_text()) if block.text.startswith("$ "))
    shutil.copytree(demo / SOURCE, tmp_path / "build" / "demo" / "model")
    for part in shown.split("$ runner launch")[0].split("$ ")[1:]:
        command, *lines = (line for line in part.splitlines() if line.strip("… "))
        ended = subprocess.run(
            shlex.split(command), cwd=tmp_path, env={**os.environ, "PATH": search_path()}, capture_output=True,
            text=True, timeout=60, check=True,
        )  # fmt: skip
        assert [line for line in lines if line not in ended.stdout.splitlines()] == []
