"""The chain of checks, cheap ones first: why are so few drafted tokens accepted?

On paper everything is checked, whatever is broken elsewhere. What a drafter does, and what a server does, is judged
only where nothing before it is broken: else every link behind a broken one would look broken, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from eyas.config import Config, EngineConfig
from eyas.data.table import SampleTable
from eyas.doctor import behaviour, masks, paper, serving, states, text
from eyas.doctor.bench import Bench, Drafts, OneSample
from eyas.doctor.findings import Finding, Report, broken, first_broken, ok, unknown
from eyas.doctor.live import Live, decode_prompts
from eyas.doctor.paper import Paper
from eyas.doctor.server import Served, Server
from eyas.doctor.serving import Ours
from eyas.engine.hf import HfEngine
from eyas.errors import ConfigError, EyasError
from eyas.log import Progress
from eyas.model import checkpoint as engine_layout
from eyas.model.create import draft_shape, plain_rope, standard_rope
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.vocab_map import VocabMap
from eyas.records import Span, TokenIds, spans_of
from eyas.store.reader import DataSet, Permutation
from eyas.target.files import TargetFiles, open_target, quantisation, target_digest, tensor_entries
from eyas.target.head import TargetHead
from eyas.train.baseline import BaselineCounts
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
BASELINE_SAMPLES = 20_000
MASK_SAMPLES = 400
PROMPTS = 8
NEW_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be examined."""

    draft: Path
    table: SampleTable
    states: Path
    server: str = ""


def examine(config: Config, ask: Ask, progress: Progress, tell: Callable[[Finding], None] = lambda _: None) -> Report:
    """Every check; `tell` hears each finding when it is there.

    Raises ConfigError for a checkpoint that cannot be read at all, or a server that does not answer; StoreError and
    DataError for a data set or table that cannot be read.
    """
    return _Examination(config, ask, progress, tell).run()


class _Examination:
    def __init__(self, config: Config, ask: Ask, progress: Progress, tell: Callable[[Finding], None]) -> None:
        assert config.target.path is not None
        self.config, self.ask, self.progress, self.tell = config, ask, progress, tell
        self.findings: list[Finding] = []
        self.target: Path = config.target.path
        self.paper = Paper.read(ask.draft)
        self.files: TargetFiles = open_target(self.target)
        self.data = DataSet(ask.states)
        self.spec = self.data.spec
        self.samples = TrainingSamples(ask.table, self.data)
        self.digest = target_digest(self.target)
        self.quantised = quantisation(self.files.config)
        self.draft: Eagle3Draft | None = None
        self.vocab_map: VocabMap | None = None
        self.stored_dtype = "float32"
        self.bench: Bench | None = None
        self.drafts: Drafts | None = None
        self.seen: list[states.Seen] = []
        self.live: Live | None = None
        self.ours: list[Ours] = []

    def run(self) -> Report:
        self._say("the target")
        self._found(paper.judge_target(self.paper, self.spec, self.digest, self.quantised, self.files.config))
        self.head = TargetHead.load(self.target, trust_remote_code=self.config.target.trust_remote_code)
        self.device = torch.device(device_of(self.config.train.device))
        self.dtype = dtype_of(self.config.train, self.device)
        self.chosen = self._choose()
        self.stored = [self.data[i].tensors() for i in self.chosen]
        self._states()
        self._text_and_masks()
        self._paper()
        self._load()
        self._behave()
        if self.ask.server:
            self._serve()
        return Report(str(self.ask.draft), str(self.ask.states), self.ask.server, tuple(self.findings))

    # -- the data set --------------------------------------------------------------------------------------------------

    def _choose(self) -> list[int]:
        """Samples that everything is tried on: held-out ones first, then train ones; the same at every look."""
        chosen: list[int] = []
        for split, of in (("held_out", self.samples.held_out), ("train", self.samples.train)):
            if not len(of):
                continue
            tokens = 0
            order = Permutation(self.samples.ids[of], seed=0).indices()
            picked: list[int] = []
            for index in of[order].tolist():
                size = self.samples.num_tokens(index)
                if len(picked) == BENCH_SAMPLES[split] or (picked and tokens + size > BENCH_TOKENS):
                    break
                picked.append(index)
                tokens += size
            chosen += picked
        return chosen

    def _states(self) -> None:
        """Are the stored states the target's, and normed as the data set says?"""
        why = self._why_no_target()
        upstream = first_broken(self.findings, ["target"])
        self.again: list[int] = []
        if not why and upstream is None:
            self._say("a few samples again, by the target itself")
            layers = {*self.spec.aux_layers, *(k for ids in self.paper.told_layers().values() for k in ids)}
            indices = states.indices_around(layers, self.spec.num_layers)
            try:
                engine = self._engine(indices)
                self.again = self._few(AGAIN_SAMPLES, AGAIN_TOKENS)
                self.seen = states.capture_again(
                    engine, indices, [self.samples.token_ids(self.chosen[i]) for i in self.again]
                )
                engine.close()
            except EyasError as error:
                why, self.seen, self.again = str(error), [], []
        if upstream is not None:
            self._found(unknown("states", _behind(upstream)))
            self._found(unknown("norm", _behind(upstream)))
            return
        if self.seen:
            stored = [
                {k: self.stored[i][at].float().numpy() for at, k in enumerate(self.spec.aux_layers)} for i in self.again
            ]
            self._found(states.judge_states(self.spec, stored, self.seen))
        else:
            self._found(unknown("states", why))
        head = self.head.on(self.device, torch.float32)
        order = self.again or self._few(AGAIN_SAMPLES, AGAIN_TOKENS)
        last = [self.stored[i][-1] for i in order]
        agreement = {norm: self._agreement(order, norm) for norm in ("pre", "post")}
        self._found(states.judge_norm(self.spec, last, head, self.head.norm_scale(), agreement, self.seen))

    def _agreement(self, order: Sequence[int], norm: Literal["pre", "post"]) -> float:
        """Share of supervised tokens that are the target's likeliest, where the last states are read so."""
        hits = total = 0
        for i in order[:6]:
            ids, mask = self.samples.token_ids(self.chosen[i]), self.samples.loss_mask(self.chosen[i])
            at = np.flatnonzero(mask[1:])[:64]
            if len(at):
                rows = self.stored[i][-1].float().numpy()[at]
                _, best = self.head.next_logprobs(rows, ids[at + 1], norm)
                hits += int((best == ids[at + 1]).sum())
                total += len(at)
        return hits / max(1, total)

    def _text_and_masks(self) -> None:
        self._say("template and masks")
        config, table = self.config, self.ask.table
        loaded = text.Text.load(config.target, config.data)
        again: text.Rerendered | str = (
            loaded if isinstance(loaded, str) else text.rerender(config.data, config.target, loaded)
        )
        upstream = first_broken(self.findings, ["target", "states", "norm"])
        likeliest = None if upstream is not None or self.spec.last_hidden_norm == "unknown" else self._likeliest()
        masked = [self._masked(index, (likeliest or {}).get(index)) for index in self._for_masks()]
        resplit = None
        if likeliest is not None and not isinstance(loaded, str):
            told = [(m.token_ids, m.spans, m.likeliest) for m in masked if m.likeliest is not None]
            resplit = text.resplit_share(loaded.tokenizer, told)
        spans = self._spans_of(again.masks) if isinstance(again, text.Rerendered) else {}
        self._found(
            text.judge_template(
                table.metadata, loaded, config.target, config.data, samples=[m.token_ids for m in masked], again=again,
                in_table=len(spans), resplit=resplit,
            )
        )  # fmt: skip
        derived = masks.compare_masks(again.masks, spans) if isinstance(again, text.Rerendered) else None
        self._found(
            masks.judge_mask(
                masked,
                num_supervised=table.metadata.num_supervised,
                edges=masks.agreement(masked),
                prompt=None if isinstance(loaded, str) else loaded.opening,
                derived=derived,
                why_not=again if isinstance(again, str) else "nothing tells where answers begin",
            )
        )
        self.asked = again.asked if isinstance(again, text.Rerendered) else ()
        self.no_text = again if isinstance(again, str) else ""

    def _for_masks(self) -> list[int]:
        """More samples than states are read of, since masks are cheap."""
        used = np.concatenate([self.samples.held_out, self.samples.train])
        order = Permutation(self.samples.ids[used], seed=0).indices()
        return list(dict.fromkeys([*self.chosen, *used[order][:MASK_SAMPLES].tolist()]))

    def _masked(self, index: int, likeliest: Any) -> masks.Masked:
        return masks.Masked(self.samples.token_ids(index), spans_of(self.samples.loss_mask(index)), likeliest)

    def _likeliest(self) -> dict[int, Any]:
        """The target's likeliest token behind each token of the samples on the bench."""
        head = self.head.on(self.device, self.dtype)
        found = {}
        for index, tensors in zip(self.chosen, self.stored, strict=True):
            last = tensors[-1].to(self.device, self.dtype)
            last = head.norm(last) if self.spec.last_hidden_norm == "pre" else last
            with torch.no_grad():
                found[index] = argmax_of(last, head.weight, head.bias, head.logit_map).cpu().numpy()
        return found

    def _spans_of(self, wanted: Any) -> dict[str, tuple[Span, ...]]:
        """The table's spans of these samples, captured or not."""
        found: dict[str, tuple[Span, ...]] = {}
        for batch in self.ask.table.batches(["sample_id", "loss_spans"]):
            for sample_id, edges in zip(batch.column("sample_id").to_pylist(), batch.column("loss_spans"), strict=True):
                if sample_id.hex() in wanted:
                    flat = edges.as_py()
                    found[sample_id.hex()] = tuple(zip(flat[::2], flat[1::2], strict=True))
        return found

    # -- the checkpoint ------------------------------------------------------------------------------------------------

    def _paper(self) -> None:
        """Everything that needs no drafter in memory."""
        self._say("the checkpoint on paper")
        self.on_paper: dict[str, Finding] = {
            "aux": paper.judge_aux(self.paper),
            "layers": paper.judge_layers(self.paper, self.spec, self.data.fingerprint, self.config.evaluate.aux_layers),
            "vocab": paper.judge_map(self.paper, self.spec.vocab_size),
        }

    def _load(self) -> None:
        given = self.config.evaluate.aux_layers
        try:
            draft, vocab_map, info = engine_layout.load(
                self.ask.draft, target=self.target, aux_layers=given,
                trust_remote_code=self.config.target.trust_remote_code,
            )  # fmt: skip
        except ConfigError as error:
            known = first_broken([*self.findings, *self.on_paper.values()], ["target", "aux", "layers", "vocab"])
            why = str(error).removeprefix(f"draft {self.ask.draft}: ")
            if known is not None:
                self._found(unknown("files", f"not loaded ({why}), which '{known.link}' explains"))
            else:
                self._found(broken("files", why, "export the checkpoint anew from the training"))
            return
        self.draft, self.vocab_map, self.stored_dtype = draft, vocab_map, info.dtype
        self._found(ok("files", f"{len(self.paper.shapes)} tensors, {info.layout} layout, {info.dtype}"))

    def _behave(self) -> None:
        """The drafter on the bench, one link mended at a time."""
        self._say("the drafter on stored states")
        on_paper, samples = self.on_paper, self.samples
        draft, vocab_map = self.draft, self.vocab_map
        upstream = first_broken(self.findings, ["target", "states", "norm", "files"])
        blocked = first_broken([*self.findings, *on_paper.values()], ["aux", "layers", "vocab"])
        fits = draft is not None and set(draft.shape.aux_layers) <= set(self.spec.aux_layers)
        bench: Bench | None = None
        if (
            draft is not None
            and vocab_map is not None
            and upstream is None
            and fits
            and self.spec.last_hidden_norm != "unknown"
        ):
            bench = self._bench(range(len(self.chosen)), draft)
            bench = bench if bench.num_rows else None
        self._found(on_paper["aux"])
        self._found(self._layers(on_paper["layers"], bench is not None))
        drafts = bench.run(draft) if bench is not None and draft is not None else None
        counts = samples.supervised_counts(self.spec.vocab_size)
        finding = on_paper["vocab"]
        if (
            finding.state == "ok"
            and vocab_map is not None
            and bench is not None
            and drafts is not None
            and draft is not None
        ):
            rows = behaviour.find_head_rows(draft.lm_head.weight.detach().cpu(), vocab_map.target_ids, self.head)
            finding = behaviour.judge_vocab(bench, drafts, vocab_map, counts, rows, finding.text)
        self._found(finding)
        able = bench is not None and blocked is None and first_broken(self.findings, ["layers", "vocab"]) is None
        trial = (bench, drafts) if able else (None, None)
        self._embedding(*trial)
        self._rope(*trial)
        self._accuracy(bench, drafts)
        self._decoding(bench, drafts)

    def _bench(self, order: Sequence[int], draft: Eagle3Draft) -> Bench:
        """These of the chosen samples, with the drafter's own layers of those that are stored."""
        at = [self.spec.aux_layers.index(k) for k in draft.shape.aux_layers if k in self.spec.aux_layers]
        head = self.head.on(self.device, self.dtype)
        held_out = set(self.samples.held_out.tolist())
        one = [
            OneSample(
                self.samples.token_ids(self.chosen[i]),
                self.samples.loss_mask(self.chosen[i]),
                self.stored[i][[*at, -1]],
                self.chosen[i] in held_out,
            )
            for i in order
        ]
        norm = self.spec.last_hidden_norm
        assert norm != "unknown"
        return Bench(one, head, norm)

    def _layers(self, finding: Finding, able: bool) -> Finding:
        """Paper first; then what the weights want, from states that were captured again."""
        draft, vocab_map = self.draft, self.vocab_map
        if finding.state == "broken" or draft is None or vocab_map is None or not self.seen:
            return finding
        upstream = first_broken(self.findings, ["target", "states", "norm"])
        if upstream is not None or self.on_paper["vocab"].state == "broken" or self.spec.last_hidden_norm == "unknown":
            return finding
        indices = set(self.seen[0].hidden)
        if not set(draft.shape.aux_layers) <= indices:
            return finding
        bench = self._bench(self.again, draft)
        if not bench.num_rows:
            return finding
        found = states.judge_shift(bench, draft, vocab_map, self.seen, self.spec.num_layers)
        if found.state != "ok":
            return found
        both = {**finding.numbers, **found.numbers}
        return dataclasses.replace(finding, text=f"{finding.text}; {found.text}", numbers=both)

    def _embedding(self, bench: Bench | None, drafts: Drafts | None) -> None:
        draft = self.draft
        if not paper.has_embedding(self.paper):
            self._found(ok("embedding", "not in the checkpoint: engines share the target's"))
        elif draft is None:
            self._found(unknown("embedding", "the checkpoint could not be loaded"))
        elif draft.shape.own_embedding:
            self._found(ok("embedding", f"its own, for another hidden size ({draft.shape.hidden_size})"))
        else:
            self._found(
                behaviour.judge_embedding(
                    bench, drafts, draft, self.vocab_map, self.head.embedding(), self.stored_dtype
                )
            )

    def _rope(self, bench: Bench | None, drafts: Drafts | None) -> None:
        try:
            fresh = draft_shape(self.files.config, self.spec)
            here = plain_rope(standard_rope(self.paper.layer))
        except ConfigError as error:
            self._found(unknown("rope", str(error)))
            return
        positions = self.paper.layer.get("max_position_embeddings")
        longest = int(self.samples.token_counts.max())
        embedding = first_broken(self.findings, ["embedding"])
        if embedding is not None:
            bench = drafts = None
        self._found(
            behaviour.judge_rope(
                bench, drafts, self.draft, self.vocab_map, here, fresh,
                positions if isinstance(positions, int) else None, longest,
            )
        )  # fmt: skip

    def _accuracy(self, bench: Bench | None, drafts: Drafts | None) -> None:
        upstream = first_broken(self.findings, _BEFORE_ACCURACY)
        if bench is None or drafts is None or self.vocab_map is None:
            self._found(unknown("accuracy", _behind(upstream) if upstream else self._why_no_bench()))
            return
        outcome = bench.judge(drafts, self.vocab_map)
        if upstream is not None:
            shown = f"step 0: {outcome.of(bench.held_out).accuracy:.3f} held out"
            self._found(unknown("accuracy", f"{_behind(upstream)}; {shown}"))
            return
        counting = BaselineCounts()
        for index in self.samples.train[:BASELINE_SAMPLES].tolist():
            counting.add(self.samples.token_ids(index), self.samples.loss_mask(index))
        recorded = (
            self.paper.own.get("held_out") if self.paper.own.get("fingerprint") == self.data.fingerprint else None
        )
        self._found(behaviour.judge_accuracy(bench, outcome, counting.baseline(), recorded))

    def _why_no_bench(self) -> str:
        if self.draft is None:
            return "the checkpoint could not be loaded"
        missing = sorted(set(self.draft.shape.aux_layers) - set(self.spec.aux_layers))
        if missing:
            return f"the data set does not hold hidden states {missing}, which the drafter reads"
        return "no row of the samples is drafted, or the data set does not say how its last state is normed"

    # -- decoding and serving ------------------------------------------------------------------------------------------

    def _decoding(self, bench: Bench | None, drafts: Drafts | None) -> None:
        upstream = first_broken(self.findings, _BEFORE_DECODING)
        why = self._why_no_target()
        if upstream is not None or why or self.draft is None or self.vocab_map is None:
            self._found(
                unknown("decoding", _behind(upstream) if upstream else why or "the checkpoint could not be loaded")
            )
            return
        self._say("decoding a few prompts")
        order, prompts = self._prompts()
        if not prompts:
            self._found(unknown("decoding", "no sample has a prompt of two tokens or more"))
            return
        try:
            self.live = Live.load(self._engine(self.draft.shape.aux_layers), self.draft, self.vocab_map, self.target)
            chain = bench.supervised.shape[0] if bench is not None else 3
            decoded = decode_prompts(self.live, prompts, chain=chain, max_new_tokens=NEW_TOKENS)
        except EyasError as error:
            self._found(unknown("decoding", str(error)))
            return
        self.ours = decoded
        if bench is None or drafts is None:
            self._found(unknown("decoding", self._why_no_bench()))
            return
        outcome = bench.judge(drafts, self.vocab_map)
        of = np.isin(np.arange(len(bench.samples)), order)
        self._found(serving.judge_decoding(outcome.of(of), decoded, chain))

    def _prompts(self) -> tuple[list[int], list[TokenIds]]:
        """The first questions of the first samples, held-out ones first; and the samples' numbers on the bench."""
        order, prompts = [], []
        for i, index in enumerate(self.chosen):
            mask = self.samples.loss_mask(index)
            start = int(np.argmax(mask)) if mask.any() else 0
            if start >= 2:
                order.append(i)
                prompts.append(self.samples.token_ids(index)[:start])
            if len(prompts) == PROMPTS:
                break
        return order, prompts

    def _serve(self) -> None:
        self._say(f"the server at {self.ask.server}")
        with Server(self.ask.server) as server:
            about = server.about
            _, prompts = self._prompts()
            answers, failures = [], []
            for prompt in prompts:
                found = server.answer(prompt.tolist(), NEW_TOKENS)
                if isinstance(found, str):
                    failures.append(found)
                    break
                answers.append(found)
            served = Served(tuple(answers), tuple(failures))
            # The same chains here as there.
            chain = about.num_draft_tokens or served.chain or 3
            ours = self.ours
            if self.live is not None and ours:
                ours = decode_prompts(self.live, prompts[: len(answers)], chain=chain, max_new_tokens=NEW_TOKENS)
            length = 1 + sum(o.accepted for o in ours) / max(1, sum(o.verifications for o in ours)) if ours else None
            self._found(serving.judge_engine(about, served, length))
            self._found(serving.judge_served(about, self.paper, self.target, self.digest, self.quantised, served, ours))
            self._found(self._tokens(server))
            upstream = first_broken(self.findings)
            if upstream is not None:
                self._found(unknown("serving", _behind(upstream)))
            else:
                self._found(serving.judge_serving(about, served, ours, chain))

    def _tokens(self, server: Server) -> Finding:
        pairs, failure = [], self.no_text
        for messages, ids in self.asked[:PROMPTS]:
            found = server.tokenize(messages)
            if isinstance(found, str):
                failure = found
                break
            pairs.append((ids, found))
        return serving.judge_tokens(pairs, failure)

    # -- small ---------------------------------------------------------------------------------------------------------

    def _few(self, count: int, tokens: int) -> list[int]:
        """Some of the chosen samples, from both splits in turn: few enough for the target to compute."""
        held_out = set(self.samples.held_out.tolist())
        mine = [i for i, index in enumerate(self.chosen) if index in held_out]
        others = [i for i, index in enumerate(self.chosen) if index not in held_out]
        turns = [i for pair in zip(mine, others, strict=False) for i in pair]
        turns += mine[len(others) :] + others[len(mine) :]
        found: list[int] = []
        for i in turns:
            tokens -= self.samples.num_tokens(self.chosen[i])
            if len(found) == count or (found and tokens < 0):
                break
            found.append(i)
        return found

    def _engine(self, layers: Sequence[int]) -> HfEngine:
        engine: EngineConfig = self.config.engine
        if engine.kind != "hf":
            # What stands there is for another engine.
            engine = engine.model_copy(update={"kind": "hf", "extra": {}})
        return HfEngine(self.config.target, engine, tuple(layers))

    def _why_no_target(self) -> str:
        """Why the target is not loaded into this process; empty where it may be."""
        how = self.config.engine.check_layers
        size = sum(entry.end - entry.start for entry in tensor_entries(self.files).values())
        if how == "off":
            return "engine.check_layers is off: the target is not loaded"
        if how == "target" or size <= AUTO_TARGET_BYTES:
            return ""
        return f"the target has {size / 1e9:.0f} GB; engine.check_layers = 'target' loads it all the same"

    def _found(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.tell(finding)

    def _say(self, what: str) -> None:
        self.progress.show(f"doctor: {what}", force=True)


_BEFORE_ACCURACY = (
    "target", "states", "norm", "template", "mask", "files", "aux", "layers", "vocab", "embedding", "rope",
)  # fmt: skip
_BEFORE_DECODING = (*_BEFORE_ACCURACY, "accuracy")


def _behind(upstream: Finding) -> str:
    return f"'{upstream.link}' is broken, which would spoil it"
