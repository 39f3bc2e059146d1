"""The drafter on disk, as serving engines load it: `model.safetensors` and `config.json`. Reads other layouts too.

Letters: `H` the drafter's hidden size, `V` target vocabulary, `D` draft vocabulary, `k` hidden-state index.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from eyas.errors import ConfigError, ExportError, OutOfSpace
from eyas.files import fsync_path
from eyas.model.create import check_set
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.layout import CONFIG, EMBEDDING, HEAD, LAYER_IDS, WEIGHTS, Dtype, WrittenLayout, config_of, stored_name
from eyas.model.stored import CheckpointInfo, open_stored
from eyas.model.vocab_map import VocabMap
from eyas.target.head import TargetHead

__all__ = ["CONFIG", "EMBEDDING", "HEAD", "LAYER_IDS", "WEIGHTS", "CheckpointInfo", "load", "save", "warm_start"]

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save(
    draft: Eagle3Draft,
    vocab_map: VocabMap,
    directory: Path,
    *,
    target_config: Mapping[str, Any],
    dtype: Dtype = "bfloat16",
    embedding: torch.Tensor | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the drafter as a directory that SGLang and vLLM load; the directory appears complete or not at all.

    Without `embedding` none is written, and the engine shares the target's, unless the drafter has one of its own.
    `target_config` is the target's config.json: begin and end tokens come from it. `extra`, plain JSON, is kept under
    the key `eyas`. ExportError when a weight is not a finite number in `dtype`, when the vocabulary does not fit or
    `directory` holds something; OutOfSpace when the disk is full.
    """
    tensors = tensors_of(draft, vocab_map, directory, dtype=dtype, embedding=embedding)
    write_directory(directory, tensors, config_of(draft.shape, target_config=target_config, dtype=dtype, extra=extra))


def tensors_of(
    draft: Eagle3Draft,
    vocab_map: VocabMap,
    directory: Path,
    *,
    dtype: Dtype,
    layout: WrittenLayout = "engine",
    embedding: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """What a checkpoint's weight file holds, by its names there: weights in `dtype`, `embedding` as it is given.

    Without `embedding` there is none, unless the drafter has one of its own. The vocabulary's map is there when it
    leaves a token out. ExportError, naming `directory`, as in `save`.
    """
    shape = draft.shape
    if (vocab_map.draft_vocab_size, vocab_map.vocab_size) != (shape.draft_vocab_size, shape.vocab_size):
        raise ExportError(
            f"{directory}: a map of {vocab_map.draft_vocab_size} of {vocab_map.vocab_size} tokens does not fit a "
            f"drafter of {shape.draft_vocab_size} of {shape.vocab_size}"
        )
    tensors = {
        stored_name(name, shape, layout): parameter.detach().to("cpu", _DTYPES[dtype]).contiguous()
        for name, parameter in draft.named_parameters()
        if name != EMBEDDING or shape.own_embedding
    }
    if embedding is not None:
        tensors[EMBEDDING] = embedding.detach().cpu().contiguous()
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ExportError(f"{directory}: not written: not all values are finite in {dtype}: {', '.join(bad)}")
    if not vocab_map.is_full:
        tensors |= {"d2t": vocab_map.d2t, "t2d": vocab_map.t2d}
    return tensors


def load(
    directory: Path,
    *,
    target: Path | None = None,
    aux_layers: Sequence[int] | None = None,
    trust_remote_code: bool = False,
) -> tuple[Eagle3Draft, VocabMap, CheckpointInfo]:
    """A drafter in float32 on the CPU, its vocabulary and what else its checkpoint says.

    Understood: what `save` writes, what SGLang and vLLM load (`midlayer.` or `layers.0.`), and the speculators layout,
    in float32, bfloat16 or float16. Layer ids are read where their numbering is certain: the top-level key of vLLM and
    speculators holds `k`, SGLang's inside `eagle_config` and AngelSlim's `aux_hidden_states_layer_ids` hold `k - 1`.
    Without any, or where they disagree, `aux_layers` (`k`) must be given; it is never guessed. An embedding that the
    checkpoint lacks comes from `target`, or stays unset without one. ConfigError, naming names, for tensors that are
    missing, unknown or of another shape, for values that are not numbers, for settings that change the arithmetic.
    """
    stored = open_stored(directory, aux_layers)
    draft = Eagle3Draft(stored.shape)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name in stored.tensors:
                parameter.copy_(stored.read(name))
    if not stored.info.has_embedding:
        if target is None:
            return draft, stored.vocab_map, stored.info
        embedding = TargetHead.load(target, trust_remote_code=trust_remote_code).embedding()
        if embedding.shape != draft.embed_tokens.weight.shape:
            raise ConfigError(
                f"draft {directory}: target {target} has an embedding of {list(embedding.shape)}, wanted "
                f"{list(draft.embed_tokens.weight.shape)}"
            )
        with torch.no_grad():
            draft.embed_tokens.weight.copy_(embedding)
    check_set(draft, f"draft {directory}")
    return draft, stored.vocab_map, stored.info


@torch.no_grad()
def warm_start(
    draft: Eagle3Draft, vocab_map: VocabMap, directory: Path, *, aux_layers: Sequence[int] | None = None
) -> int:
    """Overwrite the weights of an initialised `draft` by those of a checkpoint of the same shape.

    The draft vocabulary may be another one: rows of the head are found by the target's token, and the number of tokens
    that the checkpoint did not have is returned; their rows stay as they were, as does an embedding that is the
    target's. `aux_layers` as in `load`. ConfigError, naming every difference, when the shapes differ.
    """
    check_set(draft, "initialise the drafter before a warm start")
    stored = open_stored(directory, aux_layers)
    ours, theirs = draft.shape, stored.shape
    sizes = (
        "target_hidden_size vocab_size aux_layers hidden_size num_heads num_kv_heads head_dim intermediate_size "
        "num_layers norm_aux carry_normed"
    )
    differ = [
        f"{name} is {getattr(theirs, name)} there, {getattr(ours, name)} here"
        for name in sizes.split()
        if getattr(theirs, name) != getattr(ours, name)
    ]
    if differ:
        raise ConfigError(f"draft {directory}: cannot warm start a drafter of another shape: {'; '.join(differ)}")
    for name in ("rope", "rms_norm_eps"):
        if getattr(theirs, name) != getattr(ours, name):
            logger.warning(
                "draft %s: trained with %s %s, goes on with %s",
                directory,
                name,
                getattr(theirs, name),
                getattr(ours, name),
            )
    for name, parameter in draft.named_parameters():
        if name == HEAD or (name == EMBEDDING and not ours.own_embedding):
            continue
        parameter.copy_(stored.read(name))
    old_ids = stored.vocab_map.draft_ids[vocab_map.target_ids]  # [D], -1 where the checkpoint has no such token
    known = old_ids >= 0
    head = draft.lm_head.weight
    head[known.to(head.device)] = stored.read(HEAD)[old_ids[known]].to(head.device, head.dtype)
    check_set(draft, f"draft {directory}")
    return int((~known).sum())


def config_text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write_directory(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    files: Mapping[str, str] | None = None,
    *,
    audit: Callable[[Path], None] = lambda _: None,
) -> None:
    """Weights, `config.json` and more text `files` by name, in a hidden directory beside `directory`, flushed to disk,
    which is then renamed, unless `audit` raises for it; what a killed writer left there is removed. ExportError or
    OutOfSpace as in `save`."""
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
    held = -1
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(directory)
        temporary.mkdir()
        held = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # some network file systems lock no directories: nothing is removed there
            fcntl.flock(held, fcntl.LOCK_EX)  # says that its writer lives
        save_file(dict(tensors), temporary / WEIGHTS, metadata={"format": "pt"})
        texts = {CONFIG: config_text(config), **(files or {})}
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        # safetensors writes for the user alone; a server may be somebody else.
        (temporary / WEIGHTS).chmod((temporary / CONFIG).stat().st_mode & 0o777)
        for name in (WEIGHTS, *texts, "."):
            fsync_path(temporary / name)
        audit(temporary)
        # Over nothing or over an empty directory; anything else is refused by the system call itself.
        temporary.rename(directory)
        fsync_path(directory.parent)
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise OutOfSpace(f"{directory}: no space left while writing the checkpoint", path=directory) from None
        if number in (errno.EEXIST, errno.ENOTDIR) and not directory.parent.is_dir():
            raise ExportError(f"{directory}: a part of its path is a file; choose another place") from None
        if number in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise ExportError(f"{directory}: exists already; give another directory or remove it") from None
        raise ExportError(f"{directory}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if held >= 0:
            os.close(held)


def _remove_left(directory: Path) -> None:
    """Remove the hidden directories beside `directory` whose writers are gone."""
    for left in directory.parent.glob(f".{glob.escape(directory.name)}.????????.tmp"):
        with contextlib.suppress(OSError):  # it is another's, or gone already
            fd = os.open(left, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(fd)
