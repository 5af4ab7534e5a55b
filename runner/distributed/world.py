"""This process's rank, its device, and the process group of all ranks."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from manifests.errors import LaunchError
from runner.config.flags import Device
from runner.distributed.fail_together import from_all_ranks, raise_on_all_ranks
from runner.profiling.step_times import StartTimes

logger = logging.getLogger("runner")
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process's rank, from torchrun's environment variables. Ranks of a node have consecutive numbers."""

    rank: int
    local_rank: int
    size: int
    local_size: int = 1  # ranks on this node
    start: StartTimes = field(default_factory=StartTimes, compare=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> World:
        try:
            rank, local_rank, size = (int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        except KeyError as error:
            raise LaunchError(
                "", f"{error} is not set", "runner launch starts the workers", code="launch.no-world"
            ) from error
        local_size = int(environment.get("LOCAL_WORLD_SIZE", local_rank + 1))
        return cls(rank=rank, local_rank=local_rank, size=size, local_size=local_size)


def num_threads(environment: Mapping[str, str]) -> int:
    """Return the threads of OMP_NUM_THREADS, of a list the first; 1 where it has none, as OpenMP ignores others."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else 1


def device_of(world: World, device: Device) -> torch.device:
    """Return the device that this rank trains on."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            "--device",
            f"local rank {world.local_rank} needs its own GPU, found {torch.cuda.device_count()} GPUs on this node",
            "start fewer ranks per node, or use --device cpu",
            code="launch.too-few-gpus",
        )
    return torch.device("cuda", world.local_rank)


def check_reachable(world: World, host: str, environment: Mapping[str, str] = os.environ) -> None:
    """Check, on another machine than node 0, that others reach it at the address that gloo takes from its host name.

    That is the first one that can be bound; Debian's /etc/hosts has 127.0.1.1. Where there is none, gloo uses loopback.
    Source: torch 2.13, ProcessGroupGloo.cpp, createDefaultDevice.
    """
    if _INTERFACE in environment:
        _check_interfaces(environment[_INTERFACE], host)
        return
    if world.size == world.local_size or _bindable_address(environment.get("MASTER_ADDR", "")) is not None:
        return
    address = _bindable_address(host)
    if address is None or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise LaunchError(
            host,
            f"other nodes cannot reach this one: its host name resolves to {address or 'no address of this machine'}",
            f"correct /etc/hosts, or name a network interface: --env {_INTERFACE}=eth0",
            code="launch.unreachable-node",
        )


def _check_interfaces(names: str, host: str) -> None:
    """Check that this machine has the network interfaces of GLOO_SOCKET_IFNAME."""
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name.partition(":")[0] not in interfaces:
            problem = f"{_INTERFACE}: expected some of {', '.join(interfaces)}, found {name}"
            hint = f"name an interface that every node has: --env {_INTERFACE}=NAME"
            raise LaunchError(host, problem, hint, code="launch.unreachable-node")


def _bindable_address(host: str) -> str | None:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in entries:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return str(address[0])
    return None


def join_world(device: torch.device, timeout_s: int, *, shares_gpu: bool = False) -> None:
    """Create the process group of all ranks; every later wait for another rank ends after `timeout_s`.

    NCCL refuses ranks that share a GPU (`shares_gpu`): they use gloo, through host memory.
    """
    torch.set_num_threads(num_threads(os.environ))
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "gloo" if shares_gpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    check_same_kind(device)


def check_same_kind(device: torch.device) -> None:
    """Check that all ranks train on GPUs, or none: with `--device auto`, those of a node without a driver would not.

    Every rank calls this. They would wait for each other in the first exchange, one with NCCL and one with gloo.
    """
    num_gpus = from_all_ranks(device.type).count("cuda")
    with raise_on_all_ranks("device"):
        if num_gpus and device.type == "cpu":
            raise LaunchError(
                "--device",
                f"torch finds no GPU for this rank, and {num_gpus} ranks have one",
                "check nvidia-smi on this node, or train on CPUs with --device cpu",
                code="launch.too-few-gpus",
            )


def same_gpu() -> Callable[[], None]:
    """Return what a new thread that may call CUDA calls first: it then uses the GPU of this one.

    Threads begin with GPU 0, where CUDA would take half a GiB for each rank of the node that has another.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def exchange_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where a tensor on `device` must be to be sent or gathered: gloo does that in host memory only.

    Source: torch 2.13, docs/source/distributed.md, "Backends".
    """
    world_group = group or dist.group.WORLD
    if device.type == "cpu" or world_group is None or world_group._get_backend(device).name() != "gloo":
        return device
    return torch.device("cpu")


def wait_for_numbers(tensor: torch.Tensor) -> Any:
    """Return the numbers of a tensor that may depend on other ranks: with NCCL, here is where the host waits for them.

    Heartbeats know a rank that waits by this function.
    """
    return tensor.tolist()


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let the ranks of a group connect, all of which call this.

    The first collective of a group would do so. With NCCL that takes memory of the GPU, and none of what torch keeps.
    """
    dist.all_reduce(torch.zeros(1, device=exchange_device(device, group)), group=group)
