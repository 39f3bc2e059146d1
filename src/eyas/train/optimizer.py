"""AdamW over float32 weights, its gradients summed over ranks, and its moments as plain tensors by name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from eyas.config import TrainConfig
from eyas.train.ranks import Ranks
from eyas.train.step import Pass


def learning_rate(step: int, num_steps: int, config: TrainConfig) -> float:
    """Of optimizer step `step`, from 0: rises over the warm-up, then stays, or falls as half a cosine to 0."""
    warmup = round(config.warmup * num_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


class Optimizer:
    """The trainable weights of a pass, and how they change."""

    def __init__(self, run: Pass, config: TrainConfig, ranks: Ranks, dtype: torch.dtype) -> None:
        self._ranks, self._clip = ranks, config.clip
        self._sharded = config.sharded and ranks.world > 1
        if self._sharded:
            _shard(run, dtype, ranks)
        self._named = {name: p for name, p in run.draft.named_parameters() if p.requires_grad}
        self._adam = torch.optim.AdamW(
            self._named.values(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=ranks.device.type == "cuda",
        )

    def sum_gradients(self) -> float:
        """Let every rank have the sum of all ranks' gradients, clip it, and return its norm before that."""
        for p in self._named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if not self._sharded:
            self._ranks.sum_all(p.grad for p in self._named.values() if p.grad is not None)
        norm = nn.utils.clip_grad_norm_(self._named.values(), self._clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self, rate: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, torch.Tensor]:
        """Whole tensors `{name}.{exp_avg, exp_avg_sq, step}`; empty before the first step.

        Every rank has to ask; of what is spread over the ranks only the first one gets anything.
        """
        found: dict[str, torch.Tensor] = {}
        for name, p in self._named.items():
            for kind, value in self._adam.state.get(p, {}).items():
                found[f"{name}.{kind}"] = self._whole(value)
        return found

    def moments_like(self) -> dict[str, torch.Tensor]:
        """What `moments` will be after a step, by name and shape, without memory."""
        like: dict[str, torch.Tensor] = {}
        for name, p in self._named.items():
            whole = torch.empty(p.shape, device="meta")
            like |= {f"{name}.exp_avg": whole, f"{name}.exp_avg_sq": whole}
            like[f"{name}.step"] = torch.empty((), device="meta")
        return like

    def load_moments(self, moments: Mapping[str, torch.Tensor]) -> None:
        for name, p in self._named.items():
            state = {"step": moments[f"{name}.step"].to(p.device if p.is_cuda else "cpu")}
            for kind in ("exp_avg", "exp_avg_sq"):
                value = moments[f"{name}.{kind}"].to(p.device)
                state[kind] = distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value
            self._adam.state[p] = state

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The trainable weights as whole tensors; every rank has to ask, as for `moments`."""
        return {name: self._whole(p.detach()) for name, p in self._named.items()}

    def _whole(self, value: torch.Tensor) -> torch.Tensor:
        """One at a time in the device's memory: sharded, there may not be room for all of them."""
        if not isinstance(value, DTensor):
            return value
        whole = value.full_tensor()
        return whole.cpu() if self._ranks.first else whole.new_empty(0)


def _shard(run: Pass, dtype: torch.dtype, ranks: Ranks) -> None:
    """FSDP2: weights, gradients and moments in pieces, arithmetic in `dtype`, gradients summed in float32."""
    frozen = {p for p in run.draft.parameters() if not p.requires_grad}
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    whole = fully_shard(run, mesh=mesh, mp_policy=policy, ignored_params=frozen)
    # The loss is divided by the count of all ranks already: gradients are summed, not averaged; plainly, as gloo can.
    whole.set_gradient_divide_factor(1.0)
    whole.set_force_sum_reduction_for_comms(True)
