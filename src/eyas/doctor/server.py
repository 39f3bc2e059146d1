"""A running server, asked over HTTP: what it is, what it speculates with, and what it accepts. SGLang and vLLM.

Both count differently; what leaves this file is the same for both. Letters: `S` drafted tokens of one chain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from eyas.errors import ConfigError

TIMEOUT_S = 300.0
_COUNTER = re.compile(
    r"^vllm:(spec_decode_num_drafts|spec_decode_num_draft_tokens|spec_decode_num_accepted_tokens|"
    r"generation_tokens)(?:_total)?(?:\{[^}]*\})?\s+(\S+)$",
    re.MULTILINE,
)


_GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0}
"""A model's own generation settings may ask for a penalty, and decoding here has none."""


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of itself; empty where it does not say."""

    kind: Literal["sglang", "vllm"]
    version: str
    model: str
    """Where the target lies, as the server names it."""
    name: str
    """What requests call it."""
    algorithm: str = ""
    """SGLang's speculative_algorithm."""
    draft: str = ""
    """Path of the drafter."""
    quantisation: str = ""
    num_draft_tokens: int | None = None
    """Of one chain."""
    topk: int | None = None
    """Branches of SGLang's tree; 1 is a chain."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt, answered greedily."""

    token_ids: tuple[int, ...]
    verifications: int | None
    """None where the server does not count them."""
    accepted: int | None
    """Drafted tokens that were kept."""
    drafted: int | None = None
    foreign_tokens: int = 0
    """Tokens that the counters saw beside this answer's: of other people's requests."""


class Server:
    """One server; a context manager. ConfigError where the address is none, or nobody answers there."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            self._client = httpx.Client(
                base_url=self.url, timeout=TIMEOUT_S, verify=self.url.startswith("https:"), trust_env=False
            )
            self.about = self._ask()
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(f"--server {url}: not an address: {error}") from None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def tokenize(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | str:
        """The ids that it makes of a conversation that asks for an answer; why not, where it makes none."""
        body = {"model": self.about.name, "messages": list(messages), "add_generation_prompt": True}
        if self.about.kind == "sglang":
            del body["add_generation_prompt"]  # left out, it is as for a chat completion
        found = self._json("POST", "/tokenize", body)
        ids = found.get("tokens") if isinstance(found, dict) else None
        if isinstance(ids, list) and all(isinstance(i, int) for i in ids):
            return ids
        return found if isinstance(found, str) else "its answer to POST /tokenize has no tokens"

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answer | str:
        """Greedy; why not, where it gives none."""
        return (
            self._sglang(prompt, max_new_tokens) if self.about.kind == "sglang" else self._vllm(prompt, max_new_tokens)
        )

    def _sglang(self, prompt: Sequence[int], max_new_tokens: int) -> Answer | str:
        body = {"input_ids": list(prompt), "sampling_params": {"max_new_tokens": max_new_tokens, **_GREEDY}}
        found = self._json("POST", "/generate", body)
        if isinstance(found, str):
            return found
        meta = found.get("meta_info") or {}
        ids = found.get("output_ids") or []
        total = int(meta.get("completion_tokens") or len(ids))
        verifications = meta.get("spec_verify_ct")
        if verifications is None:
            return Answer(tuple(ids), None, None)
        accepted = meta.get("spec_num_correct_drafts", meta.get("spec_accepted_drafts"))
        if accepted is None:
            # The first token comes from the prompt's pass; every verification gives one beside what it accepts.
            accepted = max(0, total - 1 - int(verifications))
        return Answer(tuple(ids), int(verifications), int(accepted), meta.get("spec_num_proposed_drafts"))

    def _vllm(self, prompt: Sequence[int], max_new_tokens: int) -> Answer | str:
        before = self.counters()
        body = {
            "model": self.about.name,
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "return_token_ids": True,
            **_GREEDY,
        }
        found = self._json("POST", "/v1/completions", body)
        if isinstance(found, str):
            return found
        after = self.counters()
        choice = (found.get("choices") or [{}])[0]
        ids = tuple(choice.get("token_ids") or ())
        total = len(ids) or int((found.get("usage") or {}).get("completion_tokens") or 0)
        if "spec_decode_num_drafts" not in after:
            return Answer(ids, None, None)
        grown = {name: int(after[name] - before.get(name, 0.0)) for name in after}
        return Answer(
            ids,
            grown["spec_decode_num_drafts"],
            grown.get("spec_decode_num_accepted_tokens", 0),
            grown.get("spec_decode_num_draft_tokens"),
            max(0, grown.get("generation_tokens", total) - total),
        )

    def counters(self) -> dict[str, float]:
        """vLLM's counters, over all its engines."""
        try:
            text = self._client.get("/metrics").text
        except httpx.HTTPError:
            return {}
        found: dict[str, float] = {}
        for name, value in _COUNTER.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def _ask(self) -> About:
        for path in ("/server_info", "/get_server_info"):
            info = self._json("GET", path)
            if isinstance(info, dict) and "model_path" in info:
                return _about_sglang(info)
        version, models = self._json("GET", "/version"), self._json("GET", "/v1/models")
        if isinstance(version, dict) and "version" in version:
            listed = models.get("data") if isinstance(models, dict) else None
            first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
            name = str(first.get("id") or "")
            return About("vllm", str(version["version"]), str(first.get("root") or name), name)
        why = models if isinstance(models, str) else "neither SGLang's /server_info nor vLLM's /version"
        raise ConfigError(f"--server {self.url}: no SGLang or vLLM server answers there: {why}")

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The object of an answer; a line that says why, where there is none."""
        try:
            response = self._client.request(method, path, json=body)
            if response.status_code != 200:
                return f"it answers {response.status_code} to {method} {path}: {' '.join(response.text.split())[:200]}"
            value = response.json()
        except httpx.HTTPError as error:
            return f"{method} {path}: {type(error).__name__}"
        except ValueError:
            return f"its answer to {method} {path} is no JSON"
        return value if isinstance(value, dict) else f"its answer to {method} {path} is no object"


def _about_sglang(info: Mapping[str, Any]) -> About:
    steps, topk = info.get("speculative_num_steps"), info.get("speculative_eagle_topk")
    return About(
        "sglang",
        str(info.get("version") or ""),
        str(info.get("model_path") or ""),
        str(info.get("served_model_name") or info.get("model_path") or ""),
        algorithm=str(info.get("speculative_algorithm") or ""),
        draft=str(info.get("speculative_draft_model_path") or ""),
        quantisation=str(info.get("quantization") or ""),
        num_draft_tokens=int(steps) if steps else None,
        topk=int(topk) if topk else None,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """Prompts that a server answered."""

    answers: tuple[Answer, ...]
    failures: tuple[str, ...] = field(default=())

    @property
    def counted(self) -> bool:
        return bool(self.answers) and all(a.verifications is not None for a in self.answers)

    @property
    def verifications(self) -> int:
        return sum(a.verifications or 0 for a in self.answers)

    @property
    def accepted(self) -> int:
        return sum(a.accepted or 0 for a in self.answers)

    @property
    def foreign_tokens(self) -> int:
        return sum(a.foreign_tokens for a in self.answers)

    @property
    def chain(self) -> int | None:
        """Tokens of one chain, where the server counts drafted ones."""
        drafted = [a.drafted for a in self.answers]
        if not self.verifications or any(d is None for d in drafted):
            return None
        return round(sum(d or 0 for d in drafted) / self.verifications)
