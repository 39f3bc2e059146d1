"""The processes of one training: who am I, and sums over all of us. One process is a group of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from eyas.errors import ConfigError

TIMEOUT = timedelta(minutes=30)
"""A rank that is gone is told by its launcher; this only bounds how long the others hang on it."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A context manager: the process group lives as long as it does."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def of(cls, device: str) -> Ranks:
        """As torchrun says, in the environment that it makes for each process; else a single process.

        `device` is `cuda`, `cpu` or empty for a GPU where there is one. ConfigError where there is none.
        """
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0))
        kind = device_of(device)
        if kind == "cuda":
            if local >= torch.cuda.device_count():
                raise ConfigError(f"rank {rank} wants GPU {local}, this host has {torch.cuda.device_count()}")
            kind = f"cuda:{local}"
        place = torch.device(kind)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if world > 1:
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=TIMEOUT)
        return cls(rank, world, place)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Each tensor's sum over all ranks, in place."""
        if self.world > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    def barrier(self) -> None:
        if self.world > 1:
            # A sum that is looked at: a barrier of NCCL's does not wait for the host.
            self.sum(torch.zeros(1, device=self.device)).item()


def device_of(device: str) -> str:
    """`train.device`, or a GPU where it is empty and there is one. ConfigError where it cannot be had."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind.partition(":")[0] not in ("cuda", "cpu"):
        raise ConfigError(f"train.device: '{device}' is neither 'cuda' nor 'cpu'")
    if kind.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.device: '{device}', but PyTorch {torch.__version__} finds no GPU here")
    return kind
