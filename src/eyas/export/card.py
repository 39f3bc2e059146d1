"""The page that goes with an export: how it was made, what it is worth, how it is started. Paths stay at home."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.export.engines import ENGINES, Engine, launch, refusals
from eyas.export.record import RECORD, ExportRecord
from eyas.model.create import TargetSizes, num_parameters
from eyas.model.shape import DraftShape
from eyas.records import UNKNOWN
from eyas.train.drafts import DECODING, EVALUATION, beside
from eyas.train.metrics import Estimate, Summary

CARD = "README.md"


def card(
    record: ExportRecord,
    engine: Engine,
    target_config: Mapping[str, Any],
    extra: Mapping[str, Any],
    *,
    draft: Path,
    dtype_flag: str | None,
) -> str:
    """Markdown. `extra`: what the checkpoint says of its training; `draft`: beside which evaluations are looked for."""
    shape, target = record.draft_shape(), record.target_name or "TARGET"
    sections = [
        _front(record),
        f"# EAGLE-3 drafter for {record.target_name or _architecture(target_config)}\n\n"
        "It proposes tokens that its target then verifies: answers are the target's own, served faster.",
        _table("Target", _target(record, target_config)),
        _table("Drafter", _drafter(shape, record)),
        _table("Training", _training(extra)),
        _held_out(extra),
        _offline(_read(beside(draft, EVALUATION))),
        _decoding(_read(beside(draft, DECODING))),
        _launch(record, engine, shape, target, TargetSizes.of(target_config).num_hidden_layers, dtype_flag),
        _made(record, engine),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front(record: ExportRecord) -> str:
    base = [f"base_model: {json.dumps(record.target_name)}"] if record.target_name else []
    return "\n".join(["---", *base, "tags: [eagle3, speculative-decoding]", "---"])


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(config.get("model_type", "its target"))


def _target(record: ExportRecord, config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = TargetSizes.of(config)
    captured = record.captured_digest
    return {
        "name": record.target_name,
        "architecture": _architecture(config),
        "layers, hidden size, vocabulary": (f"{sizes.num_hidden_layers}, {sizes.hidden_size:,}, {sizes.vocab_size:,}"),
        "weights (digest)": f"`{record.target_digest}`",
        "quantisation": record.quantisation,
        "trained on states of": "this target"
        if captured == record.target_digest
        else "not recorded"
        if captured == UNKNOWN
        else f"`{captured}`, another one",
    }


def _drafter(shape: DraftShape, record: ExportRecord) -> dict[str, Any]:
    count = num_parameters(shape)
    return {
        "reads hidden states after layers": ", ".join(map(str, shape.aux_layers)) + " (of the target, counted from 1)",
        "trained parameters": f"{count.num_trainable:,}",
        "layers": shape.num_layers,
        "hidden size": f"{shape.hidden_size:,}",
        "draft vocabulary": f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens",
        "norm of each auxiliary state, normed state carried (EAGLE-3.1)": f"{_yes(shape.norm_aux)}, "
        f"{_yes(shape.carry_normed)}",
        "dtype": record.dtype,
        "embedding": "its own"
        if shape.own_embedding
        else "the target's, bit by bit"
        if record.embedding_dtype
        else "the target's, not in the file",
    }


def _training(extra: Mapping[str, Any]) -> dict[str, Any]:
    settings = extra.get("settings")
    settings = settings if isinstance(settings, Mapping) else {}
    shown = {
        "samples trained on": _number(settings.get("num_train")),
        "steps": _number(extra.get("step")),
        "tokens, all epochs": _number(extra.get("tokens")),
        "captured states (fingerprint)": _code(extra.get("fingerprint")),
        "samples (digest)": _code(settings.get("samples")),
    }
    names = ("ttt_length", "mask_rule", "learning_rate", "pack_tokens", "step_packs", "seed")
    return shown | {name: settings.get(f"train.{name}") for name in names}


def _held_out(extra: Mapping[str, Any]) -> str:
    summary = _summary(extra.get("held_out"))
    if summary is None:
        return ""
    return "## Held-out samples, from captured states\n\n" + _steps(summary)


def _offline(value: Mapping[str, Any]) -> str:
    summary = _summary(value.get("summary"))
    if summary is None:
        return ""
    head = f"## Evaluation, split {value.get('split')}: {_number(value.get('samples'))} samples"
    return f"{head}\n\nStates `{value.get('fingerprint')}`, computed in {value.get('dtype')}.\n\n" + _steps(summary)


def _decoding(value: Mapping[str, Any]) -> str:
    requests = value.get("requests")
    if not isinstance(requests, list) or not requests:
        return ""
    pooled, mean = (_estimate(value.get(f"acceptance_length_{which}")) for which in ("pooled", "request_mean"))
    positions = value.get("position_acceptance")
    cut = value.get("num_cut")
    rows = {
        "prompts": len(requests),
        "device, dtype": f"{value.get('device')}, {value.get('dtype')}",
        "new tokens of an answer, at most": value.get("max_new_tokens"),
        "answers cut by that: figures of their beginnings": f"{cut} of {len(requests)}" if cut else None,
        "chains of": value.get("num_draft_tokens"),
        "temperature": value.get("temperature"),
        "acceptance length, pooled": pooled,
        "acceptance length, request mean": mean,
        "acceptance at position 0, 1, …": ", ".join(f"{a:.3f}" for a in positions) if positions else None,
        # Drawn answers are equal in distribution only.
        "answers equal to plain decoding": None
        if value.get("temperature")
        else f"{value.get('num_identical')} of {len(requests)}",
    }
    warnings = [f"\n{note}" for note in value.get("notes") or () if str(note).startswith("warning: ")]
    return _table("Real decoding, transformers, batch size 1", rows) + "\n".join(["", *warnings] if warnings else [])


def _launch(
    record: ExportRecord, engine: Engine, shape: DraftShape, target: str, num_layers: int, dtype: str | None
) -> str:
    lines = []
    for other in ENGINES.values():
        if other.layout != engine.layout or refusals(other, shape, num_layers):
            continue
        line = launch(other, target=target, draft="DRAFT", num_draft_tokens=record.num_draft_tokens, dtype=dtype)
        lines.append(f"{other.version}:\n\n```\n{line}\n```")
        if other.layout == "speculators" and record.target_name:
            alone = launch(other, target=target, draft="DRAFT", num_draft_tokens=0, dtype=dtype, alone=True)
            lines.append(f"or, since it names its target:\n\n```\n{alone}\n```")
    names = "`DRAFT` is this directory" + ("" if record.target_name else ", `TARGET` that of the target")
    return "\n\n".join([f"## Launch\n\n{names}.", *lines])


def _made(record: ExportRecord, engine: Engine) -> str:
    parts = [f"eyas export RUN DRAFT --for {engine.name} --dtype {record.dtype}"]
    parts += ["--with-embedding"] * (record.embedding_dtype is not None)
    parts += [f"--draft-tokens {record.num_draft_tokens}"]
    parts += [f"--target-name {shlex.quote(record.target_name or '')}"] * (record.target_name is not None)
    return (
        f"## Made with\n\n```\n{' '.join(parts)}\n```\n\neyas {record.eyas}. `{RECORD}` holds the digests; "
        "`eyas export --check DRAFT --target TARGET` compares them."
    )


def _steps(summary: Summary) -> str:
    """Accuracy and acceptance length, step by step."""
    rows = [
        "| step | accuracy | within the draft vocabulary | acceptance length of chains of step + 1, pooled |",
        "|---|---|---|---|",
    ]
    for s in range(summary.ttt_length):
        inside = summary.accuracy_in_vocab[s]
        rows.append(
            f"| {s} | {_shown(summary.accuracy[s])} | {'–' if inside is None else f'{inside:.3f}'} | "
            f"{_shown(summary.acceptance_length_pooled[s])} |"
        )
    few = " Too few to conclude from." if summary.small else ""
    return "\n".join(
        [
            f"{summary.num_samples:,} samples; 95 % intervals over samples; the bonus token is counted.{few}",
            "",
            *rows,
        ]
    )


def _table(head: str, rows: Mapping[str, Any]) -> str:
    told = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join([f"## {head}", "", "| | |", "|---|---|", *told]) if told else ""


def _summary(value: Any) -> Summary | None:
    """None where there is none, or one of another version."""
    try:
        return Summary.from_json(value) if isinstance(value, dict) else None
    except (KeyError, TypeError, ValueError):
        return None


def _read(path: Path) -> Mapping[str, Any]:
    """What an evaluation found; nothing where there was none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _estimate(value: Any) -> str | None:
    try:
        return str(Estimate(**value)) if isinstance(value, dict) else None
    except TypeError:
        return None


def _shown(one: Estimate | None) -> str:
    return "–" if one is None else str(one)


def _number(value: Any) -> str | None:
    return f"{value:,}" if isinstance(value, int) else None


def _code(value: Any) -> str | None:
    return f"`{value}`" if isinstance(value, str) else None


def _yes(value: bool) -> str:
    return "yes" if value else "no"
