"""A signed manifest roots every byte: another key, a changed manifest and a changed shard are refused."""

from __future__ import annotations

import doctest
import json
import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from manifests.errors import InputError, SignatureError
from tests.builders import edit_manifest, flip, llama_config, pack, refusal, reshard, write_model

pytest.importorskip("model_signing", reason="pip install 'reshard[sign]'")

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from model_signing import signing, verifying

SHARD = "model-00002-of-00002.safetensors"


def write_keys(folder: Path, name: str, curve: ec.EllipticCurve | None = None, password: bytes | None = None) -> Path:
    """Write NAME.pem and NAME.pub, as openssl does; return the path of the private key."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    how = NoEncryption() if password is None else BestAvailableEncryption(password)
    private = folder / f"{name}.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    private.with_suffix(".pub").write_bytes(public)
    return private


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Pack a model and sign it with one.pem; two.pem is somebody else's."""
    write_model(tmp_path / "source", llama_config())
    for name in ("one", "two"):
        write_keys(tmp_path, name)
    pack(tmp_path / "source", tmp_path / "out")
    signed = reshard("sign", tmp_path / "out", "--key", tmp_path / "one.pem", "--json")
    assert (signed.code, signed.json) == (0, {"version": 1, "signature": str(tmp_path / "out" / "manifest.sig")})
    return tmp_path / "out"


def verify(out: Path, *args: str | Path, key: str = "one") -> tuple[int, str]:
    """Return the exit code and the error code of verify, which is "" where it ran to its end."""
    ended = reshard("verify", out, "--public-key", out.parent / f"{key}.pub", "--json", *args)
    return ended.code, ended.json.get("error", {}).get("code", "")


def test_signed_checkpoint_verifies_with_its_key(out: Path, wording: Callable[[str], None]) -> None:
    assert verify(out) == (0, "")
    assert verify(out, "--quick") == (0, "")
    wording(reshard("verify", out, "--public-key", out.parent / "one.pub").out)
    assert api.verify(out, public_key=out.parent / "one.pub").signature == str(out / "manifest.sig")
    assert api.verify(out).signature is None


def test_doctest_of_sign_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", llama_config())
    api.pack("model", "model-pp2", "pp=2")
    write_keys(tmp_path, "key")
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(api.sign, "sign", globs={"reshard": api}):
        runner.run(test)
    assert (runner.failures, runner.tries) == (0, 2)


def test_another_key_is_refused(out: Path, wording: Callable[[str], None]) -> None:
    assert verify(out, key="two") == (4, "signature.other-key")
    wording(reshard("verify", out, "--public-key", out.parent / "two.pub").err)


def test_changed_manifest_is_refused_though_it_is_valid(out: Path, wording: Callable[[str], None]) -> None:
    edit_manifest(out, lambda document: document.update(created_by="somebody else"))
    assert reshard("verify", out).code == 0
    assert verify(out) == (4, "signature.other-manifest")
    wording(reshard("verify", out, "--public-key", out.parent / "one.pub").err)


def test_changed_shard_is_named(out: Path, wording: Callable[[str], None]) -> None:
    flip(out / SHARD)
    assert reshard("verify", out, "--public-key", out.parent / "one.pub", "--json").json["code"] == (
        "signature.changed-file"
    )
    (difference,) = api.verify(out, public_key=out.parent / "one.pub").differences
    assert difference.where.startswith(str(out / SHARD))
    text = reshard("verify", out, "--public-key", out.parent / "one.pub").out
    assert "[signature.changed-file]" in text
    wording(text)


def edit_signature(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    bundle = json.loads((out / "manifest.sig").read_text())
    change(bundle)
    (out / "manifest.sig").write_text(json.dumps(bundle))


@pytest.mark.parametrize(
    "change",
    [
        lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(sig="AAAA"),
        lambda bundle: bundle["dsseEnvelope"].update(payload="e30="),
        lambda bundle: bundle["dsseEnvelope"].pop("signatures"),
        lambda bundle: bundle["verificationMaterial"].pop("publicKey"),
        lambda bundle: bundle.update(mediaType="text/plain"),
        lambda bundle: bundle.clear(),
    ],
    ids=["signature", "payload", "no signature", "no key", "media type", "empty"],
)
def test_damaged_signature_is_refused(change: Callable[[dict[str, Any]], object], out: Path) -> None:
    edit_signature(out, change)
    assert verify(out) == (4, "signature.invalid")


def test_name_of_the_key_in_a_signature_is_not_trusted(out: Path) -> None:
    """It is not signed, and signatures of older releases have none."""
    key = (out.parent / "two.pub").read_bytes()
    edit_signature(out, lambda bundle: bundle["verificationMaterial"]["publicKey"].update(hint=sha256(key).hexdigest()))
    assert verify(out, key="two") == (4, "signature.invalid")
    edit_signature(out, lambda bundle: bundle["verificationMaterial"]["publicKey"].clear())
    assert verify(out, key="two") == (4, "signature.invalid")
    assert verify(out) == (0, "")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x1b[2J"])
def test_file_that_is_no_signature_is_refused(text: str, out: Path) -> None:
    (out / "manifest.sig").write_text(text)
    assert verify(out) == (4, "signature.invalid")


def test_signature_of_another_checkpoint_is_refused(out: Path) -> None:
    other = out.with_name("other")
    pack(out, other, "pp=4")
    assert verify(other) == (4, "signature.missing")
    (other / "manifest.sig").write_bytes((out / "manifest.sig").read_bytes())
    assert verify(other) == (4, "signature.other-manifest")


def test_signing_again_needs_force_and_files_of_others_are_kept(out: Path) -> None:
    before = (out / "manifest.sig").read_bytes()
    again = ("sign", out, "--key", out.parent / "two.pem", "--json")
    assert reshard(*again).refusal == (3, "output.exists", str(out / "manifest.sig"))
    assert (out / "manifest.sig").read_bytes() == before
    assert reshard(*again, "--force").code == 0
    assert verify(out, key="two") == (0, "")


def test_virtual_pack_is_not_signed(out: Path) -> None:
    virtual = out.with_name("virtual")
    pack(out.parent / "source", virtual, "pp=2", "--virtual")
    refused = reshard("sign", virtual, "--key", out.parent / "one.pem", "--json")
    assert refused.refusal[:2] == (3, "manifest.unrooted-bytes")
    assert not (virtual / "manifest.sig").exists()


def test_keys_of_other_kinds_are_refused(out: Path, tmp_path: Path) -> None:
    curve = write_keys(tmp_path, "curve", ec.SECP256K1())
    key = rsa.generate_private_key(65537, 1024).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "rsa.pem").write_bytes(key)
    encrypted = write_keys(tmp_path, "encrypted", password=b"secret")
    for path in (curve, tmp_path / "rsa.pem", encrypted, tmp_path / "one.pub", tmp_path / "none"):
        with pytest.raises(InputError) as caught:
            api.sign(out, key=path, force=True)
        assert (caught.value.code, caught.value.where) == ("options.unreadable-key", f"--key {path}")
    for path in (tmp_path / "curve.pub", tmp_path / "one.pem"):
        with pytest.raises(InputError) as caught:
            api.verify(out, public_key=path)
        assert (caught.value.code, caught.value.where) == ("options.unreadable-key", f"--public-key {path}")
    assert verify(out) == (0, "")  # the signature that was there is whole
    assert api.sign(out, key=encrypted, password="secret", force=True) == out / "manifest.sig"
    assert verify(out, key="encrypted") == (0, "")


def test_without_model_signing_the_extra_is_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("signing", "verifying"):
        monkeypatch.setitem(sys.modules, f"model_signing.{name}", None)
    with pytest.raises(InputError) as caught:
        api.verify(out, public_key=out.parent / "one.pub")
    assert (caught.value.code, "reshard[sign]" in caught.value.hint) == ("system.missing-package", True)
    assert reshard("sign", out, "--key", out.parent / "one.pem", "--json").code == 3
    assert reshard("verify", out).code == 0


def test_signatures_are_refused_where_no_temporary_folder_can_be_made(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(out / "none")])
    signing_again = ("sign", out, "--key", out.parent / "one.pem", "--force")
    for words in (signing_again, ("verify", out, "--public-key", out.parent / "one.pub")):
        assert refusal(*words).found == (3, "output.unwritable", "TMPDIR")


def test_model_signing_s_own_functions_verify_and_make_the_signature(out: Path, tmp_path: Path) -> None:
    verifying.Config().use_elliptic_key_verifier(public_key=tmp_path / "one.pub").verify(
        out / "manifest.json", out / "manifest.sig"
    )
    signing.Config().use_elliptic_key_signer(private_key=tmp_path / "two.pem").sign(
        out / "manifest.json", out / "manifest.sig"
    )
    assert verify(out, key="two") == (0, "")
    with pytest.raises(SignatureError):
        api.verify(out, public_key=tmp_path / "one.pub")
