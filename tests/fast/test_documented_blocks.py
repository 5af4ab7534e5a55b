"""Every command block of README and docs is run by a test, or listed with the reason why not."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.builders import llama_config, pack, write_model
from tests.pages import NOT_RUN, PAGES, ROOT, RUN, SECTIONS_OF, blocks_of


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
        *(run.shown if run else ()),
        *(run.codes if run else ()),
    ]
    assert {name: n for name in names if (n := sum(block.named_in([name]) is not None for block in blocks)) != 1} == {}
    text = "".join(block.text for block in blocks)
    assert [pattern for pattern in (run.instead if run else ()) if not re.search(pattern, text, re.MULTILINE)] == []


def test_a_block_that_is_new_is_found() -> None:
    indented, fenced = "    reshard new\n      --flag\n\n    reshard another\n", "```bash\nreshard third\n```\n"
    found = blocks_of(f"Text\n\n{indented}\n{fenced}\n```mermaid\ngraph\n```\n")
    assert [block.text for block in found] == ["reshard new\n  --flag\n\nreshard another\n", "reshard third\n"]


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
