"""Samples as one HTML page: supervised tokens marked, each token's place and id under the pointer.

The page holds all that it needs and asks nobody for anything; what a sample says is text in it and nothing else.
"""

from __future__ import annotations

import contextlib
import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.data.inspect import header, visible
from eyas.data.render import Tokenizer
from eyas.data.spans import decoder_of
from eyas.data.table import SampleTable
from eyas.errors import ConfigError, DataError
from eyas.records import Sample

REPLACEMENT = "\ufffd"
HEAD_BYTES = 256
MAX_GROUP = 8
"""Tokens that may share a character before it is shown as it is."""

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1b1b; --dim: #5c5c5c; --rule: #d5d5d5;
  --mark: #cdeccd; --edge: #2e7d32; }
@media (prefers-color-scheme: dark) { :root { --paper: #161616; --ink: #ececec; --dim: #a3a3a3; --rule: #3a3a3a;
  --mark: #1f4a24; --edge: #7bc67f; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.2rem; } h2 { font: 600 .85rem/1.4 ui-monospace, monospace; overflow-wrap: anywhere; margin: 0; }
section { border-top: 1px solid var(--rule); padding: 1rem 0; }
pre { color: var(--dim); font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: var(--mark); color: var(--ink); border-bottom: 2px solid var(--edge); }
span:hover { outline: 1px solid var(--edge); } i { opacity: .5; font-style: normal; }
""".strip()


@dataclass(frozen=True, slots=True)
class Shown:
    """Consecutive tokens `[start, end)` that together have a text: nearly always one."""

    start: int
    end: int
    text: str


def shown_tokens(sample: Sample, tokenizer: Tokenizer) -> Iterator[Shown]:
    """The sample token by token; tokens that share a character stay together."""
    decode = decoder_of(tokenizer)
    ids = sample.token_ids.tolist()
    edges = {edge for span in sample.loss_spans for edge in span} | {len(ids)}
    # Decoded with the token before it: alone, a token would lose its leading space with some tokenisers.
    before = start = 0
    for end in range(1, len(ids) + 1):
        known, text = decode(ids[before:start]), decode(ids[before:end])
        complete = len(text) > len(known) and not text.endswith(REPLACEMENT)
        if complete or end in edges or end - start >= MAX_GROUP:
            yield Shown(start, end, text[len(known) :])
            before, start = start, end


def page(table: SampleTable, samples: Iterable[Sample], tokenizer: Tokenizer) -> Iterator[str]:
    """The page in pieces."""
    metadata = table.metadata
    title = html.escape(visible(f"{table.path.name}: {metadata.num_kept:,} samples", keep=""))
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"<p>{metadata.num_tokens:,} tokens, {metadata.num_supervised:,} supervised.</p>\n"
        "<p><mark>Marked</mark>: supervised, the target's own words. Plain: context. <i>↵</i> is a line feed. "
        "The pointer shows a token's place and id.</p>\n"
    )
    num_shown = 0
    for sample in samples:
        num_shown += 1
        yield f"<section>\n<h2>{html.escape(header(sample))}</h2>\n<pre>{''.join(_tokens(sample, tokenizer))}</pre>\n"
        yield "</section>\n"
    if num_shown < metadata.num_kept:
        # Said at the end: how many there are is known when they are written.
        yield f"<p>{num_shown:,} of {metadata.num_kept:,} samples are shown; --limit and --sample choose them.</p>\n"
    yield "</body>\n</html>\n"


def check_page(path: Path, *others: Path) -> None:
    """ConfigError for a page that would take the place of one of `others`, or of anything else that is no page."""
    try:
        for other in others:
            if path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other)):
                raise ConfigError(f"--html: {path} is {other}, which this command reads; name another file")
        if not path.exists():
            return
        if not path.is_file():
            raise ConfigError(f"--html: {path} is {'a directory' if path.is_dir() else 'no regular file'}; name a file")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise ConfigError(f"--html: {path}: {error.strerror or error}") from None
    if not head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(b"<!doctype html"):
        raise ConfigError(f"--html: {path} is there and is no HTML page; name another file, or remove it first")


def write_page(path: Path, table: SampleTable, samples: Iterable[Sample], tokenizer: Tokenizer) -> int:
    """Write the page, whole or not at all; how many samples are on it."""
    num_samples = 0

    def counted() -> Iterator[Sample]:
        nonlocal num_samples
        for sample in samples:
            num_samples += 1
            yield sample

    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(page(table, counted(), tokenizer))
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return num_samples


def _tokens(sample: Sample, tokenizer: Tokenizer) -> Iterator[str]:
    opens = {start for start, _ in sample.loss_spans}
    closes = {end for _, end in sample.loss_spans}
    ids = sample.token_ids.tolist()
    for one in shown_tokens(sample, tokenizer):
        if one.start in opens:
            yield "<mark>"
        text = html.escape(visible(one.text)).replace("\n", "<i>↵</i>\n")
        numbers = " ".join(map(str, ids[one.start : one.end]))
        yield f'<span title="token {one.start}, id {numbers}">{text}</span>'
        if one.end in closes:
            yield "</mark>"
