"""The target's way from its last hidden state to token probabilities, without the rest of the target.

Letters: `n` rows, `H` hidden size, `V` target vocabulary, `D` draft vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from eyas.errors import ConfigError
from eyas.target.files import TargetFiles, TensorEntry, open_target, tensor_entries
from eyas.target.structure import LogitMap, Structure, find, load_config, logit_map, skeleton

WEIGHT_CHUNK_BYTES = 64 * 1024 * 1024
"""Rows of the head are read and turned into float32 in pieces of about this size."""
ROW_CHUNK = 2048
"""Hidden states multiplied at one time."""

_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """The target's head in the memory of one device: what a teacher needs, without gradients."""

    norm: nn.Module
    """The target's own final norm: `[n, H]` before it to `[n, H]` after it."""
    weight: torch.Tensor
    """`[V, H]`, or the rows that `restricted` was asked for."""
    bias: torch.Tensor | None
    """`[V]`; few targets have one."""
    logit_map: LogitMap
    """Overwrites what it is given: give it a head's fresh output, as `logits` does."""

    @property
    def vocab_size(self) -> int:
        """Rows of `weight`."""
        return len(self.weight)

    def restricted(self, target_ids: torch.Tensor) -> HeadTensors:
        """The same head over the tokens `target_ids` `[D]` alone, in that order; its rows are a copy."""
        ids = target_ids.to(self.weight.device)
        return replace(self, weight=self.weight[ids], bias=None if self.bias is None else self.bias[ids])

    @torch.no_grad()
    def logits(self, last: torch.Tensor, norm: Literal["pre", "post"]) -> torch.Tensor:
        """Logits `[n, V]`, float32 or wider, of last hidden states `[n, H]` before or after the final norm.

        The product is computed in the dtype of `weight`, scale and soft-cap in that of the answer.
        """
        states = self.norm(last) if norm == "pre" else last
        x = nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias)
        return self.logit_map(x if x.dtype == torch.float64 else x.float())


class TargetHead:
    """Final norm, head, scale and soft-cap of a target; everything is computed in float32.

    The rows of the head stay in their memory-mapped file until they are needed, so a head of any size costs tens of
    megabytes.
    """

    def __init__(
        self,
        *,
        norm: nn.Module,
        rows: TensorEntry,
        rows_name: str,
        embedding: TensorEntry,
        embedding_name: str,
        bias: torch.Tensor | None,
        logit_map: LogitMap,
    ) -> None:
        self._norm = norm
        self._rows = rows
        self._rows_name = rows_name
        self._embedding = embedding
        self._embedding_name = embedding_name
        self._bias = bias
        self.logit_map = logit_map
        self.vocab_size, self.hidden_size = rows.shape

    @classmethod
    def load(cls, path: Path, *, trust_remote_code: bool = False) -> TargetHead:
        """The head of the target at `path`. ConfigError or EngineError, one line, when it cannot be found there."""
        files = open_target(path)
        model = skeleton(load_config(files, trust_remote_code=trust_remote_code), trust_remote_code=trust_remote_code)
        structure = find(model)
        entries = tensor_entries(files)
        prefix = trunk_prefix(structure, entries, files)
        embedding_name = _embedding_name(structure, prefix)
        rows_name = _rows_name(model, structure, entries, embedding_name, files)
        if embedding_name not in entries:
            raise ConfigError(f"target {files.path}: no weight file has its embedding '{embedding_name}'")
        head_bias = f"{rows_name.rpartition('.')[0]}.bias"
        has_bias = getattr(structure.head, "bias", None) is not None
        if has_bias and head_bias not in entries:
            raise ConfigError(f"target {files.path}: its head has a bias, but no weight file has '{head_bias}'")
        return cls(
            norm=_norm(structure, entries, prefix, files),
            rows=entries[rows_name],
            rows_name=rows_name,
            embedding=entries[embedding_name],
            embedding_name=embedding_name,
            bias=read_tensor(entries, head_bias) if has_bias else None,
            logit_map=logit_map(structure),
        )

    def on(self, device: torch.device | str, dtype: torch.dtype) -> HeadTensors:
        """The head in the memory of `device`, norm and rows in `dtype`; only these are read from the target's files."""
        weight = _read_stored(self._rows, self._rows_name).to(device, dtype)
        norm = copy.deepcopy(self._norm).to(device, dtype).requires_grad_(False)
        bias = None if self._bias is None else self._bias.to(device, dtype)
        return HeadTensors(norm=norm, weight=weight, bias=bias, logit_map=self.logit_map)

    def rows(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Rows `[D, H]` of the head for the tokens `target_ids` `[D]`, in their stored dtype."""
        return _read_stored(self._rows, self._rows_name)[target_ids]

    def embedding(self) -> torch.Tensor:
        """The target's embedding `[V, H]` as it is stored, before any multiplier of its forward.

        ConfigError when it is quantised, or damaged.
        """
        if self._embedding.dtype not in _FLOATS:
            raise ConfigError(
                f"target weights {self._embedding.file}: '{self._embedding_name}' is {self._embedding.dtype}; "
                "a quantised embedding is not read"
            )
        return _read_stored(self._embedding, self._embedding_name)

    @torch.no_grad()
    def norm_scale(self) -> torch.Tensor:
        """`[H]` float32: what the final norm multiplies each channel by, a bias left out.

        Measured, since a family may add 1 to its weights or have none: of `+-2**12` in turn mean and variance are
        exact, eps is nothing beside them, and half the difference of both signs is the factor, bit for bit.
        """
        x = torch.full((1, self.hidden_size), 2.0**12)
        x[:, 1::2] *= -1
        scale: torch.Tensor = (self._norm(x) - self._norm(-x)) / 2 * x.sign()
        return scale[0]

    def normed(self, last: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Last hidden states `[n, H]` before the final norm, after it."""
        with torch.inference_mode():
            found: npt.NDArray[np.float32] = self._normed(torch.from_numpy(np.ascontiguousarray(last))).numpy()
        return found

    def _normed(self, states: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._norm(part) for part in torch.split(states, ROW_CHUNK)]) if len(states) else states

    def next_logprobs(
        self, last: npt.NDArray[np.float32], next_ids: npt.ArrayLike, norm: Literal["pre", "post"]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Log-probability `[n]` of the tokens `next_ids` `[n]` at rows `last` `[n, H]`, and the likeliest tokens `[n]`.

        `norm` says whether `last` is before or after the final norm. ValueError for other shapes or unknown ids.
        """
        states = torch.from_numpy(np.ascontiguousarray(last, dtype=np.float32))
        ids = torch.from_numpy(np.ascontiguousarray(next_ids, dtype=np.int64))
        if states.dim() != 2 or states.shape[1] != self.hidden_size or ids.shape != states.shape[:1]:
            raise ValueError(
                f"states {list(states.shape)} and ids {list(ids.shape)}: [n, {self.hidden_size}] and [n] wanted"
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(f"token ids must lie in 0..{self.vocab_size - 1}")
        num_rows = len(ids)
        chosen = torch.empty(num_rows)
        log_sum = torch.full((num_rows,), -torch.inf)
        best = torch.full((num_rows,), -torch.inf)
        best_id = torch.zeros(num_rows, dtype=torch.int64)
        with torch.inference_mode(), safe_open(self._rows.file, framework="pt") as f:
            if norm == "pre":
                states = self._normed(states)
            stored = f.get_slice(self._rows_name)
            chunk = max(1, WEIGHT_CHUNK_BYTES // (4 * self.hidden_size))
            for start in range(0, self.vocab_size, chunk):
                stop = min(start + chunk, self.vocab_size)
                weight = stored[start:stop].float()  # [c, H]
                bias = None if self._bias is None else self._bias[start:stop]
                for a in range(0, num_rows, ROW_CHUNK):
                    part = slice(a, min(a + ROW_CHUNK, num_rows))
                    logits = self.logit_map(nn.functional.linear(states[part], weight, bias))  # [r, c]
                    log_sum[part] = torch.logaddexp(log_sum[part], logits.logsumexp(dim=1))
                    top, top_id = logits.max(dim=1)
                    better = top > best[part]
                    best[part] = torch.where(better, top, best[part])
                    best_id[part] = torch.where(better, top_id + start, best_id[part])
                    here = (ids[part] >= start) & (ids[part] < stop)
                    local = (ids[part] - start).clamp(0, stop - start - 1)
                    picked = logits.gather(1, local[:, None])[:, 0]
                    chosen[part] = torch.where(here, picked, chosen[part])
        return (chosen - log_sum).numpy(), best_id.numpy()


def trunk_prefix(structure: Structure, entries: dict[str, TensorEntry], files: TargetFiles) -> str:
    """What the trunk's tensors are prefixed with in the files: often the module's name, but not always.

    Raises ConfigError unless exactly one prefix leads to the norm's weight and to the first and last decoder layer.
    """
    at = len(structure.trunk_name) + 1 if structure.trunk_name else 0
    blocks, norm = structure.blocks_name[at:], structure.norm_name[at:]
    parameter = next((name for name, _ in structure.norm.named_parameters()), None)
    first, last = f"{blocks}.0.", f"{blocks}.{structure.num_layers - 1}."
    starts = _prefixes(entries, first) & _prefixes(entries, last)
    if parameter is not None:
        width = tuple(structure.norm.get_parameter(parameter).shape)
        starts = {
            p
            for p in starts
            if f"{p}{norm}.{parameter}" in entries and entries[f"{p}{norm}.{parameter}"].shape == width
        }
    own = f"{structure.trunk_name}." if structure.trunk_name else ""
    if own in starts:
        return own
    if len(starts) != 1:
        raise ConfigError(
            f"target {files.path}: looked in its weights for one prefix of '{first}…', '{last}…' and "
            f"'{norm}.{parameter}', found {sorted(starts) or 'none'}"
        )
    return starts.pop()


def _prefixes(entries: dict[str, TensorEntry], part: str) -> set[str]:
    """Everything that stands before `part` in a tensor's name, where `part` begins the name or follows a dot."""
    found = set()
    for name in entries:
        at = name.find(part)
        while at >= 0:
            if at == 0 or name[at - 1] == ".":
                found.add(name[:at])
            at = name.find(part, at + 1)
    return found


def _embedding_name(structure: Structure, prefix: str) -> str:
    at = len(structure.trunk_name) + 1 if structure.trunk_name else 0
    return f"{prefix}{structure.embeddings_name[at:]}.weight"


def _rows_name(
    model: nn.Module, structure: Structure, entries: dict[str, TensorEntry], embeddings: str, files: TargetFiles
) -> str:
    shape = (structure.vocab_size, structure.hidden_size)
    head = structure.head_name.rpartition(".")[2]
    heads = [n for n, e in entries.items() if f".{n}".endswith(f".{head}.weight") and e.shape == shape]
    config: Any = model.config
    tied = bool(
        getattr(config, "tie_word_embeddings", False) or getattr(config.get_text_config(), "tie_word_embeddings", False)
    )
    # A tied checkpoint may hold a copy of the head; transformers ties all the same.
    names = [embeddings] if tied and embeddings in entries else heads
    if len(names) != 1 or entries[names[0]].shape != shape:
        raise ConfigError(
            f"target {files.path}: looked in its weights for one '{head}.weight' of shape {list(shape)} "
            f"({'tied' if tied else 'not tied'} to '{embeddings}'), found {names or 'none'}"
        )
    if entries[names[0]].dtype not in _FLOATS:
        raise ConfigError(
            f"target {files.path}: '{names[0]}' is {entries[names[0]].dtype}; a quantised head is not read"
        )
    return names[0]


def _norm(structure: Structure, entries: dict[str, TensorEntry], prefix: str, files: TargetFiles) -> nn.Module:
    """The target's own norm module in float32, with its weights: a family may add 1 to them, or have none."""
    at = len(structure.trunk_name) + 1 if structure.trunk_name else 0
    if any(True for _ in structure.norm.buffers()):
        raise ConfigError(f"target {files.path}: its final norm keeps buffers, which is not known here")
    norm = copy.deepcopy(structure.norm)
    for name, _ in list(norm.named_parameters()):
        stored = f"{prefix}{structure.norm_name[at:]}.{name}"
        if stored not in entries:
            raise ConfigError(f"target {files.path}: no weight file has '{stored}' of the final norm")
        owner = norm.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(read_tensor(entries, stored), requires_grad=False))
    return norm


def read_tensor(entries: dict[str, TensorEntry], name: str) -> torch.Tensor:
    return _read_stored(entries[name], name).float()


def _read_stored(entry: TensorEntry, name: str) -> torch.Tensor:
    """The tensor as it lies in its file, in the dtype it has there."""
    try:
        with safe_open(entry.file, framework="pt") as f:
            tensor: torch.Tensor = f.get_tensor(name)
    except SafetensorError as error:
        raise ConfigError(f"target weights {entry.file}: {error}") from None
    return tensor
