"""The key for the servers: read in one place, sent in one header, and shown nowhere."""

from __future__ import annotations

import html
import os
import re
import urllib.parse
from pathlib import Path

import httpx

from eyas.config import GenerateConfig
from eyas.errors import ConfigError

MASK = "***"
MIN_DISTINCT = 8
"""A shorter key, like `EMPTY` or `1`, is no secret and occurs by chance: what servers name is left as it is."""
_SECRET_NAME = re.compile(
    r"headers|extraheaders|auth|bearer|(access|auth|bearer|secret)?token|credentials?"
    r"|.*(apikey|authorization|password|passwd|secret|secretkey|privatekey)"
)
_PLAIN_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
_KEY_PREFIX = re.compile(r"(sk|pk|rk|hf|gsk|xai|nvapi|api|key|AIza|eyJ)[-_A-Z0-9]", re.IGNORECASE)


class Key:
    """What the servers know us by; empty where they ask for nothing. Its text never shows in a repr or a traceback."""

    def __init__(self, text: str = "") -> None:
        self._text = text
        spelled = "".join(map(_spellings, text))
        self._spelled = re.compile(spelled) if text else None

    def __repr__(self) -> str:
        return f"Key({MASK if self._text else ''})"

    def headers(self) -> dict[str, str]:
        """For each request."""
        return {"authorization": f"Bearer {self._text}"} if self._text else {}

    def scrub(self, text: str) -> str:
        """A server's words without the key, for people to read: some repeat what they were sent."""
        return self._spelled.sub(MASK, text) if self._spelled is not None else text

    def mask(self, text: str) -> str:
        """A name that a server gives, for a row: without the key, unless that is too short to be one."""
        return self.scrub(text) if self.is_in(text) else text

    def is_in(self, text: str) -> bool:
        """Whether it holds the key, and not by chance."""
        return self._spelled is not None and len(self._text) >= MIN_DISTINCT and bool(self._spelled.search(text))


def _spellings(letter: str) -> str:
    """A pattern for a letter as it stands, as JSON in JSON may spell it, and as addresses and HTML pages may."""
    code = ord(letter)
    names = [html.escape(letter)[1:-1], f"#0*{code}", f"#x0*{code:x}", *(["apos"] if letter == "'" else [])]
    entity = "|".join(name for name in names if name)
    return (
        rf"(?:\\{{1,8}}(?i:u{code:04x}|x{code:02x})|%(?:25){{0,4}}(?i:{code:02x})"
        rf"|&(?:amp;){{0,4}}(?i:{entity});|\\{{0,8}}{re.escape(letter)})"
    )


def is_secret_name(name: str) -> bool:
    """Whether a field of this name holds a secret, which has no business in a request's body and so in every row."""
    return bool(_SECRET_NAME.fullmatch(re.sub(r"[-_\s.]", "", name).lower()))


def read_key(config: GenerateConfig) -> Key:
    """From the environment variable or the file that the configuration names. ConfigError never shows what it read."""
    if config.api_key_env and config.api_key_file is not None:
        raise ConfigError("generate.api_key_env and generate.api_key_file are both set; keep one of them")
    if config.api_key_env:
        name = config.api_key_env
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            raise ConfigError(
                "generate.api_key_env: is not the name of an environment variable; it names the variable that holds "
                "the key, like MY_KEY, and is not the key itself"
            )
        text = os.environ.get(name, "")
        shown = f" {name}" if text.strip() or _PLAIN_NAME.fullmatch(name) else ""
        where = f"the environment variable{shown} (generate.api_key_env)"
        if not text.strip():
            raise ConfigError(f"{where} is not set; export the key under that name")
    elif config.api_key_file is not None:
        if _is_key_in_place_of_path(config.api_key_file):
            raise ConfigError(
                "generate.api_key_file: there is no such file, and it reads like a key; it names the file that holds "
                "the key, and is not the key itself"
            )
        where = f"{config.api_key_file} (generate.api_key_file)"
        try:
            text = config.api_key_file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
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


def _is_key_in_place_of_path(path: Path) -> bool:
    """Whether nothing lies there, and a part of it that does not exist looks like a key."""
    while not os.path.lexists(path):
        name = path.name
        if _KEY_PREFIX.match(name) or re.fullmatch(r"(?=.*[0-9])(?=.*[A-Za-z])[-\w+=]{16,}|.{65,}", name, re.DOTALL):
            return True
        if path == path.parent:
            break
        path = path.parent
    return False


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
