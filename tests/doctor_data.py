"""A tiny target with a chat template, its own answers prepared and captured, and a drafter that knows them by heart."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from eyas import config as configuration
from eyas.config import EngineConfig, TargetConfig
from eyas.data.prepare import prepare
from eyas.data.table import SampleTable, TableMetadata, TableWriter
from eyas.doctor.findings import Report
from eyas.doctor.run import Ask, examine
from eyas.engine.base import CaptureAnswer, CaptureRequest, EngineInfo, RequestSource
from eyas.engine.hf import HfEngine
from eyas.log import Progress
from eyas.model.checkpoint import CONFIG, WEIGHTS
from eyas.records import LAST, Sample, hidden_field
from eyas.target.head import TargetHead
from eyas.train.drafts import find_draft
from eyas.train.run import train
from fake_data import config, run

TOML = """
[target]
path = "target"
[data]
sources = ["chats.jsonl"]
samples = "samples.parquet"
held_out = 0.3
workers = 1
[engine]
dtype = "float32"
device = "cpu"
[capture]
out = "states"
[draft]
vocab_size = 200
[train]
out = "run"
ttt_length = 3
pack_tokens = 256
learning_rate = 1e-2
warmup = 0.1
epochs = 30
log_every = 100
eval_every = 1000
checkpoint_every = 1000
device = "cpu"
"""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<3> {{ m.content }} <4> {% else %}<5> <6> {{ m.content }} <2> "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<5> <6> {% endif %}"
)
"""Word `wN` is token N, and `<N>` for N below 10: a question is `3 … 4`, an answer `5 6 … 2`."""


def save_tokenizer(path: Path, template: str = TEMPLATE) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = Tokenizer(models.WordLevel({word(i): i for i in range(301)}, unk_token="<0>"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, bos_token="<1>", eos_token="<2>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)


def word(token: int) -> str:
    return f"<{token}>" if token < 10 else f"w{token}"


def words(ids: list[int]) -> str:
    return " ".join(map(word, ids))


@torch.no_grad()
def chats(model: Any, num_chats: int) -> Iterator[dict[str, Any]]:
    """Two turns each, as `eyas generate` writes them: greedy answers with their own token ids and mask."""
    rng = np.random.default_rng(0)
    for number in range(num_chats):
        ids: list[int] = []
        mask: list[int] = []
        messages = []
        for _ in range(2):
            question = rng.integers(10, 301, int(rng.integers(2, 6))).tolist()
            ids += [3, *question, 4, 5, 6]
            mask += [0] * (len(ids) - len(mask))
            answer: list[int] = []
            for _ in range(int(rng.integers(8, 14))):
                answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
            ids += answer
            mask += [1] * len(answer)
            messages += [{"role": "user", "content": words(question)}, {"role": "assistant", "content": words(answer)}]
            # The template ends an answer; that token is nobody's.
            ids.append(2)
            mask.append(0)
        yield {"id": f"c{number}", "messages": messages, "input_ids": ids, "loss_mask": mask}


class Wrong:
    """The hf engine with a fault: fields of `taken` under other names, and nothing to compare them with."""

    def __init__(self, target: Path, taken: tuple[int, ...], rename: dict[str, str]) -> None:
        self._inner = HfEngine(TargetConfig(path=target), EngineConfig(device="cpu", dtype="float32"), taken)
        self._rename = rename
        info = self._inner.info()
        spec = info.spec.model_copy(update={"aux_layers": (1, 2)})
        self._info = dataclasses.replace(info, spec=spec)
        self.head = TargetHead.load(target)

    def info(self) -> EngineInfo:
        return self._info

    def capture(self, source: RequestSource) -> Iterator[Any]:
        class Plain:
            def take(self, max_tokens: int, *, wait: bool) -> list[CaptureRequest]:
                taken = source.take(max_tokens, wait=wait)
                return [dataclasses.replace(r, with_reference=False) for r in taken]

        for answer in self._inner.capture(Plain()):
            assert isinstance(answer, CaptureAnswer)
            fields = {new: answer.fields[old] for new, old in self._rename.items()}
            yield dataclasses.replace(answer, fields=fields)

    def close(self) -> None:
        self._inner.close()


def shifted_engine(target: Path, by: int) -> Wrong:
    """Layers 1 and 2 by name, others by content."""
    rename = {hidden_field(k): hidden_field(k + by) for k in (1, 2)} | {LAST: LAST}
    return Wrong(target, tuple(k + by for k in (1, 2)), rename)


def unnormed_engine(target: Path) -> Wrong:
    """The last state before the norm, said to be behind it."""
    return Wrong(target, (1, 2, 4), {"hidden.1": "hidden.1", "hidden.2": "hidden.2", LAST: "hidden.4"})


@functools.cache
def base_in(root: Path) -> Path:
    """Made once in a process, for every module of tests."""
    return make(root / "doctor-base")


def make(base: Path, num_chats: int = 18) -> Path:
    """Everything up to a trained drafter, in `base`."""
    base.mkdir(parents=True, exist_ok=True)
    model = tiny_models.build("llama")
    model.save_pretrained(base / "target")
    save_tokenizer(base / "target")
    with (base / "chats.jsonl").open("w") as out:
        for row in chats(model, num_chats):
            out.write(json.dumps(row) + "\n")
    (base / "run.toml").write_text(TOML)
    tree = configuration.load(base / "run.toml", [])
    prepare(tree.data, tree.target, Progress(stream=io.StringIO()))
    capture_with(base, base / "states")
    train_in(base)
    return base


def capture_with(base: Path, out: Path, engine: Any = None) -> None:
    if engine is None:
        engine = HfEngine(TargetConfig(path=base / "target"), EngineConfig(device="cpu", dtype="float32"), None)
        engine.head = TargetHead.load(base / "target")  # type: ignore[attr-defined]
    table = SampleTable.open(base / "samples.parquet")
    receipt = run(table, config(out, shard_tokens=400, in_flight_bytes=10_000_000), engine=engine)
    assert receipt.pending == 0 and receipt.rejected == 0, receipt


def train_in(base: Path, *overrides: str) -> Path:
    """The best drafter of a training."""
    tree = configuration.load(base / "run.toml", list(overrides))
    assert tree.data.samples is not None and tree.capture.out is not None
    # Its page says nothing here, and costs seconds.
    with mock.patch("eyas.train.run.write_report", return_value=[]):
        receipt = train(
            tree.train, tree.draft, tree.target, table=SampleTable.open(tree.data.samples), states=tree.capture.out,
            resolved=configuration.dump(tree), progress=Progress(stream=io.StringIO()), stop=threading.Event(),
        )  # fmt: skip
    assert receipt is not None
    return find_draft(None, tree.train.out)


def diagnose(base: Path, *overrides: str, draft: Path | None = None, server: str = "") -> Report:
    """As the command does."""
    tree = configuration.load(base / "run.toml", list(overrides))
    assert tree.data.samples is not None and tree.capture.out is not None
    ask = Ask(find_draft(draft, tree.train.out), SampleTable.open(tree.data.samples), tree.capture.out, server)
    return examine(tree, ask, Progress(stream=io.StringIO()))


def diagnose_stored(base: Path, *overrides: str, draft: Path | None = None) -> Report:
    """By what is stored alone: for faults that show without the target in memory, which costs a second."""
    return diagnose(base, "engine.check_layers=off", *overrides, draft=draft)


def changed(base: Path, out: Path, **changes: Any) -> Path:
    """A copy of the drafter with other entries in its config.json; None takes one out."""
    shutil.copytree(find_draft(None, base / "run"), out)
    config = json.loads((out / CONFIG).read_text()) | changes
    (out / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return out


def reweighted(base: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], None], **changes: Any) -> Path:
    """A copy of the drafter with other tensors."""
    changed(base, out, **changes)
    tensors = load_file(out / WEIGHTS)
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / WEIGHTS)
    return out


def remasked(base: Path, out: Path, change: Callable[[Sample], Sample], **metadata: Any) -> Path:
    """A copy of the sample table with other masks, or other metadata."""
    table = SampleTable.open(base / "samples.parquet")
    with TableWriter(out) as writer:
        for sample in table.samples():
            writer.append(change(sample))
        told = TableMetadata.from_keys(table.metadata.to_keys())
        writer.publish(dataclasses.replace(told, **metadata))
    return out


def emptied(base: Path, out: Path) -> Path:
    """A copy of the table that supervises nothing, as no writer of ours would write it."""
    file = pq.ParquetFile(base / "samples.parquet")
    table = file.read()
    at = table.schema.get_field_index("loss_spans")
    column = table.column(at).combine_chunks()
    empty = type(column).from_arrays(np.zeros(len(table) + 1, np.int32), column.values[:0], type=column.type)
    with pq.ParquetWriter(out, table.schema) as writer:
        writer.write_table(table.set_column(at, table.schema.field(at), empty))
        writer.add_key_value_metadata(file.metadata.metadata)
    return out
