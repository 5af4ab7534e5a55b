"""Out of memory ends with its sentence; copies are in pinned memory; AdamW on a device steps as torch's plain one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from runner.checkpoint.state import Held, HostCopy
from runner.config.schema import OptimOptions
from runner.tensors.local_shard import whole_pieces
from runner.training.mixed_precision import keep_masters, master_of
from runner.training.optimizer import Optimizer
from tests.fast.runner.tiny import save_model
from tests.gpu.jobs import pack
from tests.process.local_jobs import launched

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

# Of one microbatch: logits of 1 TiB, beside little else.
HUGE = {"vocab_size": 1 << 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
BATCH = ("--seq-len", "256", "--global-batch", "1024", "--microbatch", "1024", "--timeout", "200")


def test_rank_that_is_out_of_memory_ends_with_one_sentence(device: str, tmp_path: Path) -> None:
    save_model(tmp_path / "llama", **HUGE)
    packed = pack(tmp_path / "llama", 1)
    with launched(packed, tmp_path / "log", *BATCH, "--device", device, "--no-self-check") as run:
        if device == "cpu":  # memory of the host is looked at before ranks start
            assert (run.process.wait(timeout=250), "[launch.host-memory]" in run.said) == (3, True), run.said
            return
        assert run.process.wait(timeout=250) == 5, run.said
        assert run.state["error_code"] == "system.out-of-memory"
        assert any(size in run.state["error"] for size in ("1024.00 GiB", "1048576.0 MiB")), run.state["error"]
        assert "Traceback" not in run.said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_is_fused_on_a_gpu_and_steps_as_the_plain_one(device: str, dtype: torch.dtype) -> None:
    """With bfloat16 weights it steps their masters, which are then rounded into them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (64,), (3, 4, 5)]
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]
    module = torch.nn.ParameterList(weights)
    if dtype == torch.bfloat16:
        keep_masters([module], torch.float32)
        for weight in weights:
            master_of(weight).copy_(weight.detach())
    plain = [master_of(weight).detach().clone().requires_grad_() for weight in weights]
    options = OptimOptions(lr=1e-2, max_norm=0)
    ours = Optimizer(list(zip(map(str, itertools.count()), weights, strict=False)), options)
    theirs = torch.optim.AdamW(
        plain,
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        foreach=False,
    )
    (adamw,) = ours.torch_optimizers
    assert adamw.param_groups[0]["fused"] == (True if device == "cuda" else None)
    for step in range(3):
        for weight, other in zip(weights, plain, strict=True):
            gradient = torch.randn(weight.shape, generator=generator).to(device)
            weight.grad, other.grad = gradient.clone(), gradient
        ours.step(step)
        theirs.step()
    for weight, other in zip(weights, plain, strict=True):
        assert torch.allclose(master_of(weight), other, rtol=1e-5, atol=1e-7)
        assert torch.equal(weight, master_of(weight).to(dtype))


def test_copies_of_a_state_are_in_pinned_memory_and_equal(device: str) -> None:
    tensors = {"a": torch.arange(3 << 20, device=device), "b": torch.full((3,), 0.5, device=device)}
    held: Held = {0: {"weights": whole_pieces(tensors)}}
    for _ in range(2):  # pages that were given back can be locked again
        copy = HostCopy(held)
        for piece in copy.fill(held)[0]["weights"]:
            assert piece.memory.equal(tensors[piece.fqn].cpu())
            assert piece.memory.is_pinned() == (device == "cuda")
        del copy, piece
