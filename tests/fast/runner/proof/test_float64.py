"""What code computes in float32 is float64 in a proof."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from runner.proof.tiny_step import float32_as_float64


def norm(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(tensor.dtype)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    """Recompute what rounds: in the backward, which is not intercepted."""
    leaf = tensor.detach().requires_grad_()
    torch.autograd.backward(checkpoint(norm, leaf, use_reentrant=False)[0])
    assert leaf.grad is not None
    return leaf.grad


def test_casts_to_float32_do_not_round_forward_or_when_they_are_recomputed() -> None:
    tensor = torch.linspace(0.1, 1.0, 7, dtype=torch.float64)
    exact = tensor * tensor.pow(2).mean().rsqrt()
    assert not torch.equal(norm(tensor), exact)
    rounded = gradient_of(tensor)
    with float32_as_float64():
        assert torch.zeros(1).dtype == torch.ones(1).float().dtype == torch.float64
        assert torch.allclose(norm(tensor), exact, rtol=1e-14, atol=0)
        assert 1e-9 < (gradient_of(tensor) - rounded).abs().max() < 1e-6
    assert torch.zeros(1).dtype == torch.float32
    assert not torch.equal(norm(tensor), exact)
