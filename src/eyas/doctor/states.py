"""Are the stored states what their names say? Asked of the target itself, which computes a few samples again.

Letters: `T` tokens, `H` hidden size, `L` decoder layers, `k` hidden-state index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eyas.capture.check import TOLERANCES
from eyas.doctor.bench import Bench, Gain, Outcome, gain
from eyas.doctor.findings import Finding, broken, ok, unknown
from eyas.engine.hf import HfEngine
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.vocab_map import VocabMap
from eyas.records import LAST, CaptureSpec, TokenIds, hidden_field
from eyas.target.head import HeadTensors
from eyas.values import median_row_error

FloatArray = npt.NDArray[np.float32]

NEAREST = 0.5
"""Values are those of an index when every other one is at least twice as far."""
RMS_TOLERANCE = 0.1
"""How far the root mean square of a normed row, weights taken off, may lie from 1."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One sample computed by the target now."""

    hidden: Mapping[int, FloatArray]
    """`[T, H]` by hidden-state index."""
    last: FloatArray
    """`[T, H]` after the final norm."""


def indices_around(layers: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """These hidden-state indices, their neighbours, and the last layer's: what tells a shift."""
    around = {k + shift for k in layers for shift in (-1, 0, 1)} | {num_layers}
    return tuple(sorted(k for k in around if 0 <= k <= num_layers))


def capture_again(engine: HfEngine, indices: Sequence[int], samples: Sequence[TokenIds]) -> list[Seen]:
    """`engine` must have been made for `indices`."""
    found = []
    for token_ids in samples:
        states = engine.states(token_ids)
        found.append(Seen({k: states[hidden_field(k)] for k in indices}, states[LAST]))
    return found


def judge_states(spec: CaptureSpec, stored: Sequence[Mapping[int, FloatArray]], seen: Sequence[Seen]) -> Finding:
    """Which hidden state each stored field is, by the median relative error of its rows."""
    tolerance = TOLERANCES[spec.dtype].states
    errors: dict[int, dict[int, float]] = {}
    for k in spec.aux_layers:
        errors[k] = {
            j: float(
                np.median([median_row_error(mine[k], now.hidden[j]) for mine, now in zip(stored, seen, strict=True)])
            )
            for j in seen[0].hidden
        }
    nearest = {k: min(by, key=by.__getitem__) for k, by in errors.items()}
    numbers: dict[str, Any] = {
        "error": {k: round(by[k], 5) for k, by in errors.items()},
        "nearest": nearest,
        "nearest_error": {k: round(errors[k][j], 5) for k, j in nearest.items()},
        "samples": len(seen),
    }
    strange = [k for k, j in nearest.items() if errors[k][j] > max(tolerance, _second(errors[k], j) * NEAREST)]
    wrong = {k: j for k, j in nearest.items() if j != k and k not in strange}
    if wrong:
        shifts = {j - k for k, j in wrong.items()}
        how = f"shifted by {shifts.pop():+d}" if len(shifts) == 1 and len(wrong) == len(errors) else "not as named"
        each = ", ".join(
            f"hidden.{k} holds hidden state {j} (error {errors[k][j]:.2g}, to {k} {errors[k][k]:.2g})"
            for k, j in wrong.items()
        )
        return broken(
            "states",
            f"the data set's layers are {how}: {each}",
            "capture anew with an engine whose layer numbers are translated, and train on that; a drafter trained on "
            "these states needs them so when it serves",
            **numbers,
        )
    if strange:
        each = ", ".join(
            f"hidden.{k} by {errors[k][k]:.2g} (nearest: {nearest[k]}, {errors[k][nearest[k]]:.2g})" for k in strange
        )
        return broken(
            "states",
            f"stored values differ from the target's at every index near: {each}",
            "other weights, positions or a broken capture: run 'eyas verify', then capture anew",
            **numbers,
        )
    own = ", ".join(f"{k}: {by[k]:.1e} (next {_second(by, k):.2g})" for k, by in errors.items())
    return ok("states", f"{len(seen)} samples captured again, relative error by index: {own}", **numbers)


def judge_norm(
    spec: CaptureSpec,
    last: Sequence[torch.Tensor],
    head: HeadTensors,
    scale: torch.Tensor,
    agreement: Mapping[str, float],
    seen: Sequence[Seen] = (),
) -> Finding:
    """Is the last state normed? A row behind a norm, its weights taken off, has a root mean square of 1.

    `last`: `[T, H]` of some samples; `scale [H]` what the norm multiplies by; `agreement`: share of supervised tokens
    that are the target's likeliest, when the rows are read as `pre` and as `post`.
    """
    rows = torch.cat([one.float() for one in last])
    used = scale.abs() > 1e-6
    bias = head.norm(torch.zeros(1, len(scale), dtype=head.weight.dtype, device=head.weight.device))[0].float().cpu()
    rms = ((rows - bias)[:, used] / scale[used]).square().mean(1).sqrt()
    normed = float(((rms - 1).abs() < RMS_TOLERANCE).float().mean())
    found = "post" if normed > 0.9 else "pre" if normed < 0.5 else "neither"
    numbers: dict[str, Any] = {
        "spec": spec.last_hidden_norm,
        "found": found,
        "median_rms": float(rms.median()),
        "normed_rows": normed,
        "agreement": dict(agreement),
    }
    text = (
        f"median root mean square {float(rms.median()):.3g} (1 behind the norm); the text's tokens are the likeliest "
        "in " + ", ".join(f"{share:.1%} of the rows read as {name}" for name, share in agreement.items())
    )
    if spec.last_hidden_norm == "unknown":
        return broken(
            "norm", f"the data set does not say; {text}", f"the values are {found}: say so in its spec", **numbers
        )
    if found == "neither":
        return broken("norm", f"some rows are normed and some are not; {text}", "capture anew", **numbers)
    if found != spec.last_hidden_norm:
        return broken(
            "norm",
            f"the data set says {spec.last_hidden_norm}, its values are {found}-norm: {text}",
            f"capture anew, or correct last_hidden_norm to '{found}' where the data set was made; then train again: "
            "the teacher was wrong",
            **numbers,
        )
    if seen:
        now = [one.last if found == "post" else one.hidden[spec.num_layers] for one in seen]
        error = float(np.median([median_row_error(a.float().numpy(), b) for a, b in zip(last, now, strict=False)]))
        numbers["error"] = error
        if error > max(TOLERANCES[spec.dtype].states, 0.2):
            return broken(
                "norm",
                f"the last state differs from the target's by {error:.2g} relative; {text}",
                "other weights or positions: capture anew",
                **numbers,
            )
        text += f"; captured again it differs by {error:.1e}"
    return ok("norm", f"{found}-norm as the data set says: {text}", **numbers)


def judge_shift(
    bench: Bench, draft: Eagle3Draft, vocab_map: VocabMap, seen: Sequence[Seen], num_layers: int
) -> Finding:
    """Does the drafter draft better from the layers next to those that its checkpoint names?"""
    named = draft.shape.aux_layers

    def outcome(layers: Sequence[int]) -> Outcome:
        aux = torch.stack([torch.cat([torch.from_numpy(one.hidden[k]) for one in seen]) for k in layers])
        return bench.judge(bench.run(draft, aux=aux), vocab_map)

    def inside(layers: Sequence[int]) -> bool:
        return all(0 <= k <= num_layers for k in layers) and list(layers) == sorted(set(layers))

    before = outcome(named)
    tried: dict[tuple[int, ...], Gain] = {}
    for shift in (-1, 1):
        whole = tuple(k + shift for k in named)
        singles = [tuple(k + shift * (i == at) for i, k in enumerate(named)) for at in range(len(named))]
        for layers in [whole, *singles]:
            if inside(layers):
                tried[layers] = gain(before, outcome(layers))
    numbers: dict[str, Any] = {
        "named": list(named),
        "length": before.length,
        "rows": bench.num_rows,
        "others": {str(list(layers)): g.after for layers, g in tried.items()},
    }
    if not tried or not bench.num_rows:
        return unknown("layers", "no neighbouring layers to try", **numbers)
    # All layers off alike is the common fault; the shallow ones matter so little that one alone may look as well.
    clear = [layers for layers, one in tried.items() if one.clear]
    uniform = [layers for layers in clear if len({a - b for a, b in zip(named, layers, strict=True)}) == 1]
    best = max(uniform or clear or tried, key=lambda layers: tried[layers].after)
    g = tried[best]
    if clear:
        how = f" (all by {named[0] - best[0]:+d})" if uniform else ""
        text = (
            f"the checkpoint names {list(named)}{how}, but drafts better from {list(best)}: acceptance length "
            f"{g.after:.2f} instead of {g.before:.2f} on {g.samples} samples"
        )
        do = f"write {list(best)} (hidden-state indices) into config.json, each less one into eagle_config"
        return broken("layers", text, do, **numbers)
    losses = sum(one.clear_loss for one in tried.values())
    told = (
        f"{losses} of {len(tried)} neighbouring choices are clearly worse"
        if losses
        else ("too weak or too few samples to tell neighbouring layers apart")
    )
    return ok(
        "layers",
        f"{list(named)} give acceptance length {before.length:.2f}, the best neighbours {g.after:.2f} ({told})",
        **numbers,
    )


def _second(errors: Mapping[int, float], k: int) -> float:
    return min((error for j, error in errors.items() if j != k), default=float("inf"))
