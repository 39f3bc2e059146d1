"""Hidden states from transformers in this process, on a CPU or on CUDA.

Letters: `B` batch, `T` tokens (padded, in a batch), `H` hidden size, `V` target vocabulary, `L` decoder layers.

Only the trunk runs, without logits and without a cache. Hidden-state index `k` is taken by hooks on the decoder layers
(`0` what enters the first, `k` what leaves layer `k-1`), never from the tuple that models return, whose end is normed.
Batches are padded on the right and carry no attention mask: in a causal model no real token sees what comes after it,
so padding cannot reach a row that is kept, and without a mask the fast attention kernels apply.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import nn

from eyas.config import EngineConfig, TargetConfig
from eyas.engine.base import (
    CaptureAnswer,
    CaptureFailure,
    CaptureRequest,
    EngineInfo,
    Reference,
    RequestSource,
)
from eyas.engine.copies import Arrays, Copied, CpuViews, CudaCopies
from eyas.engine.pinned import HostPool
from eyas.engine.trunk import ENGINE, Taps, examine, input_device
from eyas.errors import ConfigError, EngineError, EngineRefused
from eyas.records import LAST, CaptureSpec, Provenance, StateBlock, default_aux_layers, hidden_field
from eyas.target.files import open_target, quantisation, target_digest, tensor_entries
from eyas.target.structure import Structure, find, load_config, logits_of, model_class, skeleton

logger = logging.getLogger(__name__)

WINDOW_BATCHES = {"cpu": 2, "cuda": 8}
"""Requests are taken for so many batches and sorted by length: more means less padding, later first answers, and more
that a kill loses; on a CPU one batch may take a minute."""
REFERENCE_LOGIT_BYTES = 256 * 1024 * 1024
"""Logits of a longer reference are computed in pieces of this size."""
PINNED_BYTES = 4 * 1024**3
"""Default of `pinned_bytes`: page-locked memory for copies from the device. Give it what may be in flight and a
quarter more (ranges of a slab do not always fit): a copy without room goes to pageable memory and stalls the device."""

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class HfEngine:
    """The `hf` engine; see `engine.base` for what it promises.

    Cheap until the first `capture`, which loads the weights. Raises ConfigError for a target, a device or layers that
    cannot work. `engine.extra` goes to transformers' `from_pretrained`, `pinned_bytes` apart, which overrides ours.
    """

    def __init__(
        self,
        target: TargetConfig,
        engine: EngineConfig,
        aux_layers: tuple[int, ...] | None = None,
        *,
        pinned_bytes: int = PINNED_BYTES,
    ) -> None:
        if target.path is None:
            raise ConfigError("target.path is not set: the directory of the model whose hidden states are captured")
        self._files = open_target(target.path)
        self._trust_remote_code = target.trust_remote_code
        self._batch_tokens = engine.batch_tokens
        self._extra = dict(engine.extra)
        self._pinned_bytes = int(self._extra.pop("pinned_bytes", pinned_bytes))
        self._device = _device(engine.device)
        self._window_tokens = WINDOW_BATCHES[self._device.type] * engine.batch_tokens
        self._config = load_config(self._files, trust_remote_code=target.trust_remote_code)
        self._dtype = _dtype_name(engine.dtype, self._config, self._files.path)
        attention = {k: v for k, v in self._extra.items() if k == "attn_implementation"}
        model: Any = skeleton(
            self._config, trust_remote_code=target.trust_remote_code, dtype=DTYPES[self._dtype], **attention
        )
        structure = find(model)
        self._attention = str(getattr(model.config.get_text_config(), "_attn_implementation", None) or "own")
        self._num_layers = structure.num_layers
        self._hidden_size = structure.hidden_size
        self._vocab_size = structure.vocab_size
        self._num_embeddings = int(structure.embeddings.weight.shape[0])  # type: ignore[index]
        text_config = self._config.get_text_config()
        self._max_tokens = int(getattr(text_config, "max_position_embeddings", None) or np.iinfo(np.int32).max)
        self._aux_layers = _checked_layers(aux_layers, self._num_layers)
        self._info: EngineInfo | None = None
        self._loaded: _Loaded | None = None

    def info(self) -> EngineInfo:
        """What will be captured and how, without loading the weights (they are sampled once, for their digest)."""
        if self._info is None:
            spec = CaptureSpec(
                target_digest=target_digest(self._files.path),
                quantisation=quantisation(self._files.config),
                num_layers=self._num_layers,
                hidden_size=self._hidden_size,
                vocab_size=self._vocab_size,
                aux_layers=self._aux_layers,
                last_hidden_norm="post",
                dtype=self._dtype,
            )
            self._info = EngineInfo(spec=spec, provenance=self._provenance(), max_tokens=self._max_tokens)
        return self._info

    def _provenance(self) -> Provenance:
        settings = {
            "torch": str(torch.__version__),
            "device": self._device.type,
            "dtype": self._dtype,
            "attention": self._attention,
            "float32_matmul": torch.get_float32_matmul_precision(),
            "target_config": self._files.config_digest,
        }
        if self._device.type == "cuda":
            settings["device_name"] = torch.cuda.get_device_name(self._device)
            settings["cuda"] = str(torch.version.cuda)
        else:
            settings["device_name"] = torch.backends.cpu.get_cpu_capability()
        settings |= {f"extra.{name}": str(value) for name, value in self._extra.items()}
        return Provenance(engine=ENGINE, version=transformers.__version__, settings=settings, host=socket.gethostname())

    def capture(self, source: RequestSource) -> Iterator[CaptureAnswer | CaptureFailure]:
        """Answers as each batch completes; on CUDA batch `n` is copied while batch `n+1` computes.

        The memory of a block goes when its views go. On a CPU a block is a view of its padded batch, so the last view
        of a batch keeps that batch's field alive, padding included; batches are of nearly equal lengths, so this is
        little more than was reserved. Raises EngineError when the target cannot be loaded or is not built as expected.
        """
        loaded = self._load()
        budget = self._batch_tokens
        batches: deque[list[CaptureRequest]] = deque()
        started: _Started | None = None
        try:
            while True:
                if not batches:
                    # With a batch in flight, answers are held back: waiting for its bytes to return would be forever.
                    requests = source.take(self._window_tokens, wait=started is None)
                    if not requests and started is None:
                        return
                    if not requests:
                        assert started is not None
                        yield from self._finish(loaded, started)
                        started = None
                        continue
                    refused = {id(r): why for r in requests if (why := self._refusal(r))}
                    for request in requests:
                        if id(request) in refused:
                            yield _failure(request, refused[id(request)])
                    batches.extend(form_batches([r for r in requests if id(r) not in refused], budget))
                    del requests
                    continue
                batch = batches.popleft()
                try:
                    following = self._start(loaded, batch)
                except torch.OutOfMemoryError:
                    # Outside the handler: inside, the traceback keeps the failed forward's memory alive.
                    following = None
                if following is None:
                    torch.cuda.empty_cache()
                    if started is not None:
                        yield from self._finish(loaded, started)
                        started = None
                        batches.appendleft(batch)
                    elif len(batch) == 1:
                        yield _failure(
                            batch[0], f"{len(batch[0].token_ids)} tokens do not fit into the device's memory"
                        )
                    else:
                        budget = min(budget, padded_tokens(batch) // 2)
                        logger.warning(
                            "out of device memory at %d tokens in a batch: from here on at most %d "
                            "(engine.batch_tokens is %d)", padded_tokens(batch), budget, self._batch_tokens
                        )  # fmt: skip
                        rest = [request for waiting in (batch, *batches) for request in waiting]
                        batches = deque(form_batches(rest, budget))
                        del rest
                    del batch
                    continue
                del batch
                if started is not None:
                    yield from self._finish(loaded, started)
                started, following = following, None
                if not loaded.copies.overlaps:
                    yield from self._finish(loaded, started)
                    started = None
        finally:
            if started is not None:
                started.wait()

    @torch.inference_mode()
    def states(self, token_ids: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[np.float32]]:
        """`[T, H]` float32 of one sequence by field: the auxiliary layers of this engine, and `last` after the norm."""
        states = self._forward(self._load(), [token_ids])
        return {name: tensor[0].float().cpu().numpy() for name, tensor in states.items()}

    def target(self) -> tuple[Structure, Taps]:
        """The target in memory, and hooks on it for the auxiliary layers of this engine: for who decodes with it."""
        loaded = self._load()
        return loaded.structure, loaded.taps

    def close(self) -> None:
        """Let go of the model; answers that were given stay valid."""
        if self._loaded is not None:
            self._loaded.copies.close()
            self._loaded = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _load(self) -> _Loaded:
        if self._loaded is None:
            weight_bytes = sum(entry.end - entry.start for entry in tensor_entries(self._files).values())
            logger.info("loading target %s: %.2f GB of weights, as %s on %s", self._files.path, weight_bytes / 1e9,
                        self._dtype, self._device)  # fmt: skip
            if (
                self._device.type == "cpu"
                and self._dtype != "float32"
                and torch.backends.cpu.get_cpu_capability() == "AVX2"
            ):
                logger.warning("this CPU has no %s arithmetic: engine.dtype = 'float32' is several times faster here",
                               self._dtype)  # fmt: skip
            start = time.monotonic()
            model = self._load_model()
            structure = find(model)
            taps = Taps(structure, self._aux_layers)
            with torch.inference_mode():
                taps.changed_in_place = examine(structure, input_device(structure))
            copies = CudaCopies(HostPool(self._pinned_bytes)) if self._device.type == "cuda" else CpuViews()
            self._loaded = _Loaded(model, structure, taps, copies)
            logger.info("target loaded in %.1f s", time.monotonic() - start)
        return self._loaded

    def _load_model(self) -> nn.Module:
        options: dict[str, Any] = {"dtype": DTYPES[self._dtype], **self._extra}
        if self._device.type == "cuda" and importlib.util.find_spec("accelerate") is not None:
            # Weights go straight to the device instead of through the host's memory.
            options.setdefault("device_map", {"": str(self._device)})
        bars = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            model, report = model_class(self._config).from_pretrained(
                self._files.path,
                trust_remote_code=self._trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
            if "device_map" not in options:
                model = model.to(self._device)
        except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
            text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise EngineError(f"target {self._files.path} cannot be loaded: {text}", engine=ENGINE) from error
        finally:
            if bars:
                transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        # transformers fills what is missing with random numbers and only logs it.
        wrong = sorted({str(name) for key in ("missing_keys", "mismatched_keys") for name in report.get(key) or ()})
        if wrong:
            raise EngineError(
                f"target {self._files.path}: {len(wrong)} weights are missing or of another shape ({wrong[0]}, …); "
                "config.json and weights do not belong together",
                engine=ENGINE,
            )
        for config in (model.config, model.config.get_text_config()):
            for flag in ("output_router_logits", "output_attentions", "output_hidden_states"):
                if getattr(config, flag, False):
                    setattr(config, flag, False)  # kept for every layer, and nobody asked
        loaded: nn.Module = model.eval().requires_grad_(False)
        return loaded

    def _refusal(self, request: CaptureRequest) -> str:
        """Why a request can never be answered, or nothing."""
        ids = request.token_ids
        if len(ids) == 0:
            return "no tokens"
        if len(ids) > self._max_tokens:
            return f"{len(ids)} tokens, and the target takes {self._max_tokens}"
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._num_embeddings:
            return f"token id {low if low < 0 else high} outside 0..{self._num_embeddings - 1}, the target's vocabulary"
        return ""

    @torch.inference_mode()
    def _start(self, loaded: _Loaded, batch: Sequence[CaptureRequest]) -> _Started:
        """Launch one batch and the copies of its states; on CUDA nothing is waited for."""
        lengths = [len(request.token_ids) for request in batch]
        states = self._forward(loaded, [request.token_ids for request in batch])
        copied = loaded.copies.start(states, lengths)
        return _Started(requests=deque(batch), copied=copied)

    def _finish(self, loaded: _Loaded, started: _Started) -> Iterator[CaptureAnswer]:
        arrays = started.wait()
        requests = started.requests
        while requests:
            # Nothing of an answer stays in this frame while the consumer has it.
            yield self._answer(loaded, requests.popleft(), arrays.popleft())

    def _answer(self, loaded: _Loaded, request: CaptureRequest, arrays: Arrays) -> CaptureAnswer:
        return CaptureAnswer(
            sample_id=request.sample_id,
            attempt=request.attempt,
            token_ids=request.token_ids,
            fields=self._blocks(arrays),
            reference=self._reference(loaded, request) if request.with_reference else None,
        )

    def _blocks(self, arrays: Arrays) -> dict[str, StateBlock]:
        width = self._hidden_size
        value_bytes = DTYPES[self._dtype].itemsize
        return {
            name: StateBlock(self._dtype, (array.size // (width * value_bytes), width), array.data)
            for name, array in arrays.items()
        }

    def _forward(self, loaded: _Loaded, token_ids: Sequence[npt.NDArray[np.int32]]) -> dict[str, torch.Tensor]:
        """Every field of a batch, `[B, T, H]` contiguous, padded on the right."""
        longest = max(len(ids) for ids in token_ids)
        padded = torch.zeros(
            len(token_ids), longest, dtype=torch.long, pin_memory=self._device.type == "cuda"
        )  # [B, T]; id 0 stands for padding: rows of padding are never looked at
        for row, ids in zip(padded.numpy(), token_ids, strict=True):
            row[: len(ids)] = ids
        input_ids = padded.to(input_device(loaded.structure), non_blocking=True)
        with loaded.taps as hidden:
            last = loaded.structure.trunk(input_ids=input_ids, use_cache=False).last_hidden_state
        states = {hidden_field(k): hidden[k] for k in self._aux_layers} | {LAST: last}
        expected = (*padded.shape, self._hidden_size)
        for name, tensor in states.items():
            if tuple(tensor.shape) != expected:
                raise EngineError(f"{name} has shape {list(tensor.shape)}, expected {list(expected)}", engine=ENGINE)
        # A few models keep their residual stream in float32: stored is the dtype that the spec names.
        return {name: tensor.to(DTYPES[self._dtype]).contiguous() for name, tensor in states.items()}

    @torch.inference_mode()
    def _reference(self, loaded: _Loaded, request: CaptureRequest) -> Reference | None:
        """What the whole model says about one sample by itself; None, with a warning, when memory does not suffice."""
        try:
            alone = loaded.copies.start(self._forward(loaded, [request.token_ids]), [len(request.token_ids)])
            blocks = self._blocks(alone.wait()[0])
            return _whole_model(loaded, request.token_ids, blocks, self._aux_layers)
        except torch.OutOfMemoryError:
            logger.warning("sample %s: no reference, the whole model's pass over %d tokens does not fit into memory",
                           request.sample_id, len(request.token_ids))  # fmt: skip
        torch.cuda.empty_cache()
        return None


def form_batches(requests: Sequence[CaptureRequest], batch_tokens: int) -> list[list[CaptureRequest]]:
    """Batches of similar lengths, longest first, of at most `batch_tokens` tokens each, padding included.

    A sample longer than that is a batch of its own. Longest first, so that memory runs out at once or not at all.
    """
    batches: list[list[CaptureRequest]] = []
    for request in sorted(requests, key=lambda r: -len(r.token_ids)):
        last = batches[-1] if batches else []
        if last and len(last[0].token_ids) * (len(last) + 1) <= batch_tokens:
            last.append(request)
        else:
            batches.append([request])
    return batches


def padded_tokens(batch: Sequence[CaptureRequest]) -> int:
    """Tokens that a forward over `batch` computes, padding included."""
    return len(batch) * max(len(request.token_ids) for request in batch)


@dataclass(slots=True)
class _Loaded:
    """What exists once the weights are in memory."""

    model: nn.Module
    structure: Structure
    taps: Taps
    copies: CpuViews | CudaCopies


@dataclass(slots=True)
class _Started:
    """A batch whose forward was launched."""

    requests: deque[CaptureRequest]
    copied: Copied

    def wait(self) -> deque[Arrays]:
        return self.copied.wait()


def _whole_model(
    loaded: _Loaded, token_ids: npt.NDArray[np.int32], alone: Mapping[str, StateBlock], layers: Sequence[int]
) -> Reference:
    """The reference by the model's own forward; only a long sample's logits are computed apart from its trunk."""
    structure = loaded.structure
    ids = torch.from_numpy(token_ids.astype(np.int64)).to(input_device(structure))  # [T]
    rows = max(1, REFERENCE_LOGIT_BYTES // (4 * structure.vocab_size))
    whole = len(token_ids) <= rows
    run = loaded.model if whole else structure.causal.get_submodule(structure.body_name)
    output = run(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    tuple_of_states = output.hidden_states or ()
    hidden = {}
    if len(tuple_of_states) == structure.num_layers + 1:
        hidden = {k: tuple_of_states[k][0].float().cpu().numpy() for k in layers if k < structure.num_layers}
    del tuple_of_states
    logprobs = []
    for start in range(0, len(token_ids) - 1, rows):
        stop = min(start + rows, len(token_ids) - 1)
        if whole:
            logits = output.logits[0, start:stop]
        else:
            logits = logits_of(structure, output.last_hidden_state[:, start:stop])[0]
        following = ids[start + 1 : stop + 1, None].to(logits.device)
        logprobs.append(logits.float().log_softmax(-1).gather(1, following)[:, 0].cpu())
    joined = torch.cat(logprobs) if logprobs else torch.empty(0)
    return Reference(next_logprobs=joined.numpy(), hidden=hidden, alone=alone)


def _failure(request: CaptureRequest, why: str) -> CaptureFailure:
    error = EngineRefused(f"sample {request.sample_id}: {why}", engine=ENGINE, sample_id=request.sample_id)
    return CaptureFailure(request.sample_id, request.attempt, error)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device '{name}' is not one of auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"engine.device '{name}', but torch {torch.__version__} sees no CUDA device here")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"engine.device '{name}', but there are {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", device.index or 0)
    return device


def _dtype_name(wanted: str, config: Any, path: Any) -> str:
    if wanted != "auto":
        return wanted
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        found = "no dtype" if dtype is None else f"dtype '{name}'"
        raise ConfigError(
            f"target {path}: its config.json names {found}; set engine.dtype to one of {', '.join(DTYPES)}"
        )
    return name


def _checked_layers(layers: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    if layers is None:
        return default_aux_layers(num_layers)
    outside = [k for k in layers if not 0 <= k <= num_layers]
    if outside:
        raise ConfigError(
            f"capture.aux_layers {outside} lie outside 0..{num_layers}, the target's hidden-state indices "
            f"(0 = embeddings, {num_layers} = output of the last layer)"
        )
    if list(layers) != sorted(set(layers)):
        raise ConfigError(f"capture.aux_layers {list(layers)} must ascend without repeats")
    return layers
