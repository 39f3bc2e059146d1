"""What a chat completion is asked with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from eyas.config import GenerateConfig
from eyas.errors import ConfigError
from eyas.generate.conversation import Conversation
from eyas.generate.key import Key, is_secret_name
from eyas.generate.prompts import sampling_of
from eyas.records import digest_bytes

NOT_OURS_TO_SAY = ("stream", "n", "messages", "model")
"""Fields of a request that `generate.extra` may not change."""


def settings_of(config: GenerateConfig, model: str) -> dict[str, Any]:
    """What decides what servers answer, as each row carries it."""
    sampling = sampling_of(config)
    if config.top_p < 1:
        sampling["top_p"] = config.top_p
    if config.extra:
        sampling["extra"] = config.extra
    return {"sampling": sampling, "target": {"model": model}}


def common_body(config: GenerateConfig, model: str) -> dict[str, Any]:
    """What every request says."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [],
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
    }
    if config.top_p < 1:
        body["top_p"] = config.top_p
    if config.providers or config.quantizations:
        provider: dict[str, Any] = {"allow_fallbacks": False}
        if config.providers:
            provider["order"] = list(config.providers)
        if config.quantizations:
            provider["quantizations"] = list(config.quantizations)
        body["provider"] = provider
    return body | config.extra


def has_seed(config: GenerateConfig) -> bool:
    """Whether each request gets a seed of ours; one in `generate.extra` stays as it is."""
    return config.temperature > 0 and config.seed != 0 and "seed" not in config.extra


def seed_of(conversation: Conversation, seed: int) -> int:
    """Another one for each turn, the same whenever it is asked."""
    text = f"{seed}.{conversation.prompt.row_id}.{len(conversation.finish_reasons)}"
    return int(digest_bytes(text.encode())[:7], 16)


def check_numbers(config: GenerateConfig) -> None:
    """TOML knows `inf` and `nan`, JSON does not, and no price is either."""
    finite = {"temperature": config.temperature, "top_p": config.top_p}
    finite |= {f"price_per_1m.{name}": price for name, price in config.price_per_1m.items()}
    for name, value in finite.items():
        if not math.isfinite(value):
            raise ConfigError(f"generate.{name}: is {value}; give a finite number")
    for name in ("timeout_s", "timeout_s_per_1k_tokens", "reconnect_s", "max_cost"):
        value = getattr(config, name)
        if value is not None and math.isnan(value):
            raise ConfigError(f"generate.{name}: is {value}; give a number")


def check_extra(extra: Mapping[str, Any], key: Key) -> None:
    """Refuse what JSON cannot say, what is not for the run file to say, and what looks like a secret, at any depth."""
    for name in extra:
        if name in NOT_OURS_TO_SAY:
            raise ConfigError(f"generate.extra.{name}: is not for the run file to say")
        if name == "max_tokens":
            raise ConfigError(
                "generate.extra.max_tokens: set generate.max_new_tokens, by which cost and time are reckoned"
            )
    _check_field(extra, "generate.extra", of_schema=False)
    if key.is_in(json.dumps(extra, ensure_ascii=False)):
        raise ConfigError("generate.extra holds the key, and extra fields stand in every row; take it out")


def _check_field(value: Any, where: str, *, of_schema: bool) -> None:
    """`of_schema`: names are those of a JSON schema's properties, which may be called anything."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if is_secret_name(name) and not (of_schema and isinstance(inner, Mapping)):
                raise ConfigError(
                    f"{where}.{name}: extra fields stand in every row; name the key with generate.api_key_env"
                )
            _check_field(inner, f"{where}.{name}", of_schema=name == "properties")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _check_field(inner, f"{where}[{i}]", of_schema=False)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: is {value}, which JSON does not know; give a finite number")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ConfigError(f"{where}: is a {type(value).__name__}, which JSON does not know; write it as a text")
