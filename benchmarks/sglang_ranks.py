"""Correctness on GPUs: a small random target, Llama or with latent attention and experts as DeepSeek-V3 has them,
served with or without tensor parallelism; ranks compared by the probe, every captured state with transformers on a GPU.

    python benchmarks/sglang_ranks.py --kind mla --tokens 40000 --server-flags "… --tp-size 2"
"""

from __future__ import annotations

import argparse
import json
import shutil
from typing import Any

import numpy as np
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from eyas.capture.check import DeferredHead
from eyas.capture.requests import Batch
from eyas.capture.run import capture
from eyas.config import CaptureConfig, EngineConfig, TargetConfig
from eyas.engine.base import CaptureAnswer, CaptureRequest
from eyas.engine.hf import HfEngine
from eyas.engine.sglang.client import SglangEngine
from eyas.log import Progress, setup
from eyas.records import sample_id_of
from eyas.store.reader import DataSet
from eyas.store.verify import verify
from eyas.target.files import open_target
from eyas.target.head import TargetHead
from eyas.values import as_float32, median_row_error
from sglang_capture import Server, make_prompts, make_table, parse

VOCAB_SIZE = 32_000


def llama() -> PreTrainedModel:
    shape: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": VOCAB_SIZE}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=4096, tie_word_embeddings=False))


def mla() -> PreTrainedModel:
    """Head sizes, rank of the latent and choice of experts as in Kimi-K2; everything else small."""
    shape: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "moe_intermediate_size": 512,
                             "num_hidden_layers": 8, "first_k_dense_replace": 1}  # fmt: skip
    attention = {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 512, "kv_lora_rank": 512,
                 "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
               "norm_topk_prob": True, "routed_scaling_factor": 2.5}  # fmt: skip
    config = DeepseekV3Config(
        **shape, **attention, **experts, vocab_size=VOCAB_SIZE, max_position_embeddings=4096, tie_word_embeddings=False
    )
    # What SGLang reads and transformers does not keep a default for.
    config.moe_layer_freq, config.topk_method, config.scoring_func = 1, "noaux_tc", "sigmoid"
    return DeepseekV3ForCausalLM(config)


def main() -> None:
    kinds = {"llama": llama, "mla": mla}
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--kind", choices=list(kinds), default="llama")
    kind, rest = parser.parse_known_args()
    options = parse(rest)
    setup()
    target = options.scratch / "small"
    shutil.rmtree(options.scratch, ignore_errors=True)
    torch.manual_seed(0)
    kinds[kind.kind]().bfloat16().save_pretrained(target)
    ids = make_prompts("mix", options.tokens, VOCAB_SIZE, 2000)
    table = make_table(options.scratch / "samples.parquet", ids)
    server = Server("capture", options.port, target, open_target(target).config, options)
    try:
        server.wait()
        engine = SglangEngine(
            TargetConfig(path=target), EngineConfig(kind="sglang", url=server.url, check_layers="target")
        )
        place = CaptureConfig(out=options.scratch / "states", shard_tokens=8192, min_free_bytes=0)
        head = DeferredHead(lambda: TargetHead.load(target))
        receipt = capture(place, table, engine, head, progress=Progress())
        hello = dict(engine._hello)
        engine.close()
    finally:
        server.stop()
    assert verify(options.scratch / "states").exit_code == 0
    spec, data = engine.info().spec, DataSet(options.scratch / "states")
    reference = HfEngine(TargetConfig(path=target), EngineConfig(dtype="bfloat16"), spec.aux_layers)
    errors: dict[str, list[float]] = {name: [] for name in spec.fields}
    for prompt in ids:
        (answer,) = reference.capture(Batch([CaptureRequest(sample_id_of(prompt), prompt)]))
        assert isinstance(answer, CaptureAnswer)
        stored = data[data.index_of(answer.sample_id)]
        for name in spec.fields:
            mine = as_float32(stored.field(name), spec.dtype, spec.hidden_size)
            theirs = as_float32(answer.fields[name].data, spec.dtype, spec.hidden_size)
            errors[name].append(median_row_error(mine, theirs))
    print(
        json.dumps(
            {
                "tp_size": hello["tp_size"],
                "sglang": hello["sglang"],
                "read_back": hello["read_back"],
                "samples": receipt.committed,
                "tokens": receipt.tokens,
                "value_checked": receipt.checked_samples,
                "largest_median_error": {name: round(float(np.max(e)), 5) for name, e in errors.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
