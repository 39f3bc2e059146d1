"""What a chat completion is asked with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eyas.config import GenerateConfig
from eyas.errors import ConfigError
from eyas.generate.conversation import Conversation
from eyas.generate.key import SECRET_NAMES, Key
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
    if config.temperature > 0 and config.seed:
        body["seed"] = config.seed
    if config.providers or config.quantizations:
        provider: dict[str, Any] = {"allow_fallbacks": False}
        if config.providers:
            provider["order"] = list(config.providers)
        if config.quantizations:
            provider["quantizations"] = list(config.quantizations)
        body["provider"] = provider
    return body | config.extra


def seed_of(conversation: Conversation, seed: int) -> int:
    """Another one for each turn, the same whenever it is asked."""
    text = f"{seed}.{conversation.prompt.row_id}.{len(conversation.finish_reasons)}"
    return int(digest_bytes(text.encode())[:7], 16)


def check_extra(extra: Mapping[str, Any], key: Key) -> None:
    for name in extra:
        if name in NOT_OURS_TO_SAY:
            raise ConfigError(f"generate.extra.{name}: is not for the run file to say")
        if name.lower() in SECRET_NAMES:
            raise ConfigError(
                f"generate.extra.{name}: extra fields stand in every row; name the key with generate.api_key_env"
            )
    if key.is_in(json.dumps(extra, default=str)):
        raise ConfigError("generate.extra holds the key, and extra fields stand in every row; take it out")
