"""push: a packed folder or checkpoint to a repository on the Hugging Face hub, in one commit."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from manifests.codec import decode_manifest
from manifests.command.sizes import show_bytes
from manifests.errors import ManifestError, OutputError, Parameter, SourceError, StoreError, UsageError, UserError
from manifests.index import ADAPTER_NAMES, INDEX_NAME, SIGNATURE_NAME, is_consulted, is_weights
from manifests.invariants import MANIFEST_NAME
from manifests.models.config import CONFIG_NAME
from manifests.paths import is_in_stage_folder
from manifests.schema import GIT_ATTRIBUTES_NAME, MODEL_CARD_NAME, Manifest, Source
from reshard.checks.verify import VerifyOptions, verify_manifest
from reshard.formats.auxiliary import with_section, without_section
from reshard.formats.huggingface.read import is_beside
from reshard.formats.huggingface.weight_map import TORCH_INDEX_NAME, is_torch_shard
from reshard.tensors.source_index import SUFFIX
from stores.address import SCHEME, HubAddress, is_url, parse_hub_address
from stores.base import Folder, read_whole
from stores.folders.owned import files_in
from stores.hub.store import HubFolder
from stores.hub.upload import HubUpload, has_last, open_upload
from stores.local import LocalFolder
from stores.open import ReadManifest, open_manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class PushResult:
    """What the branch has now: `revision` is its commit, made now if `is_new`; `removed` files were of another model.

    `nbytes`: of all files.
    """

    repository: str
    branch: str
    revision: str
    is_new: bool
    is_private: bool
    num_files: int
    nbytes: int
    removed: tuple[str, ...]


def push(
    folder: str | Path,
    repository: str,
    *,
    revision: str | None = None,
    public: bool = False,
    message: str | None = None,
    force: bool = False,
) -> PushResult:
    """Upload a packed folder or a training checkpoint to a model repository on the Hugging Face hub, in one commit.

    The commit has everything that the manifest lists, the manifest, `manifest.sig` if there is one, and a model card:
    the repository has the whole checkpoint or nothing of it. Call it again after an interruption: files that were sent
    are not sent again. `repository` is `org/name`; it and the branch `revision` are created if they do not exist, the
    repository private unless `public`. `force` replaces another model: its files are removed in the same commit, and
    files that belong to no model are kept. `message` is the commit's. Sizes and headers are verified, not digests.

    The token is that of `HF_TOKEN` or `hf auth login`.

    Units: bytes.
    Raises:
        ManifestError: there is no manifest, it is damaged or of a virtual pack, or files are damaged or missing.
        StoreError: the name is malformed, there is no token or no write access, the repository is public and `public`
            is not set, or the hub refuses something.
        OutputError: the branch has another model and `force` is not set (`output.exists`), or another commit was made
            meanwhile (`output.contended`).
        UnreachableError: the hub cannot be reached.
        UsageError: the branch is named twice, differently.

    Example:
        >>> done = reshard.push("model-pp2", "org/model-pp2", revision="step-100")
        >>> done.repository, done.is_private
        ('hf://org/model-pp2', True)
    """
    if is_url(folder):
        hint = "copy it to one, or pack to the hub: reshard pack SOURCE --out hf://org/name"
        raise StoreError(str(folder), "is not a folder on this machine", hint, code="store.unsupported")
    address = parse_hub_address(repository if repository.startswith(SCHEME) else SCHEME + repository)
    assert address is not None, "hf:// is parsed or refused"
    if revision is not None and address.revision not in (None, revision):
        problem = f"conflicts with the branch of {repository}"
        raise UsageError(Parameter("revision"), problem, "name the branch once", code="options.conflict")
    target = HubAddress(repo=address.repo, revision=revision or address.revision)
    return push_folder(Path(folder), target, is_public=public, force=force, message=message)


def push_folder(
    folder: Path, address: HubAddress, *, is_public: bool = False, force: bool, message: str | None = None
) -> PushResult:
    """Upload a folder to an address that is parsed, as `push` does.

    Files of the repository that belong to another model (those of its manifest or, without one, what readers look for
    beside config.json; and weights and indexes that readers would mix in) are removed; others are kept.
    """
    read = open_manifest(folder)
    manifest, digest = read.manifest, read.digest
    local = _check_whole(read)
    upload = open_upload(address, is_public=is_public)
    card = _card(local, upload.head, card_section(manifest, digest, str(upload.address)), manifest)
    names = sorted(set(files_in(manifest)) - {MANIFEST_NAME, MODEL_CARD_NAME, GIT_ATTRIBUTES_NAME})
    signature = [SIGNATURE_NAME] if SIGNATURE_NAME in local.names() else []
    # The manifest last: it vouches for the others.
    paths = {name: local.path / name for name in (*names, *signature, MANIFEST_NAME)}
    content: dict[str, Path | bytes] = {MODEL_CARD_NAME: card, **paths}
    stale = _stale(upload.head, set(content))
    replaced = () if has_last(upload.head, content) else paths.keys() & upload.head.files.keys()
    _check_nothing_lost(upload, {*stale, *replaced}, force)
    revision = upload.commit(
        content,
        removed=stale,
        message=message or _message(manifest),
        before_commit=lambda: _check_same(folder, digest),
    )
    return PushResult(
        repository=f"hf://{upload.address.repo}",
        branch=upload.branch,
        revision=revision,
        is_new=revision != upload.head.revision,
        is_private=upload.head.is_private,
        num_files=len(content),
        nbytes=len(card) + sum(path.stat().st_size for path in paths.values()),
        removed=stale,
    )


def check_free(address: HubAddress, *, force: bool) -> None:
    """Open the branch that a pack will be pushed to, before hours of packing."""
    try:
        upload = open_upload(address, is_public=False)
    except StoreError as error:
        if error.code != "store.public-repository":
            raise
        name = shlex.quote(str(address).removeprefix(SCHEME))
        hint = f"pack to a folder, then reshard push DIR {name} --public; or name another repository"
        raise error.changed(hint=hint) from error
    _check_nothing_lost(upload, _stale(upload.head, set()), force)


def _check_nothing_lost(upload: HubUpload, names: Collection[str], force: bool) -> None:
    """Refuse to replace or remove files, unless `force` is set or the main branch keeps them."""
    if names and not force and not upload.is_shared:
        shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
        problem = f"has other files, which would be replaced: {shown}"
        hint = f"add {Parameter('force', True)} (the repository's history keeps them), or name another branch"
        raise OutputError(str(upload.address), problem, hint, code="output.exists")


def push_staged(folder: Path, address: HubAddress, *, force: bool) -> None:
    """Push a folder that was packed for that alone, and remove it; it stays if that fails, to be pushed from there."""
    try:
        push_folder(folder, address, force=force)
    except UserError as error:
        again = shlex.join(["reshard", "push", str(folder), str(address), *(["--force"] if force else [])])
        hint = f"the packed model is in {folder}; to continue: {again}"
        raise error.changed(hint=f"{error.hint}; {hint}" if error.hint else hint) from error
    shutil.rmtree(folder)


def _check_whole(read: ReadManifest) -> LocalFolder:
    folder, virtual = read.folder, read.manifest.virtual
    assert isinstance(folder, LocalFolder), "a path"
    if virtual is not None:
        problem = f"references bytes in {virtual.location}, which would not be uploaded"
        raise ManifestError(
            str(read), problem, f"pack without {Parameter('virtual', True)} first", code="manifest.unrooted-bytes"
        )
    differences = verify_manifest(read, VerifyOptions(quick=True)).differences
    if differences:
        first, more = differences[0], f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        hint = f"reshard verify {shlex.quote(folder.location)} lists all of them"
        raise ManifestError(first.where, f"{first.problem}{more}", hint, code="manifest.differs")
    return folder


def _check_same(folder: Path, digest: str) -> None:
    """Refuse a folder that was replaced while its files were sent: some of them are of the new one."""
    read = open_manifest(folder)
    if read.digest != digest:
        problem = "was replaced while its files were sent"
        raise ManifestError(str(read), problem, "push it again", code="manifest.replaced")


def _card(folder: LocalFolder, head: HubFolder, section: str, manifest: Manifest) -> bytes:
    """Return the model card: the repository's own text, or else the folder's, with our section."""
    folders: tuple[Folder, ...] = (head, folder)
    cards = [place.file(MODEL_CARD_NAME) for place in folders if MODEL_CARD_NAME in place.names()]
    text = without_section(read_whole(cards[0])) if cards else b""
    return with_section(text, section, base_model_of(manifest.source))


def _stale(head: HubFolder, wanted: set[str]) -> tuple[str, ...]:
    """Return the files of a repository that belong to another model, and would be mixed with the new one."""
    names = set(head.names())
    # No manifest says what is of a model that others have uploaded: all that readers would take for the new one's.
    owned = {name for name in names if is_consulted(name) and not is_weights(name)} if CONFIG_NAME in names else set()
    if MANIFEST_NAME in names:
        with suppress(ManifestError, SourceError):  # of another version, or not ours
            owned = set(files_in(decode_manifest(read_whole(head.file(MANIFEST_NAME)))))
    stale = {name for name in names if name in owned or _is_weights(name)} - wanted
    return tuple(sorted(stale - {MODEL_CARD_NAME, GIT_ATTRIBUTES_NAME}))


def _is_weights(name: str) -> bool:
    """Return whether readers would take a file for a part of the model, or for what vouches for it."""
    if name in (INDEX_NAME, TORCH_INDEX_NAME, SIGNATURE_NAME, MANIFEST_NAME, *ADAPTER_NAMES) or is_torch_shard(name):
        return True
    return name.endswith(SUFFIX) and (is_in_stage_folder(name) or ("/" not in name and not is_beside(name)))


def _message(manifest: Manifest) -> str:
    layout, training = manifest.layout, manifest.training
    what = f"{manifest.model.architecture}, {layout.num_stages} pipeline stages"
    return f"{what}, step {training.step}" if training else what


def card_section(manifest: Manifest, digest: str, place: str) -> str:
    """Return the text on a checkpoint that is at `place` on the hub: source, revision, layout and digests."""
    layout, training, shards = manifest.layout, manifest.training, tuple(manifest.shards)
    name = place.rpartition("/")[2].partition("@")[0]
    base, revision = base_model_of(manifest.source), manifest.source.revision
    made_from = f"[{base}](https://huggingface.co/{base})" if base else "a folder"
    lines = [
        "## Checkpoint",
        "",
        f"- architecture: {_code(manifest.model.architecture)}, {manifest.model.num_params:,} parameters",
        f"- source: {made_from}" + (f", revision {_code(revision)}" if base and revision else ""),
        f"- layout: {layout.num_stages} pipeline stages on {layout.num_ranks} ranks ({_code(layout.spec)})",
        *([f"- training: step {training.step:,}, {training.num_tokens:,} tokens"] if training else []),
        f"- size: {show_bytes(sum(shard.nbytes for shard in shards))} in {len(shards)} shards",
        f"- `manifest.json`: {_code(digest)}, which roots the digest of every tensor",
        f"- written by {_code(manifest.created_by)}",
        "",
        "```sh",
        f"reshard verify {place}",
        f"reshard pack {place} --out ./{name}  # to train it; --layout reshards it",
        "```",
    ]
    return "\n".join(lines)


def base_model_of(source: Source) -> str | None:
    """Return the hub repository that a checkpoint was made from; None for a folder, whose path stays private."""
    if source.kind != "huggingface" or not source.location.startswith(SCHEME):
        return None
    address = parse_hub_address(source.location.removeprefix(SCHEME))
    return address.repo if address else None


def _code(text: str) -> str:
    """Return text as inline code: manifests may come from anywhere."""
    shown = "".join(" " if char in "`<>|\r\n" else char for char in text)
    return f"`{shown}`"
