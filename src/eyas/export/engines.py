"""What each engine loads: its layout, what it cannot load, and the line that starts it with a drafter.

Found by reading these versions' own code, for a Llama drafter: SGLang 0.5.23 `srt/models/llama_eagle3.py` and
`srt/speculative/eagle_worker_v2.py`; vLLM 0.32.0 `model_executor/models/llama_eagle3.py`, `v1/spec_decode` and
`transformers_utils/configs/speculators`; speculators 0.9.0 `models/eagle3`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyas.model.layout import WrittenLayout, config_of, speculators_config_of
from eyas.model.shape import DraftShape

EngineName = Literal["sglang", "vllm", "speculators"]


@dataclass(frozen=True, slots=True)
class Engine:
    """One of those who load drafters."""

    name: EngineName
    version: str
    """Whose code was read."""
    layout: WrittenLayout


ENGINES: dict[str, Engine] = {
    "sglang": Engine("sglang", "SGLang 0.5.23", "engine"),
    "vllm": Engine("vllm", "vLLM 0.32.0", "engine"),
    "speculators": Engine("speculators", "speculators 0.9.0, vLLM 0.32.0", "speculators"),
}


def refusals(engine: Engine, shape: DraftShape, num_target_layers: int) -> list[str]:
    """Why the engine cannot load a drafter of this shape, or would load it wrongly; one line each."""
    deepest, reads = shape.aux_layers[-1], list(shape.aux_layers)
    found = []
    if deepest > num_target_layers:
        found.append(f"reads hidden-state indices {reads} of a target of {num_target_layers} layers")
    if shape.aux_layers[0] < 1:
        found.append(f"reads hidden-state indices {reads}: index 0, the embeddings, has no name in SGLang")
    if engine.name == "sglang":
        if shape.num_layers > 1:
            found.append(
                f"has {shape.num_layers} layers: SGLang gives the norms of further layers other names, and skips, "
                "without a word, those that it does not know"
            )
        if shape.own_embedding:
            found.append(
                f"has a hidden size of {shape.hidden_size}, its target {shape.target_hidden_size}: SGLang puts the "
                "target's embedding in the place of the drafter's own"
            )
        if shape.num_aux * shape.target_hidden_size == shape.hidden_size:
            found.append(
                f"reads {shape.num_aux} auxiliary state as wide as its own: SGLang takes such states for the drafter's "
                "and leaves fc out"
            )
        if deepest == num_target_layers:
            found.append(f"reads hidden-state index {deepest}, the last layer's output: SGLang never captures it")
    if engine.name == "speculators" and shape.own_embedding:
        found.append(
            f"has a hidden size of {shape.hidden_size}, its target {shape.target_hidden_size}: speculators has one "
            "hidden size for both"
        )
    return found


def config_for(
    engine: Engine,
    shape: DraftShape,
    *,
    target_config: Mapping[str, Any],
    dtype: str,
    num_draft_tokens: int,
    target_name: str | None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`config.json` of an export."""
    if engine.layout == "speculators":
        return speculators_config_of(
            shape,
            target_config=target_config,
            dtype=dtype,
            num_draft_tokens=num_draft_tokens,
            target_name=target_name,
            extra=extra,
        )
    return config_of(shape, target_config=target_config, dtype=dtype, extra=extra)


def launch(
    engine: Engine, *, target: str, draft: str, num_draft_tokens: int, dtype: str | None, alone: bool = False
) -> str:
    """The line that starts a server with the drafter, for chains of `num_draft_tokens`.

    `dtype`: of both models, where the drafter's is not the target's own. `alone`: a speculators directory that names
    its target is served by its own name.
    """
    flag = f" --dtype {dtype}" if dtype else ""
    speculative = json.dumps({"method": "eagle3", "model": draft, "num_speculative_tokens": num_draft_tokens})
    target, draft = shlex.quote(target), shlex.quote(draft)
    if engine.name == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target}{flag} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {draft} --speculative-num-steps {num_draft_tokens} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {num_draft_tokens + 1}"
        )
    if alone:
        return f"vllm serve {draft}{flag}"
    return f"vllm serve {target}{flag} --speculative-config {shlex.quote(speculative)}"
