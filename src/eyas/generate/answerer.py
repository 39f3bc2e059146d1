"""The target in this process: loaded once, asked in batches, its token ids handed back as it wrote them.

Letters: `B` rows of a batch, `T` tokens with padding, `N` new tokens, `V` target vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers import StoppingCriteriaList as Criteria

from eyas.config import EngineConfig, TargetConfig
from eyas.errors import ConfigError, EngineError
from eyas.generate.dialogue import TemplateError
from eyas.records import digest_bytes
from eyas.target.files import TargetFiles
from eyas.target.structure import load_config, model_class

OnStep = Callable[[int, int], None]
"""Called after each step with (tokens written so far in this batch, steps done)."""

CPU_FEATURES: Mapping[torch.dtype, tuple[str, ...]] = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "fp16_arith"),
}
"""What a CPU must have, by torch's names, any one of them, to compute in a 16-bit dtype."""


class TargetChat:
    """The target's tokenizer and chat template, as a dialogue needs them."""

    def __init__(self, tokenizer: Any, end_of_turn: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.end_of_turn = end_of_turn

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # Templates are programs: what they do not expect ends in whatever Jinja or Python raises.
            raise TemplateError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None
        return str(text)

    def encode(self, text: str) -> list[int]:
        # The template spells special tokens out, the first one too: adding them would double it.
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )


class Answerer:
    """The loaded target. Greedy at temperature 0; else each row is sampled with random numbers of its own."""

    def __init__(self, files: TargetFiles, target: TargetConfig, engine: EngineConfig) -> None:
        """Raises ConfigError when config, tokenizer, chat template or weights do not load."""
        config = load_config(files, trust_remote_code=target.trust_remote_code)
        tokenizer = _load_tokenizer(files.path, target)
        self.device = _device(engine.device)
        dtype = _dtype(engine.dtype, config, self.device)
        self.dtype = str(dtype).removeprefix("torch.")
        self._model = _load_model(files.path, config, dtype=dtype, device=self.device, target=target)
        end_of_turn = _end_of_turn(self._model.generation_config, tokenizer)
        if not end_of_turn:
            raise ConfigError(f"target {files.path}: names no eos token, so no answer would ever end")
        self.chat = TargetChat(tokenizer, end_of_turn)
        self.max_tokens = _max_tokens(config)
        # The target's own defaults (repetition penalty, top-k, …) are not ours: only what the run file says counts.
        self._model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        seeds: Sequence[str],
        on_step: OnStep,
    ) -> list[list[int]]:
        """The ids written after each prompt: up to and with the first end-of-turn token, at most `max_new_tokens`.

        `seeds` name the random numbers of each row: a row's answer does not depend on its neighbours in the batch, as
        far as arithmetic goes (in bfloat16, near-ties may fall either way).
        """
        width = max(map(len, prompts))
        input_ids = torch.full((len(prompts), width), min(self.chat.end_of_turn), dtype=torch.long)  # [B, T]
        attention_mask = torch.zeros_like(input_ids)  # [B, T]
        for row, prompt in enumerate(prompts):
            # On the left: every row's next token is then predicted in the last column.
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, width - len(prompt) :] = 1
        ends = torch.tensor(sorted(self.chat.end_of_turn), device=self.device)
        processors = LogitsProcessorList()
        if temperature > 0:
            draws = np.stack([_uniform(seed, max_new_tokens) for seed in seeds])  # [B, N]
            processors.append(_Sampler(torch.from_numpy(draws).to(self.device), temperature, width))
        try:
            with torch.inference_mode():
                out = self._model.generate(
                    input_ids=input_ids.to(self.device),
                    attention_mask=attention_mask.to(self.device),
                    generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                        max_new_tokens=max_new_tokens,
                        do_sample=False,
                        eos_token_id=ends.tolist(),
                        pad_token_id=int(ends[0]),
                    ),
                    logits_processor=processors,
                    stopping_criteria=Criteria([_StepReport(ends, width, on_step)]),
                )  # [B, T + N]
        except torch.OutOfMemoryError:
            raise EngineError(
                f"{self.device} has no memory left for {len(prompts)} prompts of up to {width} tokens and answers; "
                "lower generate.batch_size and run the same command again"
            ) from None
        return [self._until_end(row) for row in out[:, width:].tolist()]

    def _until_end(self, written: list[int]) -> list[int]:
        """Without the padding that fills a row which ended before its neighbours."""
        for i, token_id in enumerate(written):
            if token_id in self.chat.end_of_turn:
                return written[: i + 1]
        return written


class _Sampler(LogitsProcessor):
    """Draws from the softmax with one uniform number per row and step, and leaves greedy search only that token."""

    def __init__(self, draws: torch.Tensor, temperature: float, width: int) -> None:
        self._draws = draws  # [B, N]
        self._temperature = temperature
        self._width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self._width
        # float64: a running sum over a large vocabulary in float32 loses the unlikely tokens.
        heights = torch.softmax(scores.double() / self._temperature, dim=-1).cumsum(dim=-1)  # [B, V]
        level = self._draws[:, step : step + 1] * heights[:, -1:]
        chosen = torch.searchsorted(heights, level, right=True).clamp_(max=scores.shape[-1] - 1)  # [B, 1]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class _StepReport(StoppingCriteria):
    """Never stops anything: it is the one place that sees every step of a long batch."""

    def __init__(self, ends: torch.Tensor, width: int, on_step: OnStep) -> None:
        self._ends, self._width, self._on_step = ends, width, on_step
        self._running: torch.Tensor | None = None  # [B] rows that have not ended
        self._written = torch.zeros((), dtype=torch.long, device=ends.device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self._running is None:
            self._running = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        self._written += self._running.sum()
        self._running &= ~torch.isin(input_ids[:, -1], self._ends)
        self._on_step(int(self._written), input_ids.shape[1] - self._width)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _uniform(seed: str, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`[count]` uniform numbers in [0, 1) that depend on the seed alone, on every platform."""
    return np.random.Generator(np.random.Philox(int(digest_bytes(seed.encode()), 16))).random(count)


def _load_model(path: Path, config: Any, *, dtype: torch.dtype, device: torch.device, target: TargetConfig) -> Any:
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, report = model_class(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=target.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
        model = model.to(device).eval()
    except torch.OutOfMemoryError:
        raise ConfigError(f"target {path}: its weights do not fit the memory of {device}") from None
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise ConfigError(f"target {path}: cannot be loaded: {_first_line(error)}") from error
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    # What is missing gets random numbers from transformers, and answers nobody asked for.
    wrong = sorted({str(name) for key in ("missing_keys", "mismatched_keys") for name in report.get(key) or ()})
    if wrong:
        raise ConfigError(f"target {path}: {len(wrong)} weights are missing or of another shape, first '{wrong[0]}'")
    return model


def _load_tokenizer(path: Path, target: TargetConfig) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=target.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"target {path}: its tokenizer cannot be loaded: {_first_line(error)}") from error
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"target {path}: its tokenizer has no chat template, so no conversation can be put to it")
    return tokenizer


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device '{name}': {_first_line(error)}") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"engine.device '{name}': this torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """The dtype to compute in: as asked; `auto` is the target's own, or float32 where the CPU is no good at that.

    16-bit weights are exact in float32, so those answers are the target's too, only less rounded.
    """
    if name != "auto":
        return _named_dtype(name)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    own = getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.float32
    dtype = own if isinstance(own, torch.dtype) else _named_dtype(str(own).removeprefix("torch."))
    if device.type == "cpu" and dtype in CPU_FEATURES and not _cpu_computes_in(dtype):
        return torch.float32
    return dtype


def _named_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"'{name}' is no dtype of torch {torch.__version__}; set engine.dtype")
    return dtype


def _cpu_computes_in(dtype: torch.dtype) -> bool:
    """Whether this CPU has arithmetic for a 16-bit dtype; others imitate it, several times slower than float32.

    Asked of the CPU, not measured: on a busy machine a measurement says one thing now and another on resume.
    """
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch does not tell
        return True
    has = torch.cpu.get_capabilities()
    return any(has.get(name) for name in CPU_FEATURES.get(dtype, ()))


def _end_of_turn(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    own = getattr(generation_config, "eos_token_id", None)
    ids = list(own) if isinstance(own, (list, tuple)) else [own]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _max_tokens(config: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    return int(positions) if positions else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
