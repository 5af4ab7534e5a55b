"""Every command block of README and docs is run by a test, or listed with the reason why not."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from manifests.models import ARCHITECTURES
from manifests.models.catalogue import catalogued
from manifests.models.trainable import _SUPPORTED, is_generic
from manifests.schema import Manifest, TrainingState
from tests.builders import llama_config, pack, write_model
from tests.builders import reshard as command
from tests.pages import NOT_RUN, OUTPUT, PAGES, ROOT, RUN, SECTIONS_OF, blocks_of, missing_lines
from tools.site import ROW, plain_pipes


def test_every_block_is_run_or_listed() -> None:
    known = {*RUN, SECTIONS_OF}
    left = {
        (page, block.text.splitlines()[0])
        for page in PAGES
        if page not in known
        for block in blocks_of((ROOT / page).read_text())
        if not block.named_in(NOT_RUN.get(page, ()))
    }
    assert left == set()


def test_every_section_of_another_trainer_is_run() -> None:
    sections = (ROOT / SECTIONS_OF).read_text().split("\n## ")
    with_blocks = {section.splitlines()[0] for section in sections if [*blocks_of(section)]}
    test = (ROOT / "tests" / "process" / "test_coming_from.py").read_text()
    assert with_blocks == {*re.findall(r'run_section\("([^"]+)"', test)}


@pytest.mark.parametrize("page", sorted({*RUN, *NOT_RUN}))
def test_what_is_said_of_a_page_is_of_one_block_that_it_has(page: str) -> None:
    blocks = [*blocks_of((ROOT / page).read_text())]
    run = RUN.get(page)
    names = [
        *NOT_RUN.get(page, ()),
        *(run.files if run else ()),
        *(run.codes if run else ()),
    ]
    assert {name: n for name in names if (n := sum(block.named_in([name]) is not None for block in blocks)) != 1} == {}
    text = "".join(block.text for block in blocks)
    assert [pattern for pattern in (run.instead if run else ()) if not re.search(pattern, text, re.MULTILINE)] == []


@pytest.mark.parametrize("page", PAGES)
def test_blocks_paste_as_they_are(page: str) -> None:
    """Lines fit a column of the site, and what is said beside a command is a comment."""
    lines = [
        line
        for block in blocks_of((ROOT / page).read_text())
        if block.language != OUTPUT
        for line in block.text.splitlines()
    ]
    assert [line for line in lines if len(line) > 76] == []
    assert [line for line in lines if re.search(r"\S {3,}[^#\s]|^\$ ", line)] == []


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ("a\n…\nc 1.5 MiB\n", "a\nb\nc 1.5 MiB\n", []),
        ("step 1  loss 8.37  1,112 tokens/s\n", "step 1  loss 8.4  9 tokens/s\n", []),
        ("node …: killed\n", "node n7: killed\n", []),
        ("18.03 MiB\n", "18.04 MiB\n", ["18.03 MiB"]),
        ("b\na\n", "a\nb\n", ["a"]),
        ("step 1  loss 8.37\n", "step 1  lr 8.37\n", ["step 1  loss 8.37"]),
    ],
)
def test_output_that_a_command_does_not_print_is_found(shown: str, printed: str, missing: list[str]) -> None:
    assert missing_lines(shown, printed) == missing


def test_a_block_that_is_new_is_found() -> None:
    indented, fenced = "    reshard new\n      --flag\n\n    reshard another\n", "```bash\nreshard third\n```\n"
    found = blocks_of(f"Text\n\n{indented}\n{fenced}\n```mermaid\ngraph\n```\n")
    assert [block.text for block in found] == ["reshard new\n  --flag\n\nreshard another\n", "reshard third\n"]


def first_cells(page: str) -> set[str]:
    """Return the code in the first column of a page's tables."""
    rows = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_reason_to_refuse_a_resume_has_a_row() -> None:
    codes = tomllib.loads((ROOT / "docs" / "errors" / "resume.toml").read_text())
    sources = [
        (ROOT / "runner" / "checkpoint" / name).read_text() for name in ("resume.py", "adapter_record.py", "seen.py")
    ]
    raised = re.findall(r'code="(checkpoint\.[a-z-]+)"', "".join(sources))
    assert first_cells("resume-failed.md") == {*(f"resume.{code}" for code in codes), *raised}


def test_every_field_of_a_manifest_has_a_row() -> None:
    fields = {field.name for kind in (Manifest, TrainingState) for field in dataclasses.fields(kind)}
    assert first_cells("manifest.md") == fields | {"format", "version", "digest"}


def test_extras_that_pages_install_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {
        extra
        for page in pages
        for found in re.findall(r"'(?:\.|reshard)\[([\w,]+)\]'", page.read_text())
        for extra in found.split(",")
    }
    assert named
    assert named <= extras


def test_listing_of_a_packed_folder_is_what_pack_writes(tmp_path: Path) -> None:
    (block,) = blocks_of((ROOT / "docs" / "folders.md").read_text())
    _, *lines = (re.split(r" {3,}", line.strip())[0] for line in block.text.splitlines())
    listed = {name for line in lines for name in line.split(", ")} - {"tokenizer", "…"}
    write_model(tmp_path / "model", llama_config(tie_word_embeddings=True))
    (tmp_path / "model" / "SHA256SUMS").write_text("")
    pack(tmp_path / "model", tmp_path / "out")
    packed = tmp_path / "out"
    found = {path.relative_to(packed).as_posix() for path in packed.rglob("*") if path.is_file()}
    assert found == {*listed, "tokenizer.json", "generation_config.json"}


@pytest.mark.parametrize(
    ("first", "flags"),
    [
        ("LlamaForCausalLM, 80 layers", "--gpus 64 --gpu-memory 80GB --global-batch 512 --seq-len 4096"),
        ("DOES NOT FIT", "--layout pp=8 --gpu-memory 80GB --dtype bf16"),
    ],
)
def test_plans_of_large_models_are_what_the_page_on_layouts_shows(first: str, flags: str) -> None:
    blocks = blocks_of((ROOT / "docs" / "layouts.md").read_text())
    (shown,) = (block.text for block in blocks if block.named_in([first]))
    done = command("plan", ROOT / "tests" / "data" / "configs" / "llama-3.1-70b.json", *flags.split())
    assert [line for line in shown.splitlines() if "…" not in line and line not in done.out.splitlines()] == []


# What the site changes in the pages of docs/.


def test_code_in_a_table_has_no_backslash_before_a_pipe() -> None:
    page = "| `Et*3\\|(t*4\\|)*6` | `a\\|b` or c\\|d |\n\n`outside\\|`\n"
    assert ROW.sub(plain_pipes, page) == "| `Et*3|(t*4|)*6` | `a|b` or c\\|d |\n\n`outside\\|`\n"


# docs/models.md says what can be packed and what each trains on: its table is the code's.


DOCUMENT = ROOT / "docs" / "models.md"


def test_table_says_what_each_architecture_trains_on() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]+ \| ([a-z ]+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    found = {name: road for names, road in rows for name in re.findall(r"`(\w+)`", names)}
    assert found == {name: "transformers" if is_generic(name) else "packs only" for name in ARCHITECTURES}


def test_fields_that_training_refuses_are_listed() -> None:
    section = DOCUMENT.read_text().partition("\n## Unsupported config fields\n")[2].partition("\nWhen training, ")[2]
    listed = {name for code in re.findall("`([^`]+)`", section) for name in re.findall(r"^[\w.]+", code)}
    assert {field for fields in _SUPPORTED.values() for field in fields} - listed == set()


def test_readme_counts_the_architectures_of_the_catalogue() -> None:
    found = re.search(
        r"(\d+) more architectures can be\s.*?and (\d+) of them train", (ROOT / "README.md").read_text(), re.S
    )
    assert found is not None
    others = [name for name in catalogued() if name not in ARCHITECTURES]
    assert tuple(map(int, found.groups())) == (len(others), sum(map(is_generic, others)))
