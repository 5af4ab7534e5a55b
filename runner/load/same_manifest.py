"""Check that every rank has read the same manifest: nodes may have copies of their own."""

from __future__ import annotations

from manifests.errors import ManifestError
from runner.distributed.fail_together import from_rank_0, together


def check_same_manifest(where: str, digest: str) -> None:
    """Check that the digest of the file that this rank has read is rank 0's. Every rank calls this.

    Raises:
        ManifestError: on all ranks alike, naming those that differ.
    """
    expected = from_rank_0(digest)
    with together("manifest"):
        if digest != expected:
            raise ManifestError(
                where,
                "differs from the manifest that rank 0 read",
                "every node must have the same checkpoint: a copy on the node's own disk may be outdated; if the "
                "manifest was replaced in the meantime, start again",
                code="manifest.differs-between-ranks",
            )
