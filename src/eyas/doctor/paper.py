"""What a checkpoint says of itself on paper, however wrong: config.json, names and shapes, the vocabulary's tensors.

A loader refuses what does not fit together; whoever looks for the fault has to read it all the same. Letters: `H` the
target's hidden size, `V` target vocabulary, `D` draft vocabulary, `k` hidden-state index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eyas.doctor.findings import Finding, broken, ok, unknown
from eyas.errors import ConfigError
from eyas.model.checkpoint import CONFIG, EMBEDDING, HEAD, LAYER_IDS
from eyas.model.stored import OTHER_LAYER_IDS
from eyas.records import UNKNOWN, CaptureSpec, default_aux_layers

FC = "fc.weight"


@dataclass(frozen=True, slots=True)
class Paper:
    """A checkpoint before anything of it is believed."""

    directory: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Of every tensor, by the name in the file."""
    files: Mapping[str, Path]

    @classmethod
    def read(cls, directory: Path) -> Paper:
        """ConfigError, one line, where there is no readable config.json or no readable weights."""
        file = directory / CONFIG
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"draft {file}: cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"draft {file}: holds a JSON {type(config).__name__}, not an object")
        shapes: dict[str, tuple[int, ...]] = {}
        files: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as f:
                    for name in f.keys():  # noqa: SIM118 - not a mapping
                        shapes[name], files[name] = tuple(f.get_slice(name).get_shape()), path
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"draft {path}: not a complete safetensors file: {error}") from None
        if not shapes:
            raise ConfigError(f"draft {directory}: no *.safetensors weights")
        return cls(directory, config, shapes, files)

    @property
    def own(self) -> Mapping[str, Any]:
        """What eyas wrote beside the weights: `target_digest`, `fingerprint`, `held_out`, …; empty for others'."""
        extra = _object(self.config.get("eyas")).get("extra")
        return _object(extra)

    @property
    def layer(self) -> Mapping[str, Any]:
        """Where the sizes of the decoder layer stand."""
        return _object(self.config.get("transformer_layer_config")) or self.config

    @property
    def target_hidden_size(self) -> int | None:
        return _whole(self.config.get("target_hidden_size")) or _whole(self.layer.get("hidden_size"))

    @property
    def vocab_size(self) -> int | None:
        return _whole(self.layer.get("vocab_size"))

    @property
    def draft_vocab_size(self) -> int | None:
        return _whole(self.config.get("draft_vocab_size")) or self.vocab_size

    def told_layers(self) -> dict[str, tuple[int, ...]]:
        """Hidden-state indices by the key that names them, each translated from its own numbering."""
        inner = _object(self.config.get("eagle_config")).get(LAYER_IDS)
        trained = _object(self.config.get("eyas")).get("aux_layers")
        told = {
            f"{LAYER_IDS} (vLLM)": _ids(self.config.get(LAYER_IDS)),
            f"eagle_config.{LAYER_IDS} + 1 (SGLang)": _ids(inner, 1),
            f"{OTHER_LAYER_IDS} + 1": _ids(self.config.get(OTHER_LAYER_IDS), 1),
            "eyas.aux_layers (training)": _ids(trained),
        }
        return {name: ids for name, ids in told.items() if ids is not None}

    def tensor(self, name: str) -> torch.Tensor:
        """ConfigError where its bytes cannot be read."""
        try:
            with safe_open(self.files[name], framework="pt") as f:
                tensor: torch.Tensor = f.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"draft {self.files[name]}: {error}") from None
        return tensor


def judge_target(paper: Paper, spec: CaptureSpec, digest: str, quantised: str, config: Mapping[str, Any]) -> Finding:
    """Three digests, of which one may be another: the data set's, the checkpoint's and that of target.path.

    `config` is the target's config.json, `quantised` how its weights are.
    """
    trained_on = paper.own.get("target_digest")
    numbers: dict[str, Any] = {"data_set": spec.target_digest, "checkpoint": trained_on, "target_path": digest}
    known = {name: value for name, value in numbers.items() if value not in (None, "", UNKNOWN)}
    told = ", ".join(f"{_NAMES[name]} {value[:12]}…" for name, value in known.items())
    quantisation = f"data set {spec.quantisation}, target.path {quantised}"
    if len(set(known.values())) > 1:
        if spec.target_digest == trained_on or (trained_on is None and spec.target_digest != digest):
            do = "set target.path to the model that was captured, or capture anew from the one that is served"
            what = "target.path is another target than the one captured"
        elif trained_on == digest:
            do = "set capture.out to the data set of this target"
            what = "the data set is of another target"
        else:
            do = "train the drafter for this target, or name the target and data set it was trained for"
            what = "the drafter was trained for another target"
        if spec.quantisation != quantised:
            what += f", quantised otherwise ({quantisation})"
        return broken("target", f"{what}: {told}", do, **numbers)
    if spec.quantisation != quantised:
        return broken(
            "target", f"quantised otherwise: {quantisation}", "capture from the target as it is served", **numbers
        )
    text = {**config, **_object(config.get("text_config"))}
    sizes = (
        ("hidden size", paper.target_hidden_size, text.get("hidden_size")),
        ("vocabulary", paper.vocab_size, text.get("vocab_size")),
        ("captured hidden size", spec.hidden_size, text.get("hidden_size")),
    )
    differ = [
        f"{name} {there}, target.path has {here}" for name, there, here in sizes if here and there not in (here, None)
    ]
    if differ:
        return broken("target", "; ".join(differ), "name the target that the drafter was trained for", **numbers)
    if len(known) < 2:
        return unknown("target", f"only one digest is known ({told}), nothing to compare it with", **numbers)
    return ok("target", f"digest {digest[:12]}… in {', '.join(_NAMES[n] for n in known)}; {quantised}", **numbers)


_NAMES = {"data_set": "data set", "checkpoint": "checkpoint", "target_path": "target.path"}


def judge_aux(paper: Paper) -> Finding:
    """The width of fc against the number of layers that the checkpoint names."""
    shape, size = paper.shapes.get(FC), paper.target_hidden_size
    if shape is None or len(shape) != 2 or not size:
        return unknown("aux", f"no {FC} of two dimensions" if size else f"{CONFIG} names no hidden size")
    told = paper.told_layers()
    counts = {name: len(ids) for name, ids in told.items()}
    numbers: dict[str, Any] = {"fc": list(shape), "hidden_size": size, "named": counts}
    width = f"fc reads {shape[1]:,} values = {shape[1] / size:g} x {size:,}"
    if shape[1] % size or any(n * size != shape[1] for n in counts.values()):
        named = ", ".join(f"{n} by {name}" for name, n in counts.items()) or "none"
        return broken(
            "aux",
            f"{width}; layers named: {named}",
            f"write the {shape[1] // size} hidden-state indices that it was trained with into {CONFIG}, or export the "
            "checkpoint anew",
            **numbers,
        )
    if not told:
        return ok("aux", f"{width}; no key names layers", **numbers)
    return ok("aux", f"{width}, as many as are named", **numbers)


def judge_layers(paper: Paper, spec: CaptureSpec, fingerprint: str, given: Sequence[int] | None) -> Finding:
    """The checkpoint's keys against each other, and against the data set that it was trained on.

    `given`: `evaluate.aux_layers`. What the weights want is asked by behaviour, elsewhere.
    """
    told = paper.told_layers()
    names = "; ".join(f"{name} {list(ids)}" for name, ids in told.items())
    numbers: dict[str, Any] = {
        "named": {name: list(ids) for name, ids in told.items()},
        "data_set": list(spec.aux_layers),
    }
    fallback = list(default_aux_layers(spec.num_layers))
    if not told:
        text = f"no key names the layers; engines fall back to {fallback}"
        return broken(
            "layers",
            text,
            f"write {LAYER_IDS} = {list(given or spec.aux_layers)} (hidden-state indices) into {CONFIG}, and each "
            "less one into eagle_config",
            **numbers,
        )
    distinct = set(told.values())
    own = paper.own.get("fingerprint") == fingerprint
    right = spec.aux_layers if own else told.get("eyas.aux_layers (training)")
    if len(distinct) > 1:
        shifts = {name: shift_of(ids, right) for name, ids in told.items()} if right else {}
        how = ", ".join(f"{name} is {_shifted(s)}" for name, s in shifts.items() if s)
        return broken(
            "layers",
            f"the keys disagree: {names}" + (f": {how}" if how else ""),
            f"write {LAYER_IDS} = {list(right or spec.aux_layers)} (hidden-state indices) into {CONFIG}, each less "
            "one into eagle_config",
            **numbers,
        )
    ids = next(iter(distinct))
    if own and ids != spec.aux_layers:
        shift = shift_of(ids, spec.aux_layers)
        how = f"{_shifted(shift)} against" if shift else "not"
        return broken(
            "layers",
            f"the checkpoint names {list(ids)}, {how} {list(spec.aux_layers)} of the data set that it was trained on",
            f"write {LAYER_IDS} = {list(spec.aux_layers)} into {CONFIG}, each less one into eagle_config",
            **numbers,
        )
    if max(ids) > spec.num_layers or min(ids) < 0:
        return broken(
            "layers",
            f"{list(ids)} lie outside 0..{spec.num_layers}, the target's hidden-state indices",
            "name the layers that it was trained with",
            **numbers,
        )
    # An engine that finds no key of its own falls back, which is harmless where the fallback is the same.
    lonely = len(told) == 1 and list(ids) != fallback and "training" not in names
    note = f"only {next(iter(told))} names them: another engine would fall back to {fallback}" if lonely else ""
    where = "as in the data set" if ids == spec.aux_layers else f"the data set has {list(spec.aux_layers)}"
    return ok("layers", f"{list(ids)}, {where}; {len(told)} keys agree", note=note, **numbers)


def judge_map(paper: Paper, vocab_size: int) -> Finding:
    """d2t and t2d by themselves: offsets, ascending, about the same tokens."""
    size, rows = paper.draft_vocab_size, paper.shapes.get(HEAD, (0,))[0]
    numbers: dict[str, Any] = {"draft_vocab_size": size, "vocab_size": vocab_size, "lm_head_rows": rows}
    remake = "export the checkpoint anew from the training, which knows its map"
    if size is None:
        return unknown("vocab", f"{CONFIG} names no vocabulary", **numbers)
    if rows and rows != size:
        return broken("vocab", f"lm_head has {rows:,} rows, {CONFIG} says draft_vocab_size {size:,}", remake, **numbers)
    if "d2t" not in paper.shapes:
        if size == vocab_size:
            return ok("vocab", f"all {size:,} tokens of the target", **numbers)
        return broken(
            "vocab", f"no d2t for {size:,} of {vocab_size:,} tokens: engines take the first {size:,}", remake, **numbers
        )
    d2t = paper.tensor("d2t").to(torch.int64).flatten()
    used = paper.tensor("t2d").bool().flatten() if "t2d" in paper.shapes else None
    if len(d2t) != size or (used is not None and len(used) != vocab_size):
        return broken(
            "vocab",
            f"d2t has {len(d2t):,} entries, t2d {len(used) if used is not None else 0:,}; {size:,} and {vocab_size:,} "
            "wanted",
            remake,
            **numbers,
        )
    ids = d2t + torch.arange(len(d2t))
    wanted = None if used is None else torch.nonzero(used)[:, 0]
    if is_absolute(d2t, wanted, vocab_size):
        return broken(
            "vocab",
            "d2t holds the target's ids themselves, not offsets (id - draft id)",
            "subtract 0, 1, 2, … from d2t",
            **numbers,
        )
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size or bool((ids.diff() <= 0).any())):
        return broken(
            "vocab",
            f"d2t leads to tokens {int(ids.min()):,}..{int(ids.max()):,} of {vocab_size:,}, "
            f"{int((ids.diff() <= 0).sum()):,} of them not ascending",
            remake,
            **numbers,
        )
    if wanted is not None and not torch.equal(ids, wanted):
        other = int((~used[ids]).sum()) if used is not None else 0
        return broken(
            "vocab",
            f"t2d marks {len(wanted):,} tokens, d2t names {len(ids):,}, of which t2d lacks {other:,}",
            remake,
            **numbers,
        )
    return ok("vocab", f"{size:,} of {vocab_size:,} tokens, d2t and t2d agree", **numbers)


def is_absolute(d2t: torch.Tensor, marked: torch.Tensor | None, vocab_size: int) -> bool:
    """Whether `d2t [D]` is a list of ids: what t2d marks, or ascending ids too large for offsets."""
    if marked is not None and torch.equal(d2t, marked):
        return len(d2t) > 1
    too_large = len(d2t) > 0 and int(d2t.max()) > vocab_size - len(d2t)
    return too_large and bool((d2t.diff() > 0).all()) and int(d2t.min()) >= 0 and int(d2t.max()) < vocab_size


def shift_of(ids: Sequence[int], right: Sequence[int]) -> int | None:
    """By how much all of `ids` are off; None where it is not one number, 0 where they are right."""
    if len(ids) != len(right):
        return None
    shifts = {a - b for a, b in zip(ids, right, strict=True)}
    return shifts.pop() if len(shifts) == 1 else None


def has_embedding(paper: Paper) -> bool:
    return EMBEDDING in paper.shapes


def _shifted(shift: int | None) -> str:
    return f"shifted by {shift:+d}" if shift else "another set"


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _ids(value: Any, add: int = 0) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not value or not all(isinstance(i, int) for i in value):
        return None
    return tuple(i + add for i in value)
