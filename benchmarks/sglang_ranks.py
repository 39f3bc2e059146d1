"""Correctness over several GPUs: a small random Llama served with tensor parallelism, ranks compared by the probe,
every captured state compared with transformers on one GPU."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

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


def main() -> None:
    options = parse()
    setup()
    target = options.scratch / "small"
    shutil.rmtree(options.scratch, ignore_errors=True)
    shape: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32_000}
    config = LlamaConfig(**shape, **heads, max_position_embeddings=4096, tie_word_embeddings=False)
    LlamaForCausalLM(config).bfloat16().save_pretrained(target)
    ids = make_prompts("mix", options.tokens, 32_000, 2000)
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
