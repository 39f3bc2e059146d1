"""A drafter, written as an engine loads it, with a card and a record; then read back and checked."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.errors import ConfigError, ExportError
from eyas.export.card import CARD, card
from eyas.export.check import CheckReport, check
from eyas.export.engines import ENGINES, EngineName, config_for, launch, refusals
from eyas.export.golden import DTYPES
from eyas.export.record import RECORD, ExportRecord
from eyas.export.weights import read_weights, weights_digest
from eyas.log import human_bytes
from eyas.model import checkpoint as engine_layout
from eyas.model.create import TargetSizes
from eyas.model.layout import CONFIG, WEIGHTS, Dtype
from eyas.model.shape import DraftShape
from eyas.records import UNKNOWN, digest_bytes
from eyas.target.files import open_target, quantisation, target_digest
from eyas.target.head import TargetHead


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the export is to be."""

    engine: EngineName
    dtype: Dtype = "bfloat16"
    with_embedding: bool = False
    """Write the target's embedding, too, as it is stored there; every engine shares the target's otherwise."""
    num_draft_tokens: int = 3
    """Of a chain, in the launch lines."""
    target_name: str | None = None
    """What others load the target by; stands in the card, and as the verifier of a speculators directory."""


@dataclass(frozen=True, slots=True)
class ExportReceipt:
    """What an export came to."""

    out: str
    draft: str
    engine: str
    engine_version: str
    dtype: str
    bytes: int
    embedding: bool
    aux_layers: tuple[int, ...]
    launch: str
    notes: tuple[str, ...]
    report: CheckReport

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{self.out}: {self.draft} for {self.engine} ({self.engine_version}) in {self.dtype}, "
            f"{human_bytes(self.bytes)}{', with the embedding' if self.embedding else ''}",
            *(f"checked  {line}" for line in self.report.compared),
            *self.notes,
            *self.report.notes,
            f"launch   {self.launch}",
            f"again    eyas export --check {shlex.quote(self.out)}",
        ]


def export(
    draft: Path,
    out: Path,
    wanted: Wanted,
    *,
    target: Path,
    aux_layers: Sequence[int] | None = None,
    trust_remote_code: bool = False,
) -> ExportReceipt:
    """Write `draft` to `out`, which appears complete or not at all, and hold it against the golden list.

    ConfigError, one line a problem, where the engine cannot load such a drafter, or where drafter and target do not
    fit; SpecMismatch-like trouble is a ConfigError, too: a target that is not the one whose states were captured,
    unless it is quantised otherwise, which is told. ExportError where `out` holds something.
    """
    engine = ENGINES[wanted.engine]
    if out.is_dir() and any(out.iterdir()):
        raise ExportError(f"{out}: exists already; give another directory or remove it")
    model, vocab_map, info = engine_layout.load(draft, aux_layers=aux_layers)
    files = open_target(target)
    sizes = TargetSizes.of(files.config)
    problems = _misfits(model.shape, sizes) + refusals(engine, model.shape, sizes.num_hidden_layers)
    if problems:
        raise ConfigError("\n".join(f"draft {draft}: not for {engine.name}: {problem}" for problem in problems))
    captured, digest = str(info.extra.get("target_digest", UNKNOWN)), target_digest(target)
    notes = _other_target(draft, info.extra, files.config, captured=captured, digest=digest)
    shape = dataclasses.replace(model.shape, max_position_embeddings=sizes.max_position_embeddings)
    if shape != model.shape:
        notes.append(
            f"note: max_position_embeddings is the target's {shape.max_position_embeddings:,}; the checkpoint says "
            f"{model.shape.max_position_embeddings:,}"
        )
    embedding = None
    if not shape.own_embedding and (wanted.with_embedding or info.has_embedding):
        embedding = TargetHead.load(target, trust_remote_code=trust_remote_code).embedding()
        notes += _other_embedding(model.embed_tokens.weight, embedding) if info.has_embedding else []
        embedding = embedding if wanted.with_embedding else None
    tensors = engine_layout.tensors_of(
        model, vocab_map, out, dtype=wanted.dtype, layout=engine.layout, embedding=embedding
    )
    extra = _told(info.extra)
    config = config_for(
        engine,
        shape,
        target_config=files.config,
        dtype=wanted.dtype,
        num_draft_tokens=wanted.num_draft_tokens,
        target_name=wanted.target_name,
        extra=extra,
    )
    record = ExportRecord(
        engine=engine.name,
        dtype=wanted.dtype,
        shape=dataclasses.asdict(shape),
        num_draft_tokens=wanted.num_draft_tokens,
        embedding_dtype=None if embedding is None else DTYPES[str(embedding.dtype).removeprefix("torch.")],
        target_digest=digest,
        captured_digest=captured,
        quantisation=quantisation(files.config),
        target_name=wanted.target_name,
        source=os.path.relpath(draft.resolve(), out.resolve()),
        source_weights=weights_digest(read_weights(draft)),
        weights=weights_digest(tensors),
        config=digest_bytes(engine_layout.config_text(config).encode()),
    )
    flag = _dtype_flag(files.config, wanted.dtype)
    page = card(record, engine, files.config, extra, draft=draft, dtype_flag=flag)
    reports: list[CheckReport] = []

    def audit(written: Path) -> None:
        found = check(written, target=target, draft=draft, trust_remote_code=trust_remote_code)
        if found.faults:
            raise ExportError(f"{out}: not what was to be written: {'; '.join(found.faults)}")
        reports.append(dataclasses.replace(found, out=str(out)))

    engine_layout.write_directory(out, tensors, config, {CARD: page, RECORD: record.text()}, audit=audit)
    return ExportReceipt(
        out=str(out),
        draft=str(draft),
        engine=engine.name,
        engine_version=engine.version,
        dtype=wanted.dtype,
        bytes=sum((out / name).stat().st_size for name in (WEIGHTS, CONFIG)),
        embedding=embedding is not None or shape.own_embedding,
        aux_layers=shape.aux_layers,
        launch=launch(
            engine,
            target=str(target),
            draft=str(out),
            num_draft_tokens=wanted.num_draft_tokens,
            dtype=flag,
            alone=wanted.target_name is not None and engine.layout == "speculators",
        ),
        notes=tuple(notes),
        report=reports[0],
    )


def _misfits(shape: DraftShape, sizes: TargetSizes) -> list[str]:
    found = []
    for what, there, here in (
        ("hidden size", shape.target_hidden_size, sizes.hidden_size),
        ("vocabulary", shape.vocab_size, sizes.vocab_size),
    ):
        if there != here:
            found.append(f"it is for a target whose {what} is {there}, this target's is {here}")
    return found


def _other_target(
    draft: Path, extra: Mapping[str, Any], target_config: Mapping[str, Any], *, captured: str, digest: str
) -> list[str]:
    """What is to be told of a target that is not the captured one; ConfigError where it may not be another one."""
    if captured == UNKNOWN:
        return ["note: the checkpoint does not say which target it was trained for; nothing tells that it is this one"]
    if captured == digest:
        return []
    here, there = quantisation(target_config), str(extra.get("quantisation", "none"))
    if here == there:
        raise ConfigError(
            f"draft {draft}: trained on states of target {captured}, this target is {digest}; give the captured one "
            "with --target DIR"
        )
    return [
        f"warning: trained on states of target {captured} ({there}), this one is quantised otherwise ({here}): "
        "acceptance may be lower; measure it"
    ]


def _other_embedding(own: torch.Tensor, targets: torch.Tensor) -> list[str]:
    """What is to be told of an embedding that the checkpoint has and the export has not."""
    differ = (own.to(targets.dtype) != targets).any(1).sum()
    return [
        f"warning: the checkpoint's own embedding differs from the target's in {int(differ):,} of {len(targets):,} "
        "rows and is left out, since engines share the target's: it may draft otherwise"
    ] if differ else []  # fmt: skip


def _told(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint says of how it was made, without the paths of where that was."""
    told = dict(extra)
    if isinstance(settings := told.get("settings"), Mapping):
        told["settings"] = {name: value for name, value in settings.items() if name != "draft.start_from"}
    return told


def _dtype_flag(target_config: Mapping[str, Any], dtype: str) -> str | None:
    """Engines compute both models in one dtype: the target's own unless told otherwise, and 16 bits for one of 32."""
    text = target_config.get("text_config") or {}
    names = ("dtype", "torch_dtype")
    own = next((str(c[n]) for c in (target_config, text) for n in names if c.get(n)), None)
    return None if own == dtype != "float32" else dtype
