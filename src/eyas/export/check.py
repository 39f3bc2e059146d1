"""Is an export what it should be? Every name, shape, dtype and field, its numbers, its target, where it came from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.errors import ConfigError, EyasError
from eyas.export.engines import ENGINES, Engine, config_for, refusals
from eyas.export.golden import DTYPES, Tensors, config_faults, tensor_faults, tensors
from eyas.export.logits import NUM_STEPS, Difference, logits
from eyas.export.record import RECORD, ExportRecord, read_record
from eyas.export.weights import read_weights, same_bits, weights_digest
from eyas.model import checkpoint as engine_layout
from eyas.model.create import TargetSizes
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.layout import CONFIG, EMBEDDING, WEIGHTS
from eyas.model.shape import DraftShape
from eyas.model.vocab_map import VocabMap
from eyas.records import UNKNOWN, digest_bytes
from eyas.target.files import TargetFiles, open_target, quantisation, target_digest
from eyas.target.head import TargetHead


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What an audit found."""

    out: str
    engine: str
    faults: tuple[str, ...]
    """One line each; none is a good export."""
    compared: tuple[str, ...]
    """What was looked at and is right."""
    notes: tuple[str, ...]
    """Warnings, and what could not be looked at."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "out": self.out, "engine": self.engine, "faults": list(self.faults), "compared": list(self.compared),
            "notes": list(self.notes),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For people."""
        verdict = f"{len(self.faults)} faults" if self.faults else "nothing wrong"
        return [
            f"{self.out}: for {self.engine}: {verdict}",
            *(f"fault    {line}" for line in self.faults),
            *(f"checked  {line}" for line in self.compared),
            *self.notes,
        ]


def check(
    out: Path,
    *,
    engine: str | None = None,
    target: Path | None = None,
    draft: Path | None = None,
    trust_remote_code: bool = False,
) -> CheckReport:
    """Audit the directory `out`.

    `engine`: for one that has no record; `draft`: what was exported, where the record's path does not lead to it;
    `target`: without it, nothing of the target is compared, which is told. ConfigError where `out` is no export at all,
    where `target` is none, and for a missing or contradicting `engine`.
    """
    if not out.is_dir():
        raise ConfigError(f"{out}: no such directory; give the directory of an export")
    record = read_record(out)
    if record is None and engine is None:
        raise ConfigError(f"{out}: no {RECORD}, so it must be said for whom it is: --for sglang, vllm or speculators")
    name = engine or (record.engine if record else "")
    if name not in ENGINES:
        raise ConfigError(f"{out}/{RECORD}: '{name}' is none of {', '.join(ENGINES)}")
    files = None if target is None else open_target(target)
    return _Audit(out, ENGINES[name], record, files, trust_remote_code).run(draft)


def source_of(out: Path) -> Path | None:
    """The drafter that an export was made from, if it is where the record says."""
    record = read_record(out)
    if record is None:
        return None
    source = (out / record.source).resolve()
    return source if (source / CONFIG).is_file() else None


@dataclass
class _Audit:
    out: Path
    engine: Engine
    record: ExportRecord | None
    target: TargetFiles | None
    trust_remote_code: bool
    faults: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self, draft: Path | None) -> CheckReport:
        config, weights = self._config(), self._weights()
        shape = self._shape()
        if config is not None and weights is not None and shape is not None:
            self._golden(shape, config, weights)
            self._numbers(weights)
            self._vocabulary(shape, weights)
            self._target(shape, weights)
            if not self.faults:
                self._digests(weights)
                self._source(draft, shape, weights)
        found = (tuple(self.faults), tuple(self.compared) if not self.faults else (), tuple(self.notes))
        return CheckReport(str(self.out), self.engine.name, *found)

    def _config(self) -> Mapping[str, Any] | None:
        try:
            value = json.loads((self.out / CONFIG).read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.faults.append(f"{CONFIG}: not there")
        except (OSError, ValueError) as error:
            self.faults.append(f"{CONFIG}: cannot be read: {error}")
        else:
            if isinstance(value, dict):
                return value
            self.faults.append(f"{CONFIG}: holds a JSON {type(value).__name__}, not an object")
        return None

    def _weights(self) -> dict[str, torch.Tensor] | None:
        others = sorted(p.name for p in self.out.glob("*.safetensors") if p.name != WEIGHTS)
        if not (self.out / WEIGHTS).is_file():
            self.faults.append(f"{WEIGHTS}: not there")
            return None
        if others:
            self.faults.append(f"{', '.join(others)}: does not belong there; engines load every weight file")
            return None
        try:
            return read_weights(self.out)
        except ConfigError as error:
            self.faults.append(str(error).removeprefix(f"{self.out}/"))
            return None

    def _shape(self) -> DraftShape | None:
        """By the record; without one, as the directory says of itself."""
        if self.record is not None:
            return self.record.draft_shape()
        if self.faults:
            return None
        try:
            return engine_layout.load(self.out)[0].shape
        except EyasError as error:
            self.faults.append(str(error).removeprefix(f"draft {self.out}: "))
            return None

    def _golden(self, shape: DraftShape, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        dtype = self.record.dtype if self.record else str(weights["fc.weight"].dtype).removeprefix("torch.")
        if self.record is not None:
            embedding = self.record.embedding_dtype
        else:
            embedding = _spelled(weights[EMBEDDING]) if EMBEDDING in weights else None
        wanted = tensors(shape, self.engine.layout, dtype, embedding)
        found: Tensors = {name: (_spelled(tensor), tuple(tensor.shape)) for name, tensor in weights.items()}
        faults = [f"{WEIGHTS}: {fault}" for fault in tensor_faults(found, wanted)]
        faults += [f"{CONFIG}: {fault}" for fault in config_faults(config, self._wanted_config(shape, config, dtype))]
        num_layers = 1_000_000 if self.target is None else TargetSizes.of(self.target.config).num_hidden_layers
        faults += [f"{self.engine.name} cannot load it: {line}" for line in refusals(self.engine, shape, num_layers)]
        self.faults += faults
        self.compared.append(
            f"{len(wanted)} tensors and {CONFIG} against the list for {self.engine.name} ({self.engine.version}), "
            f"layers {list(shape.aux_layers)}"
        )

    def _wanted_config(self, shape: DraftShape, config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """Where nothing else says what a field should be, as it is: the target's tokens and name."""
        inner = config.get("transformer_layer_config")
        speculators = config.get("speculators_config")
        speculators = speculators if isinstance(speculators, Mapping) else {}
        verifier = speculators.get("verifier")
        verifier = verifier if isinstance(verifier, Mapping) else {}
        own = inner if isinstance(inner, Mapping) else config
        if self.target is not None:
            target_config: Mapping[str, Any] = self.target.config
        else:
            target_config = {"architectures": verifier.get("architectures"), **own}
            if self.engine.layout == "speculators":
                target_config = {**target_config, "architectures": verifier.get("architectures")}
        if self.record is not None:
            num_draft_tokens, name = self.record.num_draft_tokens, self.record.target_name
        else:
            methods = speculators.get("proposal_methods")
            first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
            num_draft_tokens, name = first.get("speculative_tokens", 3), verifier.get("name_or_path")
        return config_for(
            self.engine,
            shape,
            target_config=target_config,
            dtype=dtype,
            num_draft_tokens=num_draft_tokens,
            target_name=name,
        )

    def _numbers(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
                self.faults.append(f"{WEIGHTS}: '{name}' holds values that are not finite numbers")

    def _vocabulary(self, shape: DraftShape, weights: Mapping[str, torch.Tensor]) -> None:
        d2t, t2d = weights.get("d2t"), weights.get("t2d")
        if d2t is None or t2d is None or d2t.is_floating_point():
            return
        ids = d2t.long() + torch.arange(len(d2t))
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size):
            self.faults.append(
                f"{WEIGHTS}: 'd2t' leads to tokens {int(ids.min())}..{int(ids.max())} of 0..{shape.vocab_size - 1}"
            )
            return
        try:
            VocabMap(d2t, t2d)
        except ValueError as error:
            self.faults.append(f"{WEIGHTS}: {error}")

    def _target(self, shape: DraftShape, weights: Mapping[str, torch.Tensor]) -> None:
        if self.target is None:
            self.notes.append("note: no target (--target DIR): its digest, its sizes and its embedding not compared")
            return
        path, sizes, captured = self.target.path, TargetSizes.of(self.target.config), self._captured()
        for what, here, there in (
            ("target_hidden_size", shape.target_hidden_size, sizes.hidden_size),
            ("vocab_size", shape.vocab_size, sizes.vocab_size),
            ("max_position_embeddings", shape.max_position_embeddings, sizes.max_position_embeddings),
        ):
            if here != there:
                self.faults.append(f"{CONFIG}: '{what}' is {here}; the target's is {there}")
        digest = target_digest(path)
        if captured == UNKNOWN:
            self.notes.append("note: nothing says which target it was trained for; its digest not compared")
        elif digest == captured:
            self.compared.append(f"target {digest}: the one whose states were captured")
        elif quantisation(self.target.config) != self._captured_quantisation():
            self.notes.append(
                f"warning: trained on states of target {captured} ({self._captured_quantisation()}), {path} is "
                f"quantised otherwise ({quantisation(self.target.config)}): acceptance may be lower; measure it"
            )
        else:
            self.faults.append(f"target {path}: {digest}; trained on states of {captured}")
        if EMBEDDING in weights and not shape.own_embedding:
            self._embedding(weights[EMBEDDING], self.target)

    def _embedding(self, found: torch.Tensor, target: TargetFiles) -> None:
        try:
            wanted = TargetHead.load(target.path, trust_remote_code=self.trust_remote_code).embedding()
        except EyasError as error:
            self.notes.append(f"note: the embedding not compared: {error}")
            return
        if same_bits(found, wanted):
            self.compared.append("the embedding, bit by bit the target's")
        else:
            self.faults.append(f"{WEIGHTS}: '{EMBEDDING}' is not the target's, bit by bit")

    def _captured(self) -> str:
        return self.record.captured_digest if self.record else str(self._extra().get("target_digest", UNKNOWN))

    def _captured_quantisation(self) -> str:
        return str(self._extra().get("quantisation", "none"))

    def _extra(self) -> Mapping[str, Any]:
        own = (self._config() or {}).get("eyas")
        extra = own.get("extra") if isinstance(own, Mapping) else None
        return extra if isinstance(extra, Mapping) else {}

    def _digests(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self.record is None:
            return
        if weights_digest(weights) != self.record.weights:
            self.faults.append(f"{WEIGHTS}: other values than were exported (their digest is not that of {RECORD})")
        if digest_bytes((self.out / CONFIG).read_bytes()) != self.record.config:
            self.faults.append(f"{CONFIG}: changed since the export (its digest is not that of {RECORD})")

    def _source(self, given: Path | None, shape: DraftShape, weights: Mapping[str, torch.Tensor]) -> None:
        source = given or source_of(self.out)
        if source is None:
            what = "nothing says from which checkpoint it was made"
            if self.record is not None:
                what = f"{self.out / self.record.source}, from which it was made, is gone"
            self.notes.append(f"note: {what}: weights and logits not compared (--draft DIR)")
            return
        if self.record is not None and weights_digest(read_weights(source)) != self.record.source_weights:
            self.faults.append(f"{source}: not the checkpoint that was exported (its digest is not that of {RECORD})")
            return
        try:
            theirs, their_map, _ = engine_layout.load(source, aux_layers=shape.aux_layers)
            ours, our_map, info = engine_layout.load(self.out)
        except ConfigError as error:
            self.faults.append(str(error))
            return
        there = dataclasses.replace(theirs.shape, max_position_embeddings=shape.max_position_embeddings)
        differ = [
            f"{f.name} is {getattr(ours.shape, f.name)}, {getattr(there, f.name)} in {source}"
            for f in dataclasses.fields(there)
            if getattr(ours.shape, f.name) != getattr(there, f.name)
        ]
        if differ:
            self.faults += [f"{CONFIG}: {line}" for line in differ]
            return
        if not torch.equal(their_map.target_ids, our_map.target_ids):
            self.faults.append(f"{WEIGHTS}: another draft vocabulary than {source}")
            return
        self._same(theirs, ours, source, info.dtype)

    def _same(self, theirs: Eagle3Draft, ours: Eagle3Draft, source: Path, dtype: str) -> None:
        exact = logits(theirs)
        kept = dict(ours.named_parameters())
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if name == EMBEDDING and not theirs.shape.own_embedding:
                    continue
                parameter.copy_(parameter.to(getattr(torch, dtype)))
                if not torch.equal(parameter, kept[name]):
                    self.faults.append(f"{WEIGHTS}: '{name}' is not that of {source} in {dtype}")
        found = logits(ours)
        if not torch.equal(logits(theirs), found):
            self.faults.append(f"{WEIGHTS}: other logits than {source} in {dtype}")
            return
        away = Difference.between(exact, found)
        self.compared.append(
            f"weights and logits of {NUM_STEPS} steps equal {source} in {dtype}"
            + (
                f"; rounding moves logits by {away.largest:.3g} at most, {away.other_likeliest:.1%} of the likeliest "
                "tokens (random input)"
                if away.largest
                else ""
            )
        )


def _spelled(tensor: torch.Tensor) -> str:
    """As safetensors spells its dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    return {**DTYPES, "int64": "I64", "bool": "BOOL"}.get(name, name)
