"""Documents come out of files whole, in order, and with errors that name file and line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from manifests.errors import InputError
from manifests.schema import SourcePosition
from runner.config.schema import DataOptions
from runner.data.documents import open_sources
from runner.data.files import Document, find_files, line_offsets, read_documents
from runner.data.rows import Fields
from runner.distributed.fail_together import exhausted


def text_of(document: Document) -> str:
    return "".join(piece for _, piece in document.pieces)


def texts(*files: Path, field: str = "text") -> list[str]:
    return [text_of(document) for file in files for document in read_documents(file, Fields(field))]


def refusal(file: Path) -> InputError:
    with pytest.raises(InputError) as error:
        texts(file)
    return error.value


def code_and_place(file: Path) -> tuple[str, str]:
    error = refusal(file)
    return error.code, error.where


LINES = st.text(st.characters(codec="utf-8", exclude_characters="\ufeff"), max_size=40)


@given(lines=st.lists(LINES), repeats=st.integers(1, 4000))
def test_pieces_of_a_text_file_are_the_text_and_end_at_line_ends(
    lines: list[str], repeats: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = "\n".join(lines * repeats)
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_bytes(text.encode())
    documents = list(read_documents(file, Fields("text")))
    pieces = [piece for document in documents for _, piece in document.pieces]
    assert len(documents) == (1 if text else 0)
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert all(len(piece.encode()) <= (64 << 10) + 200 for piece in pieces)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_pieces_of_a_long_document_are_its_text_and_of_bounded_length(suffix: str, tmp_path: Path) -> None:
    text, file = "\n".join(("wörter " * 100_000, "x" * 600_000, "語 " * 10)), tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        file.write_text("\n".join(json.dumps({"text": each}) for each in (text, "short")))
    else:
        parquet.write_table(pyarrow.table({"text": [text, "short"]}), file)
    long, short = read_documents(file, Fields("text"))
    pieces = list(long.pieces)
    assert ("".join(piece for _, piece in pieces), text_of(short)) == (text, "short")
    assert {offset for offset, _ in pieces} == {0}
    assert max(len(piece) for _, piece in pieces) <= 256 << 10
    assert pieces[0][1].endswith("wörter")  # a tokenizer puts the space to the word after it


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_document_too_long_for_memory_is_refused_and_the_next_one_is_read(suffix: str, tmp_path: Path) -> None:
    file, long = tmp_path / f"a{suffix}", "x" * (65 << 20)
    if suffix == ".jsonl":
        file.write_text(f'{{"text": "{long}"}}\n{{"text": "next"}}\n')
        assert list(line_offsets(file)) == [0, len(long) + 13]
    else:
        parquet.write_table(pyarrow.table({"text": [long, "next"]}), file)
    first, second = read_documents(file, Fields("text"))
    with pytest.raises(InputError) as error:
        text_of(first)
    assert (error.value.code, error.value.where) == (
        "data.too-long",
        f"{file}:1" if suffix == ".jsonl" else f"{file}: row 1",
    )
    assert text_of(second) == "next"


@pytest.mark.parametrize("character", ["é", "語", "😀", "a"])
def test_line_without_end_is_cut_between_characters_and_read_from_any_cut_on(character: str, tmp_path: Path) -> None:
    text = "x" + character * 200_001
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    (document,) = read_documents(file, Fields("text"))
    pieces = list(document.pieces)
    assert len(pieces) > 1
    assert "".join(piece for _, piece in pieces) == text
    for number, (offset, _) in enumerate(pieces):
        (rest,) = read_documents(file, Fields("text"), offset)
        assert list(rest.pieces) == pieces[number:]
        assert rest.is_rest == (number > 0)


def test_documents_are_read_from_the_end_of_any_other_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n" + '{"text": "one"}\n \n{"text": "two"}\n{"text": "three"}')
    texts = ["one", "two", "three"] * 50
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "b.parquet", row_group_size=40)
    for file in find_files([str(tmp_path)]):
        every = [(each.where, each.begin, each.end, text_of(each)) for each in read_documents(file, Fields("text"))]
        for number, (_, _, end, _) in enumerate(every):
            rest = [
                (each.where, each.begin, each.end, text_of(each)) for each in read_documents(file, Fields("text"), end)
            ]
            assert rest == every[number + 1 :]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("none.txt", "data.no-files"),
        ("*.jsonl", "data.no-files"),
        ("empty", "data.no-files"),
        ("a.md", "data.unknown-format"),
        ("*.md", "data.unknown-format"),
    ],
)
def test_source_without_text_files_is_refused(
    source: str, code: str, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.md").touch()
    with pytest.raises(InputError) as error:
        find_files([str(tmp_path / source)])
    shown = "a.md" if source == "*.md" else source
    assert (error.value.where, error.value.code) == (str(tmp_path / shown), code)
    if source != "*.md":
        wording(str(error.value))


def test_folders_are_searched_once_where_globs_and_links_lead_to_them(tmp_path: Path) -> None:
    place, outside = tmp_path / "place", tmp_path / "outside"
    for file in (place / "a.txt", place / "b" / "c.txt", outside / "d.txt", outside / "e" / "f.txt"):
        file.parent.mkdir(exist_ok=True, parents=True)
        file.touch()
    for link, target in (("a", "b"), ("g", outside / "e"), ("h", outside), ("i", outside)):
        (place / link).symlink_to(target)
    expected = [place / name for name in ("a.txt", "b/c.txt", "g/f.txt", "h/d.txt")]
    assert list(find_files([str(place)])) == list(find_files([str(place / "*")])) == expected
    for link in (place / "b" / "up", outside / "back"):
        link.symlink_to(place)
    assert list(find_files([str(place)])) == expected
    for link in ("a", "b/up", "g", "h", "i"):
        (place / link).unlink()
    assert list(find_files([str(place / "**")])) == expected[:2]


def test_hidden_files_of_a_folder_are_left_out_and_compressed_ones_refused(tmp_path: Path) -> None:
    for name in (
        "a.jsonl",
        ".b.jsonl",
        ".ipynb_checkpoints/a-checkpoint.jsonl",
        "a.jsonl.gz",
        "logs.gz",
        "more/c.md.gz",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_files([str(tmp_path)]) == (tmp_path / "a.jsonl",)
    assert find_files([str(tmp_path / ".b.jsonl")]) == (tmp_path / ".b.jsonl",)
    (tmp_path / "more" / "d.jsonl.zst").touch()
    with pytest.raises(InputError) as error:
        find_files([str(tmp_path)])
    assert (error.value.code, error.value.where) == ("data.unknown-format", str(tmp_path / "more" / "d.jsonl.zst"))


@pytest.mark.parametrize("source", ["", "*", "a.txt"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_link_to_nothing_and_pipe_are_refused_where_a_text_is_expected(
    kind: str, source: str, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    (tmp_path / "b.txt").touch()
    file = tmp_path / "a.txt"
    if kind == "link":
        file.symlink_to("nothing")
    else:
        os.mkfifo(file)
    with pytest.raises(InputError) as error:
        find_files([str(tmp_path / source)])
    assert (error.value.code, error.value.where) == ("data.unreadable", str(file))
    if source == "a.txt" and kind == "link":
        wording(str(error.value))


def test_folder_that_cannot_be_read_is_named() -> None:
    """As somebody else than root, who may read all."""
    with TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        Path(place, "a.txt").touch()
        (folder := Path(place, "b")).mkdir(mode=0)
        os.seteuid(os.geteuid() or 65534)
        try:
            with pytest.raises(InputError) as error:
                find_files([place])
        finally:
            os.seteuid(os.getuid())
        assert (error.value.code, error.value.where) == ("data.unreadable", str(folder))


def test_bad_parquet_is_named(tmp_path: Path, wording: Callable[[str], None]) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1 no")
    assert code_and_place(file) == ("data.not-parquet", str(file))
    for columns, code, place in (
        ({"id": [1], "body": ["x"]}, "data.no-column", ""),
        ({"text": [1]}, "data.no-column", ""),
        ({"text": ["a", None]}, "data.no-text", ": row 2"),
        ({"text": pyarrow.array(["a"]).dictionary_encode()}, "data.no-column", ""),
    ):
        parquet.write_table(pyarrow.table(columns), file)
        error = refusal(file)
        assert (error.code, error.where) == (code, f"{file}{place}")
        wording(str(error))


@pytest.mark.parametrize("shuffle", [False, True])
def test_parquet_whose_page_differs_from_its_checksum_is_refused(shuffle: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"number {number}" for number in range(90)]})
    parquet.write_table(table, file, use_dictionary=False, compression="none", write_page_checksum=True)
    (source,) = open_sources(DataOptions(sources=(str(file),), shuffle=shuffle))
    begin = SourcePosition(epoch=0, item=0, offset=0)
    assert len({text_of(placed.document) for placed in source.read(begin)}) == 90
    file.write_bytes(file.read_bytes().replace(b"number 45", b"number 55"))
    with pytest.raises(InputError) as error:
        [text_of(placed.document) for placed in source.read(begin)]
    assert (error.value.code, error.value.where) == ("data.not-parquet", str(file))


@pytest.mark.parametrize("shuffle", [False, True])
def test_parquet_of_string_views_is_text(shuffle: bool, tmp_path: Path) -> None:
    """As Polars and DataFusion write it."""
    written = ["short", "longer than the twelve bytes that a view has itself"]
    parquet.write_table(pyarrow.table({"text": pyarrow.array(written, pyarrow.string_view())}), tmp_path / "a.parquet")
    (source,) = open_sources(DataOptions(sources=(str(tmp_path),), shuffle=shuffle))
    placed = source.read(SourcePosition(epoch=0, item=0, offset=0))
    assert {text_of(each.document) for each in placed} == {*written}


def test_parquet_for_which_memory_is_too_small_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise pyarrow.ArrowMemoryError("malloc of size 128 failed")

    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", fail)
    (source,) = open_sources(DataOptions(sources=(str(tmp_path),), shuffle=True))
    with pytest.raises(MemoryError) as error:
        list(source.read(SourcePosition(epoch=0, item=0, offset=0)))
    refused = exhausted(error.value)
    assert refused is not None
    assert refused.code == "system.out-of-memory"


@pytest.mark.parametrize("group_size", [4, 8])
def test_parquet_whose_row_groups_change_while_it_is_read_is_refused(
    group_size: int, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    file = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"number {number}" for number in range(24)]})
    parquet.write_table(table, file, row_group_size=6)
    (source,) = open_sources(DataOptions(sources=(str(file),), shuffle=True, seed=1))
    begin = SourcePosition(epoch=0, item=0, offset=0)
    assert len(list(source.read(begin))) == 6
    parquet.write_table(table, file, row_group_size=group_size)
    with pytest.raises(InputError) as error:
        list(source.read(begin))
    assert (error.value.code, error.value.where) == ("data.not-parquet", str(file))
    wording(str(error.value))
