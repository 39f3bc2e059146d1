"""The target's tokeniser and chat template as files: loaded, digested, looked into; nothing here renders or masks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.config import TargetConfig
from eyas.data.render import Tokenizer, template_text
from eyas.errors import ConfigError, DataError
from eyas.records import digest_bytes

_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tokenization_*.py",
)
_TEMPLATE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)


def check_target(target: TargetConfig) -> Path:
    """The target's directory; ConfigError when none is named, DataError when it has no tokeniser."""
    if target.path is None:
        raise ConfigError("target.path is not set; name the directory of the target model")
    if not target.path.is_dir():
        raise ConfigError(f"target.path: {target.path} is not a directory")
    if not tokenizer_files(target.path):
        raise DataError(f"{target.path}: no tokenizer.json or other tokeniser file")
    return target.path


def load_tokenizer(target: TargetConfig) -> Tokenizer:
    """The target's tokeniser; ConfigError when no directory is named, DataError when it holds none that can be read."""
    directory = check_target(target)
    for file in tokenizer_files(directory):
        # The tokeniser's own parser raises a bare Exception on broken JSON.
        if file.suffix == ".json":
            try:
                json.loads(file.read_bytes())
            except (OSError, ValueError) as error:
                raise DataError(f"{file}: cannot be read: {error}") from None
    # Imported here: it takes seconds, and most commands need none of it.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(target.path), trust_remote_code=target.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{target.path}: its tokeniser cannot be loaded: {reason}") from None


def tokenizer_files(directory: Path) -> list[Path]:
    """The files that decide how text becomes tokens: `tokenizer.json`, or lacking it all others, by name."""
    whole = directory / "tokenizer.json"
    if whole.is_file():
        return [whole]
    return sorted({file for pattern in _TOKENIZER_FILES for file in directory.glob(pattern) if file.is_file()})


def tokenizer_digest(directory: Path) -> str:
    """xxh3-128 over `tokenizer.json`, or over name and bytes of all tokeniser files where there is none."""
    files = tokenizer_files(directory)
    if [file.name for file in files] == ["tokenizer.json"]:
        return digest_bytes(files[0].read_bytes())
    return digest_bytes(*(part for file in files for part in (file.name.encode() + b"\0", file.read_bytes())))


def target_text_digest(directory: Path) -> str:
    """xxh3-128 over all files of the target that decide what a row becomes; found without loading any of them."""
    others = {file for pattern in _TEMPLATE_FILES for file in directory.glob(pattern) if file.is_file()}
    parts = (part for file in sorted(others) for part in (str(file.relative_to(directory)), _digest_of(file)))
    return digest_bytes(*(part.encode() + b"\0" for part in (tokenizer_digest(directory), *parts)))


def unused_options(directory: Path, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Names that no file with a chat template of the target has; told without loading the tokeniser."""
    texts = [
        # In JSON a line feed before a name would look like a letter of it.
        file.read_text("utf-8", errors="replace").replace("\\n", " ").replace("\\t", " ")
        for pattern in _TEMPLATE_FILES
        if "config.json" not in pattern or pattern == "tokenizer_config.json"
        for file in directory.glob(pattern)
        if file.is_file()
    ]
    return tuple(name for name in options if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts))


def _digest_of(file: Path) -> str:
    return digest_bytes(file.read_bytes())


def template_digest(tokenizer: Tokenizer) -> str:
    """xxh3-128 over the chat template's text; empty when there is none."""
    text = template_text(tokenizer)
    return digest_bytes(text.encode()) if text else ""


def read_json(path: Path) -> Mapping[str, Any]:
    """The object that a file of the target holds; empty where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}
