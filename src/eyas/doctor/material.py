"""What the doctor looks at: a few samples of the data set with their states, the target's files, and its weights.

Letters: `T` tokens, `F` fields of the data set.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from eyas.config import Config
from eyas.data.table import SampleTable
from eyas.doctor.bench import Bench, OneSample
from eyas.doctor.masks import Masked
from eyas.engine.hf import HfEngine
from eyas.model.eagle3 import Eagle3Draft
from eyas.records import Span, TokenIds, spans_of
from eyas.store.reader import DataSet, Permutation
from eyas.target.files import open_target, quantisation, target_digest, tensor_entries
from eyas.target.head import TargetHead
from eyas.train.loss import argmax_of
from eyas.train.plan import dtype_of
from eyas.train.ranks import device_of
from eyas.train.samples import TrainingSamples

BENCH_SAMPLES = {"held_out": 96, "train": 48}
BENCH_TOKENS = 16384
"""Of each split: states of so many tokens are in memory at most, one sample at least."""
AGAIN_SAMPLES = 24
AGAIN_TOKENS = 4096
"""What the target computes again."""
AUTO_TARGET_BYTES = 4 * 10**9
"""A larger target is not loaded unless `engine.check_layers` says so: as capture does."""
MASK_SAMPLES = 400
PROMPTS = 8
NEW_TOKENS = 48
AGREEMENT_SAMPLES = 6
AGREEMENT_ROWS = 64


@dataclass(frozen=True, slots=True)
class Question:
    """What the target was asked in a sample, to be asked again."""

    number: int
    """Of the sample on the bench."""
    prompt: TokenIds
    num_new_tokens: int
    """As many as the sample's answer has, `NEW_TOKENS` at most."""


class Material:
    """Opened once; states of the chosen samples are in memory."""

    def __init__(self, config: Config, table: SampleTable, states: Path) -> None:
        """ConfigError for a target, StoreError or DataError for a data set or table that cannot be read."""
        assert config.target.path is not None
        self.config, self.table = config, table
        self.target: Path = config.target.path
        self.files = open_target(self.target)
        self.digest = target_digest(self.target)
        self.quantised = quantisation(self.files.config)
        self.data = DataSet(states)
        self.spec = self.data.spec
        self.samples = TrainingSamples(table, self.data)
        self.device = torch.device(device_of(config.train.device))
        self.dtype = dtype_of(config.train, self.device)
        self.held_out = frozenset(self.samples.held_out.tolist())
        self.chosen = self._choose()
        """Indices in the data set: what is tried on the bench."""
        self.stored = [self.data[index].tensors() for index in self.chosen]
        """`[F, T, H]` of each."""
        self._head: TargetHead | None = None

    @property
    def head(self) -> TargetHead:
        if self._head is None:
            self._head = TargetHead.load(self.target, trust_remote_code=self.config.target.trust_remote_code)
        return self._head

    @property
    def norm(self) -> Literal["pre", "post"] | None:
        """Of the stored last states, as the data set says."""
        norm = self.spec.last_hidden_norm
        return None if norm == "unknown" else norm

    def token_ids(self, i: int) -> TokenIds:
        """Of the `i`-th chosen sample."""
        return self.samples.token_ids(self.chosen[i])

    def _choose(self) -> list[int]:
        """Held-out samples first, then those to train on; the same at every look."""
        chosen: list[int] = []
        for split, of in (("held_out", self.samples.held_out), ("train", self.samples.train)):
            tokens = num_picked = 0
            for index in of[Permutation(self.samples.ids[of], seed=0).indices()].tolist() if len(of) else ():
                size = self.samples.num_tokens(index)
                if num_picked == BENCH_SAMPLES[split] or (num_picked and tokens + size > BENCH_TOKENS):
                    break
                chosen.append(index)
                num_picked, tokens = num_picked + 1, tokens + size
        return chosen

    def few(self) -> list[int]:
        """Numbers of chosen samples, from both splits in turn: few enough for the target to compute."""
        sides = [
            [i for i, index in enumerate(self.chosen) if (index in self.held_out) is side] for side in (True, False)
        ]
        turns = [side[at] for at in range(len(self.chosen)) for side in sides if at < len(side)]
        found: list[int] = []
        tokens = 0
        for i in turns:
            tokens += self.samples.num_tokens(self.chosen[i])
            if len(found) == AGAIN_SAMPLES or (found and tokens > AGAIN_TOKENS):
                break
            found.append(i)
        return found

    def questions(self) -> list[Question]:
        """The first questions of the first samples, held-out ones first."""
        found: list[Question] = []
        for i, index in enumerate(self.chosen):
            spans = spans_of(self.samples.loss_mask(index))
            if spans and spans[0][0] >= 2:
                start, end = spans[0]
                found.append(Question(i, self.token_ids(i)[:start], min(end - start, NEW_TOKENS)))
            if len(found) == PROMPTS:
                break
        return found

    def bench(self, numbers: Sequence[int], draft: Eagle3Draft) -> Bench | None:
        """These of the chosen samples, with the drafter's layers of those that are stored; None without any draft."""
        assert self.norm is not None
        at = [self.spec.aux_layers.index(k) for k in draft.shape.aux_layers if k in self.spec.aux_layers]
        ones = [
            OneSample(
                self.token_ids(i),
                self.samples.loss_mask(self.chosen[i]),
                self.stored[i][[*at, -1]],
                self.chosen[i] in self.held_out,
            )
            for i in numbers
        ]
        bench = Bench(ones, self.head.on(self.device, self.dtype), self.norm)
        return bench if bench.num_rows else None

    def agreement(self, numbers: Sequence[int], norm: Literal["pre", "post"]) -> float:
        """Share of supervised tokens that are the target's likeliest, where the last states are read so."""
        hits = total = 0
        for i in numbers[:AGREEMENT_SAMPLES]:
            ids, mask = self.token_ids(i), self.samples.loss_mask(self.chosen[i])
            at = np.flatnonzero(mask[1:])[:AGREEMENT_ROWS]
            if len(at):
                rows = self.stored[i][-1].float().numpy()[at]
                _, best = self.head.next_logprobs(rows, ids[at + 1], norm)
                hits, total = hits + int((best == ids[at + 1]).sum()), total + len(at)
        return hits / max(1, total)

    @torch.no_grad()
    def likeliest(self) -> dict[int, npt.NDArray[np.int64]]:
        """`[T]` by index: the target's likeliest token behind each token of the chosen samples."""
        head = self.head.on(self.device, self.dtype)
        found = {}
        for index, tensors in zip(self.chosen, self.stored, strict=True):
            last = tensors[-1].to(self.device, self.dtype)
            last = head.norm(last) if self.norm == "pre" else last
            found[index] = argmax_of(last, head.weight, head.bias, head.logit_map).cpu().numpy()
        return found

    def masked(self, likeliest: dict[int, npt.NDArray[np.int64]]) -> list[Masked]:
        """The chosen samples and more, since masks are cheap, as the table masks them."""
        used = np.concatenate([self.samples.held_out, self.samples.train])
        order = used[Permutation(self.samples.ids[used], seed=0).indices()][:MASK_SAMPLES]
        return [
            Masked(self.samples.token_ids(i), spans_of(self.samples.loss_mask(i)), likeliest.get(i))
            for i in dict.fromkeys([*self.chosen, *order.tolist()])
        ]

    def spans_of(self, wanted: Container[str]) -> dict[str, tuple[Span, ...]]:
        """The table's spans of the samples with these ids, captured or not."""
        found: dict[str, tuple[Span, ...]] = {}
        for batch in self.table.batches(["sample_id", "loss_spans"]):
            ids = [sample_id.hex() for sample_id in batch.column("sample_id").to_pylist()]
            for i in (i for i, sample_id in enumerate(ids) if sample_id in wanted):
                edges: list[int] = batch.column("loss_spans")[i].as_py()
                found[ids[i]] = tuple(zip(edges[::2], edges[1::2], strict=True))
        return found

    def engine(self, layers: Sequence[int]) -> HfEngine:
        """The target in this process, weights not loaded yet, as `engine` of the configuration computes."""
        engine = self.config.engine
        if engine.kind != "hf":
            # What stands there is for another engine.
            engine = engine.model_copy(update={"kind": "hf", "extra": {}})
        return HfEngine(self.config.target, engine, tuple(layers))

    def why_no_target(self) -> str:
        """Why the target is not loaded into this process; empty where it may be."""
        how = self.config.engine.check_layers
        size = sum(entry.end - entry.start for entry in tensor_entries(self.files).values())
        if how == "off":
            return "engine.check_layers is off: the target is not loaded"
        if how == "target" or size <= AUTO_TARGET_BYTES:
            return ""
        return f"the target has {size / 1e9:.0f} GB; engine.check_layers = 'target' loads it all the same"


def rows_of_answers(bench: Bench, questions: Sequence[Question]) -> npt.NDArray[Any]:
    """`[n]` bool: rows of the bench that draft a token of these questions' answers."""
    chosen = np.zeros(bench.num_rows, np.bool_)
    for question in questions:
        end = len(question.prompt) + question.num_new_tokens
        chosen |= (bench.sample == question.number) & (bench.position + 2 < end)
    return chosen
