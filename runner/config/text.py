"""How texts, or rows of token ids, become sequences: flags of training and of evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from runner.config.declared import flag, group


@dataclass(frozen=True, kw_only=True, slots=True)
class FramingOptions:
    """Whether BOS and EOS are added to a text; None: as the tokenizer does, but every document ends with EOS."""

    bos: bool | None = flag(
        "--add-bos-token/--no-add-bos-token", default=None, show_default="as the tokenizer does",
        help="Begin every document with the BOS token.",
    )  # fmt: skip
    eos: bool | None = flag(
        "--add-eos-token/--no-add-eos-token", default=None, show_default="add",
        help="End every document with the EOS token.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """How texts, or rows of token ids, are read and become sequences: for training and evaluation alike."""

    text_field: str = flag("--text-field", default="text", help="JSON field or Parquet column of the text.")
    completion_field: str | None = flag(
        "--completion-field", default=None, metavar="NAME", show_default="the whole text counts",
        help="Field or column of a completion, whose tokens alone count in the loss; --text-field is its prompt.",
    )  # fmt: skip
    is_tokenized: bool = flag(
        "--tokenized", "is_tokenized", is_flag=True, default=False,
        help="The data is rows of token ids, one per sequence: input_ids, and labels or a loss_mask; position_ids or "
        "document_ids with --document-mask.",
    )  # fmt: skip
    pack: bool = flag(
        "--packing/--no-packing", "pack", default=True,
        help="Pack documents end to end into sequences, or truncate and pad one document per sequence.",
    )  # fmt: skip
    document_mask: bool = flag(
        "--document-mask/--no-document-mask", default=False,
        help="Keep packed documents apart: tokens attend within their document, whose positions begin at 0.",
    )  # fmt: skip
    framing: FramingOptions = group(FramingOptions, default=FramingOptions())
    skip_bad_documents: bool = flag(
        "--skip-bad-documents", is_flag=True, default=False,
        help="Skip and count documents that are not text (invalid UTF-8 or JSON, no text field) instead of failing.",
    )  # fmt: skip
