"""Signatures of a manifest, which roots the digest of every byte: written and verified with model-signing.

The signature is a Sigstore bundle of one elliptic-curve key, without a network; `model_signing verify key` reads it.

Source: model-signing 1.1.1, https://model.sigstore.dev; its texts say why a signature was refused, and any other
error refuses it, too.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from manifests.errors import InputError, ManifestError, OutputError, Parameter, SignatureError, system_errors
from manifests.index import SIGNATURE_NAME
from manifests.invariants import MANIFEST_NAME
from manifests.store import write_file
from stores.base import read_whole
from stores.folders.probe import check_new_file
from stores.folders.publish import TMPDIR, temporary_folder, writing_to
from stores.local import LocalFolder
from stores.open import ReadManifest, open_manifest

_MOST_NBYTES = 1 << 20  # of a signature; common ones take a few KB


def sign(manifest: str | Path, *, key: str | Path, password: str | None = None, force: bool = False) -> Path:
    """Sign a manifest, which has digests of all bytes of its checkpoint; return the file of the signature.

    `key` is a PEM file: a private key on the curve P-256, P-384 or P-521, encrypted with `password` or not. The
    signature is a Sigstore bundle, `manifest.sig` beside the manifest. Shards are not read; `verify` does
    that. Needs `reshard[sign]`.

    Raises:
        ManifestError: the manifest is damaged, or is of a virtual pack, without digests of the bytes it references.
        OutputError: the signature exists and `force` is not set, or it cannot be written, as in a bucket.
        InputError: there is no manifest, the key cannot be read, or model-signing is not installed.

    Example:
        >>> reshard.sign("model-pp2", key="key.pem").name
        'manifest.sig'
        >>> reshard.verify("model-pp2", public_key="key.pub").equal
        True
    """
    read, signing = open_manifest(manifest), _module("signing")
    if not isinstance(read.folder, LocalFolder):
        hint = "sign the folder on this machine before it is uploaded, or upload its manifest.sig"
        raise OutputError(str(read), "signatures are written to files only", hint, code="output.unwritable")
    out = read.folder.path / SIGNATURE_NAME
    check_new_file(out, "signature", force=force)
    if read.manifest.virtual is not None:
        problem = f"references bytes in {read.manifest.virtual.location} whose digests it does not have"
        hint = f"a signature would not cover them; pack without {Parameter('virtual', True)} first"
        raise ManifestError(str(read), problem, hint, code="manifest.unrooted-bytes")
    try:
        secret = None if password is None else password.encode()
        signer = signing.Config().use_elliptic_key_signer(private_key=Path(key), password=secret)
    except Exception as error:  # whatever the reader of keys meets
        raise _bad_key(
            Parameter("key", str(key)), error, "private", f"; {Parameter('password')} for an encrypted one"
        ) from error
    with temporary_folder("reshard-sign-") as folder:
        signed, signature = folder / MANIFEST_NAME, folder / SIGNATURE_NAME
        with writing_to(*TMPDIR):
            signed.write_bytes(read.data)
            signer.sign(signed, signature)
        with system_errors(out, "cannot be written", code="output.unwritable"):
            write_file(out, signature.read_bytes())
    return out


def check_signature(read: ReadManifest, public_key: Path) -> str:
    """Check that a key signed a manifest; return where its signature is."""
    verifying = _module("verifying")
    if SIGNATURE_NAME not in read.folder.names():
        where = f"{read.folder}/{SIGNATURE_NAME}"
        raise SignatureError(where, "no such file", "sign with reshard sign", code="signature.missing")
    stored = read.folder.file(SIGNATURE_NAME)
    where, signature = str(stored), read_whole(stored, most_nbytes=_MOST_NBYTES)
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except Exception as error:  # whatever the reader of keys meets
        raise _bad_key(Parameter("public_key", str(public_key)), error, "public") from error
    with temporary_folder("reshard-verify-") as folder:
        with writing_to(*TMPDIR):
            (folder / MANIFEST_NAME).write_bytes(read.data)
            (folder / SIGNATURE_NAME).write_bytes(signature)
        try:
            with redirect_stdout(sys.stderr):  # it warns of old signatures there
                verifier.verify(folder / MANIFEST_NAME, folder / SIGNATURE_NAME)
        except Exception as error:  # whatever a signature by anybody makes it raise
            raise _refused(where, str(read), public_key, error) from error
    return where


def _refused(where: str, manifest: str, key: Path, error: Exception) -> SignatureError:
    if str(error).startswith("Key mismatch"):
        problem, hint = f"was made with another key than {key}", "use the public key of whoever signed the checkpoint"
        return SignatureError(where, problem, hint, code="signature.other-key")
    if str(error).startswith("Signature mismatch"):
        hint = "the manifest was changed or replaced after it was signed; copy the signed checkpoint again"
        return SignatureError(where, f"is of another manifest than {manifest}", hint, code="signature.other-manifest")
    problem = f"is damaged, or was not made with {key}: {type(error).__name__}"
    hint = "sign the manifest with reshard sign, or copy the signature again"
    return SignatureError(where, problem, hint, code="signature.invalid")


def _bad_key(key: Parameter, error: Exception, kind: str, more: str = "") -> InputError:
    reason = f"{type(error).__name__}: {error}"[:200]
    problem = f"expected a {kind} key on the curve P-256, P-384 or P-521 in PEM; reading it failed with {reason}"
    hint = f"make a pair with openssl ecparam and openssl ec, see reshard sign --help{more}"
    return InputError(key, problem, hint, code="options.unreadable-key")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{name}")
    except ImportError as error:
        problem, hint = "signatures are made and verified with model-signing", "pip install 'reshard[sign]'"
        raise InputError(f"model_signing: {error.name}", problem, hint, code="system.missing-package") from error
