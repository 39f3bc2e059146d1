"""The chain of checks, cheap ones first: why are so few drafted tokens accepted?

On paper everything is checked, whatever is broken elsewhere. What a drafter does, and what a server does, is judged
only where nothing before it is broken: else every link behind a broken one would look broken, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.config import Config
from eyas.data.table import SampleTable
from eyas.doctor import behaviour, masks, paper, serving, states, text
from eyas.doctor.behaviour import Trial
from eyas.doctor.bench import STEPS
from eyas.doctor.findings import LINKS, Finding, Report, broken, first_broken, ok, unknown
from eyas.doctor.live import Live, decode_questions
from eyas.doctor.material import PROMPTS, Material, rows_of_answers
from eyas.doctor.paper import Paper
from eyas.doctor.server import interview
from eyas.doctor.serving import Ours
from eyas.engine.hf import HfEngine
from eyas.errors import ConfigError, EyasError
from eyas.evaluate.prompts import stop_ids
from eyas.log import Progress
from eyas.model import checkpoint as engine_layout
from eyas.model.create import draft_shape, plain_rope, standard_rope
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.vocab_map import VocabMap
from eyas.train.baseline import BaselineCounts

BASELINE_SAMPLES = 20_000
_DATA = ("target", "states", "norm")
_BEFORE_ACCURACY = tuple(LINKS)[: tuple(LINKS).index("accuracy")]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be examined."""

    draft: Path
    table: SampleTable
    states: Path
    server: str = ""


def examine(config: Config, ask: Ask, progress: Progress, tell: Callable[[Finding], None] = lambda _: None) -> Report:
    """Every check; `tell` hears each finding when it is there.

    Raises ConfigError for a checkpoint that cannot be read at all or a server that does not answer; StoreError and
    DataError for a data set or table that cannot be read.
    """
    written = Paper.read(ask.draft)
    if ask.server:
        # That nobody is there is told before anything is computed.
        interview(ask.server, config)
    return _Examination(Material(config, ask.table, ask.states), written, ask, progress, tell).run()


class _Examination:
    def __init__(
        self, material: Material, written: Paper, ask: Ask, progress: Progress, tell: Callable[[Finding], None]
    ) -> None:
        self.material, self.paper, self.ask, self.progress, self.tell = material, written, ask, progress, tell
        self.config, self.spec = material.config, material.spec
        self.findings: list[Finding] = []
        self.engine: HfEngine | None = None
        self.again: list[int] = []
        self.seen: list[states.Seen] = []
        self.rendered: text.Rerendered | str = ""
        self.draft: Eagle3Draft | None = None
        self.vocab_map: VocabMap | None = None
        self.dtype = "float32"
        self.live: Live | None = None
        self.ours: list[Ours] = []

    def run(self) -> Report:
        material = self.material
        self._say("the target")
        target = paper.judge_target(self.paper, self.spec, material.digest, material.quantised, material.files.config)
        self._found(target)
        try:
            self._states()
            self._text_and_masks()
            self._checkpoint()
            if self.ask.server:
                self._serve()
        finally:
            if self.engine is not None:
                self.engine.close()
        return Report(str(self.ask.draft), str(self.ask.states), self.ask.server, tuple(self.findings))

    # -- the data set --------------------------------------------------------------------------------------------------

    def _states(self) -> None:
        """Are the stored states the target's, and normed as the data set says?"""
        material, spec = self.material, self.spec
        if upstream := self._broken("target"):
            for link in ("states", "norm"):
                self._found(unknown(link, _behind(upstream)))
            return
        why = material.why_no_target()
        if not why:
            self._say("a few samples again, by the target itself")
            named = {k for ids in self.paper.told_layers().values() for k in ids}
            layers = {*spec.aux_layers, *named, *(self.config.evaluate.aux_layers or ())}
            indices = states.indices_around(layers, spec.num_layers)
            try:
                self.engine = material.engine(indices)
                self.again = material.few()
                self.seen = states.capture_again(self.engine, indices, [material.token_ids(i) for i in self.again])
            except EyasError as error:
                why, self.seen, self.again = str(error), [], []
        if self.seen:
            layered = [
                {k: material.stored[i][at].float().numpy() for at, k in enumerate(spec.aux_layers)} for i in self.again
            ]
            self._found(states.judge_states(spec, layered, self.seen))
        else:
            self._found(unknown("states", why))
        numbers = self.again or material.few()
        self._found(
            states.judge_norm(
                spec,
                [material.stored[i][-1] for i in numbers],
                material.head.on("cpu", torch.float32),
                material.head.norm_scale(),
                {"pre": material.agreement(numbers, "pre"), "post": material.agreement(numbers, "post")},
                self.seen,
            )
        )

    def _text_and_masks(self) -> None:
        self._say("template and masks")
        material, config, metadata = self.material, self.config, self.material.table.metadata
        loaded = text.Text.load(config.target, config.data)
        self.rendered = loaded if isinstance(loaded, str) else text.rerender(config.data, config.target, loaded)
        again = self.rendered
        able = self._broken(*_DATA) is None and material.norm is not None
        masked = material.masked(material.likeliest() if able else {})
        told = [(m.token_ids, m.spans, m.likeliest) for m in masked if m.likeliest is not None]
        resplit = None if isinstance(loaded, str) or not told else text.resplit_share(loaded.tokenizer, told)
        known = {} if isinstance(again, str) else material.spans_of(again.masks)
        self._found(
            text.judge_template(
                metadata,
                loaded,
                config.target,
                config.data,
                samples=[m.token_ids for m in masked],
                again=again,
                in_table=len(known),
                resplit=resplit,
            )
        )
        self._found(
            masks.judge_mask(
                masked,
                num_supervised=metadata.num_supervised,
                edges=masks.agreement(masked),
                prompt=None if isinstance(loaded, str) else loaded.opening,
                derived=None if isinstance(again, str) else masks.compare_masks(again.masks, known),
                why_not=again if isinstance(again, str) else "nothing tells where answers begin",
            )
        )

    # -- the checkpoint ------------------------------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        self._say("the checkpoint on paper")
        given, spec, written = self.config.evaluate.aux_layers, self.spec, self.paper
        aux = paper.judge_aux(written)
        layers = paper.judge_layers(written, spec, self.material.data.fingerprint, given)
        vocab = paper.judge_map(written, spec.vocab_size)
        self._load([aux, layers, vocab])
        self._found(aux)
        self._say("the drafter on stored states")
        self._found(self._layers(layers, vocab))
        trial = self._trial()
        self._found(self._vocab(vocab, trial))
        # With a map that is broken nothing is right, and nothing could make it better.
        able = trial if self._broken("aux", "layers", "vocab") is None else None
        self._found(self._embedding(able))
        self._found(self._rope(able if self._broken("embedding") is None else None))
        self._found(self._accuracy(trial))
        self._found(self._decoding(trial))

    def _load(self, written: list[Finding]) -> None:
        given, target = self.config.evaluate.aux_layers, self.config.target
        try:
            self.draft, self.vocab_map, info = engine_layout.load(
                self.ask.draft, target=target.path, aux_layers=given, trust_remote_code=target.trust_remote_code
            )
        except ConfigError as error:
            why = str(error).removeprefix(f"draft {self.ask.draft}: ")
            known = first_broken([*self.findings, *written])
            if known is not None:
                self._found(unknown("files", f"not loaded, as '{known.link}' is broken ({why})"))
            else:
                self._found(broken("files", why, "export the checkpoint anew from the training"))
            return
        self.dtype = info.dtype
        self._found(ok("files", f"{len(self.paper.shapes)} tensors, {info.layout} layout, {info.dtype}"))

    def _trial(self) -> Trial | None:
        """The drafter as it is, on what is stored; None where that says nothing."""
        draft, vocab_map = self.draft, self.vocab_map
        if draft is None or vocab_map is None or self.material.norm is None or self._broken(*_DATA) is not None:
            return None
        if not set(draft.shape.aux_layers) <= set(self.spec.aux_layers):
            return None
        bench = self.material.bench(range(len(self.material.chosen)), draft)
        return None if bench is None else Trial(bench, draft, vocab_map, bench.run(draft))

    def _layers(self, finding: Finding, vocab: Finding) -> Finding:
        """Paper first; then what the weights want, from states that were computed again."""
        draft, vocab_map = self.draft, self.vocab_map
        blocked = self._broken(*_DATA) is not None or vocab.state == "broken" or self.material.norm is None
        if finding.state != "ok" or draft is None or vocab_map is None or not self.seen or blocked:
            return finding
        bench = self.material.bench(self.again, draft)
        if bench is None or not set(draft.shape.aux_layers) <= set(self.seen[0].hidden):
            return finding
        found = states.judge_shift(bench, draft, vocab_map, self.seen, self.spec.num_layers)
        if found.state != "ok":
            return found
        both = {**finding.numbers, **found.numbers}
        return dataclasses.replace(finding, text=f"{finding.text}; {found.text}", numbers=both)

    def _vocab(self, finding: Finding, trial: Trial | None) -> Finding:
        if finding.state != "ok" or trial is None:
            return finding
        head = trial.draft.lm_head.weight.detach().cpu()
        rows = behaviour.find_head_rows(head, trial.vocab_map.target_ids, self.material.head)
        counts = self.material.samples.supervised_counts(self.spec.vocab_size)
        return behaviour.judge_vocab(trial, counts, rows, finding.text)

    def _embedding(self, trial: Trial | None) -> Finding:
        draft = self.draft
        if not paper.has_embedding(self.paper):
            return ok("embedding", "not in the checkpoint: engines share the target's")
        if upstream := self._broken("target"):
            return unknown("embedding", _behind(upstream))
        if draft is None:
            return unknown("embedding", "the checkpoint could not be loaded")
        if draft.shape.own_embedding:
            return ok("embedding", f"its own, for another hidden size ({draft.shape.hidden_size})")
        return behaviour.judge_embedding(draft, self.material.head.embedding(), self.dtype, trial)

    def _rope(self, trial: Trial | None) -> Finding:
        try:
            fresh = draft_shape(self.material.files.config, self.spec)
            here = plain_rope(standard_rope(self.paper.layer))
        except ConfigError as error:
            return unknown("rope", str(error))
        reach = self.paper.layer.get("max_position_embeddings")
        positions = behaviour.Positions(
            rope=here,
            max_positions=reach if isinstance(reach, int) else None,
            fresh=fresh,
            longest_sample=int(self.material.samples.token_counts.max()),
            recorded=bool(self.paper.own),
        )
        return behaviour.judge_rope(positions, trial)

    def _accuracy(self, trial: Trial | None) -> Finding:
        upstream = self._broken(*_BEFORE_ACCURACY)
        if trial is None:
            return unknown("accuracy", _behind(upstream) if upstream else self._why_no_bench())
        outcome, bench = trial.outcome(), trial.bench
        if upstream is not None:
            shown = f"step 0: {outcome.of(bench.held_out).accuracy:.3f} held out"
            return unknown("accuracy", f"{_behind(upstream)}; {shown}")
        samples, own = self.material.samples, self.paper.own
        counting = BaselineCounts()
        for index in samples.train[:BASELINE_SAMPLES].tolist():
            counting.add(samples.token_ids(index), samples.loss_mask(index))
        recorded: Any = own.get("held_out") if own.get("fingerprint") == self.material.data.fingerprint else None
        return behaviour.judge_accuracy(bench, outcome, counting.baseline(), recorded)

    def _why_no_bench(self) -> str:
        if self.draft is None:
            return "the checkpoint could not be loaded"
        missing = sorted(set(self.draft.shape.aux_layers) - set(self.spec.aux_layers))
        if missing:
            return f"the data set does not hold hidden states {missing}, which the drafter reads"
        return "nothing is drafted in the samples"

    # -- decoding and serving ------------------------------------------------------------------------------------------

    def _decoding(self, trial: Trial | None) -> Finding:
        material, draft, vocab_map = self.material, self.draft, self.vocab_map
        if upstream := self._broken(*_BEFORE_ACCURACY, "accuracy"):
            return unknown("decoding", _behind(upstream))
        questions = material.questions()
        why = material.why_no_target() or ("" if questions else "no sample has a prompt of two tokens or more")
        if why or draft is None or vocab_map is None:
            return unknown("decoding", why or "the checkpoint could not be loaded")
        self._say("decoding a few prompts")
        chain = STEPS
        try:
            engine = self.engine or material.engine(draft.shape.aux_layers)
            self.engine = engine
            self.live = Live.load(engine, draft, vocab_map, material.target)
            self.ours = decode_questions(self.live, questions, chain=chain)
        except EyasError as error:
            return unknown("decoding", str(error))
        if trial is None:
            return unknown("decoding", self._why_no_bench())
        promised = trial.bench.judge(trial.drafts, vocab_map, rows_of_answers(trial.bench, questions))
        return serving.judge_decoding(promised, self.ours, chain)

    def _serve(self) -> None:
        self._say(f"the server at {self.ask.server}")
        material, questions, again = self.material, self.material.questions(), self.rendered
        asked = () if isinstance(again, str) else again.asked[:PROMPTS]
        conversations, stops = [messages for messages, _ in asked], stop_ids(material.target)
        served = interview(self.ask.server, self.config, questions, conversations, stops)
        # The same chains here as there.
        chain = served.num_draft_tokens or STEPS
        if self.live is not None and chain != STEPS:
            self.ours = decode_questions(self.live, questions, chain=chain)
        self._found(serving.judge_engine(served, serving.length_of(self.ours)))
        self._found(
            serving.judge_served(served, self.paper, material.target, material.digest, material.quantised, self.ours)
        )
        pairs = [(ids, theirs) for (_, ids), theirs in zip(asked, served.rendered, strict=False)]
        self._found(serving.judge_tokens(pairs, again if isinstance(again, str) else served.not_rendered))
        upstream = self._broken(*LINKS)
        self._found(
            unknown("serving", _behind(upstream)) if upstream else serving.judge_serving(served, self.ours, chain)
        )

    # -- small ---------------------------------------------------------------------------------------------------------

    def _broken(self, *links: str) -> Finding | None:
        return first_broken(self.findings, links)

    def _found(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.tell(finding)

    def _say(self, what: str) -> None:
        self.progress.show(f"doctor: {what}", force=True)


def _behind(upstream: Finding) -> str:
    return f"'{upstream.link}' is broken, which would spoil it"
