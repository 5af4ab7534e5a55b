"""push: a packed folder or checkpoint to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from manifests.errors import Parameter, StoreError, UsageError
from reshard.packing.push import PushResult, push_folder
from stores.address import SCHEME, HubAddress, is_url, parse_hub_address


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
