"""One training step (forward, backward, AdamW, teacher included) on synthetic states, beside SpecForge's on one GPU.

    python benchmarks/train_step.py --tokens 4096 8192 16384 --specforge SITE

SITE is a directory with SpecForge 0.2.0 (`pip install --no-deps --target SITE specforge==0.2.0`). Prints JSON lines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.model.eagle3 import Eagle3Draft
from eyas.model.shape import DraftShape
from eyas.train.attention import Flash, Plain, causal_for
from eyas.train.loss import Teacher, argmax_of, ttt_loss, valid_rows
from eyas.train.ttt import DraftWeights, MaskRule, Options, plan_rows, ttt

SHAPES = {
    "8b": DraftShape(
        target_hidden_size=4096, vocab_size=128256, aux_layers=(2, 16, 29), hidden_size=4096, draft_vocab_size=32000,
        num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336, max_position_embeddings=8192,
        rope={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "tiny": DraftShape(
        target_hidden_size=256, vocab_size=4000, aux_layers=(2, 16, 29), hidden_size=256, draft_vocab_size=1000,
        num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=512, max_position_embeddings=8192,
        rope={"rope_type": "default", "rope_theta": 500000.0},
    ),
}  # fmt: skip
SEQUENCE = 2048
STEPS = 7
DECAY = 0.8


def chat_mask(num_tokens: int, share: float, seed: int = 0) -> torch.Tensor:
    """Turns of 50 to 350 tokens that take each other's place until about `share` of the tokens is supervised."""
    if share >= 1:
        return torch.ones(num_tokens, dtype=torch.bool)
    generator = np.random.default_rng(seed)
    mask = np.zeros(num_tokens, dtype=bool)
    at, answer = 0, False
    while at < num_tokens:
        size = int(generator.integers(50, 350) * 2 * (share if answer else 1 - share))
        mask[at : at + size] = answer
        at, answer = at + size, not answer
    return torch.from_numpy(mask)


class Problem:
    """Sequences with random states, a target head, and a draft vocabulary that holds nearly all arg-maxes."""

    def __init__(self, shape: DraftShape, num_tokens: int, share: float, dtype: torch.dtype, device: str) -> None:
        sequence = min(SEQUENCE, num_tokens)
        g = torch.Generator(device).manual_seed(1)
        self.shape, self.num_tokens, self.dtype, self.device, self.sequence = shape, num_tokens, dtype, device, sequence
        self.bounds = list(range(0, num_tokens + 1, sequence))
        masks = [chat_mask(sequence, share, seed) for seed in range(num_tokens // sequence)]
        self.mask = torch.cat(masks).to(device)
        self.token_ids = torch.randint(0, shape.vocab_size, (num_tokens,), generator=g, device=device)
        size = (shape.num_aux, num_tokens, shape.target_hidden_size)
        self.aux = torch.randn(size, generator=g, device=device, dtype=dtype)
        self.last = torch.randn(size[1:], generator=g, device=device, dtype=dtype)
        self.head = torch.randn(shape.vocab_size, size[2], generator=g, device=device, dtype=dtype) * size[2] ** -0.5
        # Arg-maxes of random states are spread evenly: move most of them into the draft vocabulary.
        self.target_ids = torch.arange(shape.draft_vocab_size, device=device)
        self.head[shape.draft_vocab_size :] *= 0.6
        self.draft_ids = torch.full((shape.vocab_size,), -1, device=device)
        self.draft_ids[self.target_ids] = torch.arange(shape.draft_vocab_size, device=device)
        self.best = argmax_of(self.last, self.head, None, lambda x: x)


def make_draft(shape: DraftShape, device: str) -> Eagle3Draft:
    with torch.device(device):
        draft = Eagle3Draft(shape)
    g = torch.Generator(device).manual_seed(2)
    with torch.no_grad():
        for p in draft.parameters():
            p.copy_(torch.ones_like(p) if p.dim() == 1 else torch.randn(p.shape, generator=g, device=device) * 0.02)
    if device == "cuda":
        draft.embed_tokens.to(torch.bfloat16)
    return draft


class Ours:
    def __init__(self, p: Problem, *, rule: MaskRule, compiled: bool, recompute: bool, cached: bool) -> None:
        self.p, self.rule, self.cached = p, rule, cached
        self.draft = make_draft(p.shape, p.device)
        self.options = Options(p.dtype, causal_for(torch.device(p.device), p.dtype), compiled, recompute)
        params = [q for q in self.draft.parameters() if q.requires_grad]
        self.params = params
        self.adam = torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=p.device == "cuda")

    def loss(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and each step's sum over its rows."""
        p = self.p
        rows = plan_rows(p.mask, p.bounds, num_steps=STEPS, rule=self.rule)
        asked = p.last[rows.teacher_rows]
        best = p.best[rows.teacher_rows] if self.cached else argmax_of(asked, p.head, None, lambda x: x)
        teacher = Teacher(asked, p.head[p.target_ids], None, lambda x: x, p.draft_ids[best])
        valid = valid_rows(rows.supervised, rows.teacher, teacher.best)
        decay = DECAY ** torch.arange(STEPS, device=p.device)
        weights = DraftWeights.of(self.draft, p.dtype)
        states = ttt(self.draft, weights, rows, p.token_ids, p.aux, self.options)
        loss, outcome = ttt_loss(states, weights.lm_head, teacher, rows.teacher, valid, decay / valid.sum(1))
        return loss, outcome.loss.sum(1)

    def step(self) -> None:
        loss, _ = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, 0.5, foreach=True)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


class SpecForge:
    def __init__(self, p: Problem, *, attention: str, compact: bool) -> None:
        from specforge.algorithms.eagle3.model import OnlineEagle3Model
        from specforge.modeling.draft import LlamaForCausalLMEagle3
        from specforge.optimizer import BF16Optimizer
        from transformers import LlamaConfig

        s = p.shape
        config = LlamaConfig(
            hidden_size=s.hidden_size, intermediate_size=s.intermediate_size, num_attention_heads=s.num_heads,
            num_key_value_heads=s.num_kv_heads, head_dim=s.head_dim, vocab_size=s.vocab_size,
            rms_norm_eps=s.rms_norm_eps, max_position_embeddings=s.max_position_embeddings, rope_theta=500000.0,
            num_hidden_layers=1, pad_token_id=0,
        )  # fmt: skip
        config.draft_vocab_size = s.draft_vocab_size
        self.p, self.compact = p, compact
        draft = LlamaForCausalLMEagle3(config, attention_backend=attention).to(p.device, p.dtype)
        ours = {n.replace("layers.0.", "midlayer."): q for n, q in make_draft(s, p.device).state_dict().items()}
        ours = {n: q for n, q in ours.items() if not n.startswith("rope")}
        missing = draft.load_state_dict(ours, strict=False)
        assert not missing.unexpected_keys, missing
        t2d = torch.zeros(s.vocab_size, dtype=torch.bool, device=p.device)
        t2d[p.target_ids] = True
        draft.t2d.copy_(t2d)
        draft.d2t.copy_(p.target_ids - torch.arange(s.draft_vocab_size, device=p.device))
        draft.embed_tokens.weight.requires_grad_(False)
        self.model = OnlineEagle3Model(draft, length=STEPS, attention_backend=attention)
        self.optimizer = BF16Optimizer(draft, lr=1e-4, total_steps=1000) if p.dtype == torch.bfloat16 else None
        shape = (p.num_tokens // p.sequence, p.sequence)
        ids, last = p.token_ids.view(shape), p.last.view(*shape, -1)
        self.ids = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
        self.last = torch.cat([last[:, 1:], torch.zeros_like(last[:, :1])], 1)
        self.mask = p.mask.view(shape).clone()
        self.mask[:, -1] = False  # its teacher would be the row behind the end
        self.mask = self.mask[..., None].long()
        self.states = p.aux.transpose(0, 1).flatten(1).view(*shape, -1).contiguous()

    def loss(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and each step's sum over its rows."""
        p = self.p
        extra: dict[str, Any] = {"target": None}
        if self.compact:
            extra |= {"target_hidden_for_compact": self.last, "target_head_weight": p.head}
        else:
            extra["target"] = torch.nn.functional.linear(self.last, p.head)
        out = self.model(
            input_ids=self.ids, attention_mask=torch.ones_like(self.ids), loss_mask=self.mask,
            hidden_states=self.states, **extra,
        )  # fmt: skip
        losses = torch.stack(out[0])
        decay = DECAY ** torch.arange(STEPS, device=losses.device)
        return (losses * decay).sum(), losses.detach() * p.num_tokens

    def step(self) -> None:
        loss, _ = self.loss()
        loss.backward()
        self.optimizer.step()


def measure(step: Callable[[], None], num_tokens: int, device: str, repeats: int = 7) -> dict[str, float]:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    middle = float(np.median(times[3:]))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"tokens_per_s": round(num_tokens / middle), "ms": round(1000 * middle, 1), "first_s": round(times[0], 1),
            "peak_gib": round(peak, 2)}  # fmt: skip


def check(device: str) -> None:
    """Flash against plain attention, compiled against eager, the kernel against PyTorch."""
    p = Problem(SHAPES["tiny"], 512, 0.5, torch.float32, device)
    p.sequence, p.bounds = 128, list(range(0, 513, 128))
    plain = Ours(p, rule="drafted", compiled=False, recompute=False, cached=True)
    exact, _ = plain.loss()
    exact.backward()
    expected = {n: q.grad.clone() for n, q in plain.draft.named_parameters() if q.grad is not None}
    for compiled, recompute in itertools.product((False, True), (False, True)):
        for name, options in {
            "float32 plain": Options(torch.float32, Plain(), compiled, recompute),
            "bfloat16 plain": Options(torch.bfloat16, Plain(), compiled, recompute),
            "bfloat16 flash": Options(torch.bfloat16, Flash(), compiled, recompute),
        }.items():
            p.dtype = options.dtype
            other = Ours(p, rule="drafted", compiled=compiled, recompute=recompute, cached=True)
            other.options = options
            p2 = Problem.__new__(Problem)
            p2.__dict__.update(p.__dict__)
            p2.aux, p2.last, p2.head = (x.to(options.dtype) for x in (p.aux, p.last, p.head))
            other.p = p2
            loss, _ = other.loss()
            loss.backward()
            worst = max(
                float((q.grad - expected[n]).norm() / expected[n].norm())
                for n, q in other.draft.named_parameters()
                if q.grad is not None
            )
            row = {"check": name, "compiled": compiled, "recompute": recompute}
            ratio = round((loss / exact).item(), 6)
            print(json.dumps(row | {"loss": ratio, "worst gradient": round(worst, 6)}), flush=True)


def profile(step: Callable[[], None], out: Path) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        torch.cuda.synchronize()
    table = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=70)
    out.write_text(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--specforge", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPES[args.shape]
    if args.check:
        check(device)
    if args.specforge:
        sys.path.insert(0, str(args.specforge))
        p = Problem(SHAPES["tiny"], 512, 0.5, torch.float32, device)
        theirs = SpecForge(p, attention="sdpa", compact=True).loss()[1]
        ours = Ours(p, rule="usual", compiled=False, recompute=False, cached=False).loss()[1]
        ratio = (ours.detach() / theirs.to(ours.dtype)).tolist()
        print(json.dumps({"loss against SpecForge, float32, by step": [round(r, 6) for r in ratio]}), flush=True)
    for num_tokens in args.tokens:
        for share in args.shares:
            p = Problem(shape, num_tokens, share, torch.bfloat16 if device == "cuda" else torch.float32, device)
            supervised = round(float(p.mask.float().mean()), 3)
            for cached in (True, False):
                ours_step = Ours(p, rule="drafted", compiled=not args.eager, recompute=args.recompute, cached=cached)
                row = measure(ours_step.step, num_tokens, device)
                kind = {"who": "eyas", "arg-max": "cached" if cached else "computed"}
                print(json.dumps(kind | {"tokens": num_tokens, "supervised": supervised} | row), flush=True)
                if args.profile and cached and num_tokens == args.tokens[0]:
                    profile(ours_step.step, args.profile / f"eyas-{share}.txt")
                del ours_step
            torch.cuda.empty_cache()
        if args.specforge:
            for compact in (True, False):
                p = Problem(shape, num_tokens, 1.0, torch.bfloat16, device)
                their_step = SpecForge(p, attention="flex_attention", compact=compact)
                row = measure(their_step.step, num_tokens, device)
                kind = {"who": "SpecForge 0.2.0", "compact teacher": compact, "tokens": num_tokens}
                print(json.dumps(kind | row), flush=True)
                del their_step
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
