"""Exchange between ranks that share a GPU, which NCCL refuses, and whose memory gloo can't send: through the host's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist


class _Copied:
    """A receipt that is copied to where it belongs when it is waited for."""

    def __init__(self, work: dist.Work, received: list[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
        self._work, self._received, self._wanted = work, received, wanted

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> bool:
        is_complete = self._work.wait()
        for wanted, received in zip(self._wanted, self._received, strict=True):
            with torch.no_grad():
                wanted.copy_(received)
        return is_complete


def exchange_through_host() -> None:
    """Let every group of this process send and receive tensors through host memory."""
    group: type = dist.ProcessGroup
    send, receive = group.send, group.recv  # type: ignore[attr-defined]

    def send_copies(self: dist.ProcessGroup, tensors: list[torch.Tensor], to: int, tag: int) -> _Copied:
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        return _Copied(send(self, copies, to, tag), [], [])

    def receive_copies(self: dist.ProcessGroup, tensors: list[torch.Tensor], source: int, tag: int) -> _Copied:
        copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return _Copied(receive(self, copies, source, tag), copies, tensors)

    group.send, group.recv = send_copies, receive_copies  # type: ignore[attr-defined]
