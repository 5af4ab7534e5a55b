"""sign: vouch for a packed model or checkpoint with a key."""

from __future__ import annotations

from pathlib import Path

from reshard.checks.signature import sign_manifest
from stores.open import open_manifest


def sign(manifest: str | Path, *, key: str | Path, password: str | None = None, force: bool = False) -> Path:
    """Sign a manifest, which has digests of all bytes of its checkpoint; return the file of the signature.

    `key` is a PEM file: a private key on the curve P-256, P-384 or P-521, encrypted with `password` or not. The
    signature is a Sigstore bundle, `manifest.sig` beside the manifest. Shards are not read; `verify` does
    that. Needs `reshard[sign]`.

    Raises:
        ManifestError: the manifest is damaged, or is of a virtual pack, without digests of the bytes it references.
        OutputError: the signature exists and `force` is not set, or it cannot be written.
        InputError: there is no manifest, the key cannot be read, or model-signing is not installed.

    Example:
        >>> reshard.sign("model-pp2", key="key.pem").name
        'manifest.sig'
        >>> reshard.verify("model-pp2", public_key="key.pub").equal
        True
    """
    return sign_manifest(open_manifest(manifest), Path(key), password=password, force=force)
