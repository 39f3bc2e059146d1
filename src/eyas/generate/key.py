"""The key for the servers: read in one place, sent in one header, and shown nowhere."""

from __future__ import annotations

import os
import urllib.parse

import httpx

from eyas.config import GenerateConfig
from eyas.errors import ConfigError

MASK = "***"
SECRET_NAMES = ("api_key", "apikey", "authorization", "headers", "extra_headers", "token", "password", "secret")
"""Fields that have no business in a request's body, and would stand in every row."""


class Key:
    """What the servers know us by; empty where they ask for nothing. Its text never shows in a repr or a traceback."""

    def __init__(self, text: str = "") -> None:
        self._text = text

    def __repr__(self) -> str:
        return f"Key({MASK if self._text else ''})"

    def headers(self) -> dict[str, str]:
        """For each request."""
        return {"authorization": f"Bearer {self._text}"} if self._text else {}

    def scrub(self, text: str) -> str:
        """A server's words without the key: some repeat what they were sent."""
        return text.replace(self._text, MASK) if self._text else text

    def scrub_bytes(self, body: bytes) -> bytes:
        """As `scrub`, before anything is read or cut."""
        return body.replace(self._text.encode(), MASK.encode()) if self._text else body

    def is_in(self, text: str) -> bool:
        return bool(self._text) and self._text in text


def read_key(config: GenerateConfig) -> Key:
    """From the environment variable or the file that the configuration names. ConfigError never shows what it read."""
    if config.api_key_env and config.api_key_file is not None:
        raise ConfigError("generate.api_key_env and generate.api_key_file are both set; keep one of them")
    if config.api_key_env:
        where = f"the environment variable {config.api_key_env} (generate.api_key_env)"
        text = os.environ.get(config.api_key_env, "")
        if not text.strip():
            raise ConfigError(f"{where} is not set; export the key under that name")
    elif config.api_key_file is not None:
        where = f"{config.api_key_file} (generate.api_key_file)"
        try:
            text = config.api_key_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise ConfigError(f"{where}: cannot be read: {reason}") from None
        if not text.strip():
            raise ConfigError(f"{where}: empty file; it holds the key and nothing else")
    else:
        return Key()
    text = text.strip()
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"{where}: is not a key: it holds spaces, line ends or other than ASCII characters")
    return Key(text)


def check_endpoint(url: str) -> str:
    """The address without a slash at its end. Refuses what could hold a secret, without repeating it."""
    example = "like http://127.0.0.1:30000/v1"
    try:
        parts = urllib.parse.urlsplit(url.strip())
        port = parts.port
        httpx.URL(url.strip())
    except (ValueError, httpx.InvalidURL):
        raise ConfigError(f"generate.endpoints: one is not an address; write it {example}") from None
    shown = f"{parts.scheme}://{parts.hostname or ''}{f':{port}' if port else ''}"
    if "@" in parts.netloc:
        raise ConfigError(
            f"generate.endpoints: {shown}… holds a user or a password; name the key with generate.api_key_env"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or " " in url.strip():
        raise ConfigError(f"generate.endpoints: one is not an address; write it {example}")
    if parts.query or parts.fragment:
        raise ConfigError(f"generate.endpoints: {shown}{parts.path}?… goes on behind the path; write it {example}")
    if parts.path.rstrip("/").endswith("/completions"):
        raise ConfigError(f"generate.endpoints: {shown}{parts.path} is one step too far; write it {example}")
    return url.strip().rstrip("/")
