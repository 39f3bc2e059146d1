"""Files of rows: what paths and patterns name, and each row of them as JSON bytes with where it stands.

A file's form is told by its first bytes, never by its name alone:

| form | first bytes | a row is | rows count |
|---|---|---|---|
| JSONL | anything else | a line that is not blank | lines, from 1 |
| JSON array | `[` | an element | elements, from 1 |
| Parquet | `PAR1` | a row; structs become objects, without the fields that are null | rows, from 1 |

JSONL and arrays may be compressed with gzip or zstd, in several members or frames. `-` is standard input.
Memory: one row, and a chunk of a megabyte or a batch of a Parquet file.
"""

from __future__ import annotations

import glob
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

import msgspec

from eyas.data.sources import Where
from eyas.errors import ConfigError, DataError

STDIN = Path("-")
MAX_LINE_BYTES = 64 << 20
"""A longer line is no conversation, but a file that is not JSONL."""
CHUNK_BYTES = 1 << 20
PARQUET_BATCH_ROWS = 128

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_PARQUET = b"PAR1"
_BOM = b"\xef\xbb\xbf"
_MAGIC_BYTES = 6
_STRANGERS: dict[bytes, str] = {
    b"PK\x03\x04": "a zip archive; unpack it",
    b"BZh": "compressed with bzip2; use gzip or zstd",
    b"\xfd7zXZ": "compressed with xz; use gzip or zstd",
    b"ARROW1": "an Arrow file; save it as Parquet or JSONL",
    b"\xff\xff\xff\xff": "an Arrow stream; save it as Parquet or JSONL",
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
}
_PATTERN = frozenset("*?[")
# A string that ends, or one character of those that matter; a lone quote is a string whose end is yet to come.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},"]', re.DOTALL)
_BLANK = b" \t\r\n"


class RawRow(msgspec.Struct, gc=False):
    """One row as JSON bytes, exactly as the file has them; from Parquet, as compact JSON."""

    path: Path
    number: int
    """Line, element or row, from 1."""
    data: bytes
    """Valid UTF-8, not blank; whether it is JSON is up to who parses it, see `broken_json`."""
    is_last: bool = False
    """A last line without an end of line: perhaps cut off."""
    mended: bool = False
    """It had NaN or Infinity, which are not JSON, and has null instead: from Parquet."""

    @property
    def where(self) -> Where:
        """For messages: `FILE:NUMBER`."""
        return Where(self.path, self.number)


def broken_json(row: RawRow, error: Exception) -> DataError:
    """The error for a row that is not JSON: the file is damaged."""
    hint = "; the last line, perhaps cut off" if row.is_last else ""
    what = " ".join(str(error).split()).removeprefix("JSON is malformed: ")
    return DataError(f"{row.where}: broken JSON: {what}{hint}; mend or remove it")


def find_files(paths: Sequence[Path], *, field: str, leave_out: Sequence[Path] = ()) -> tuple[Path, ...]:
    """The files that paths and patterns name, each once, those of one pattern sorted; `-` stays.

    A pattern does not match what is in `leave_out`, under whatever name.

    ConfigError, one line that names `field` and the file: a pattern without a match, a file that is missing or a
    directory; DataError for one that is empty.
    """
    files: dict[Path, None] = {}
    for path in paths:
        if path == STDIN:
            if sys.stdin is None:
                raise ConfigError(f"{field}: '-' is standard input, which is closed; pipe rows in, or name a file")
            files[path] = None
            continue
        if _PATTERN.isdisjoint(str(path)) or path.exists():
            files[path] = None
            continue
        matches = sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if not match.is_dir())  # noqa: PTH207 - it knows `**`, and absolute patterns
        matches = [match for match in matches if not any(same_file(match, other) for other in leave_out)]
        if not matches:
            raise ConfigError(f"{field}: the pattern '{path}' matches no file")
        files.update(dict.fromkeys(matches))
    for path in files:
        if path != STDIN:
            _check(path, field)
    return tuple(files)


def same_file(one: Path, other: Path) -> bool:
    """Whether two names mean one file, links included; also where it does not exist yet."""
    try:
        return one.samefile(other)
    except OSError:
        return one.resolve() == other.resolve()


def _check(path: Path, field: str) -> None:
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"{field}: {path}: {error.strerror or error}") from None
    if path.is_dir():
        raise ConfigError(f"{field}: {path} is a directory; name its files, '{path}/*.jsonl' say")
    if path.is_file() and stat.st_size == 0:
        raise DataError(f"{path}: empty file; take it out of {field}")


def open_rows(paths: Sequence[Path], *, field: str, leave_out: Sequence[Path] = ()) -> Rows:
    """All rows of the files that `paths` name, in order; see `find_files` for what is refused at once."""
    return Rows(find_files(paths, field=field, leave_out=leave_out))


def lines_of(rows: Iterable[RawRow]) -> Iterator[tuple[Where, bytes]]:
    """Rows as lines of JSONL; only a last line that may be cut off has no end."""
    for row in rows:
        yield row.where, row.data if row.is_last else row.data + b"\n"


class Rows:
    """The rows of some files, to be read once.

    Iterating raises DataError, one line that names file and row: cannot be read, no row at all, invalid UTF-8, a row of
    more than 64 MiB, compressed data that is damaged or cut off, Parquet that is damaged.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.total_bytes = sum(path.stat().st_size for path in files if path.is_file())
        """Of the files as they lie on disk; standard input and pipes count as none."""
        self.consumed_bytes = 0
        """How far reading has come, on the scale of `total_bytes`."""

    def __iter__(self) -> Iterator[RawRow]:
        for path in self.files:
            empty = True
            try:
                for row in self._rows(path):
                    empty = False
                    if not row.data.isascii():
                        _require_utf8(row)
                    yield row
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
            if empty:
                raise DataError(f"{path}: empty file: no row in it")

    def _rows(self, path: Path) -> Iterator[RawRow]:
        with _Input(path, self._consume) as file:
            head = file.peek(_MAGIC_BYTES)
            if head.startswith(_PARQUET):
                if not path.is_file():
                    raise DataError(f"{path}: Parquet cannot be read from a pipe; save it to a file first")
                self.consumed_bytes -= len(head)
                yield from self._parquet(path)
                return
            chunks = _chunks(path, file.read)
            compression = _compression(head)
            if compression:
                chunks = _chunks(path, _decompressed(file, compression).read)
            first, num_blank, chunks = _first_chunk(chunks)
            form = "compressed twice" if compression and _compression(first) else _stranger(first)
            if first.startswith(_PARQUET):
                form = f"Parquet inside {compression}; unpack it"
            if form:
                raise DataError(f"{path}: {form}")
            if first.lstrip(_BLANK).startswith(b"["):
                yield from _elements(path, chunks)
            else:
                yield from _lines(path, chunks, num_blank)

    def _consume(self, num_bytes: int) -> None:
        self.consumed_bytes += num_bytes

    def _parquet(self, path: Path) -> Iterator[RawRow]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        encoder = msgspec.json.Encoder(decimal_format="number", enc_hook=str)
        number = 0
        start, size = self.consumed_bytes, path.stat().st_size
        try:
            with pq.ParquetFile(
                path, pre_buffer=False, buffer_size=CHUNK_BYTES, page_checksum_verification=True
            ) as file:
                if not file.metadata.num_rows:
                    return
                names = file.schema_arrow.names
                plain = [_plain(field.type) for field in file.schema_arrow]
                floats = [field.name for field in file.schema_arrow if _has_floats(field.type)]
                for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, use_threads=False):
                    columns = [
                        column.to_pylist() if convert is None else [convert(value) for value in column.to_pylist()]
                        for column, convert in zip(batch.columns, plain, strict=True)
                    ]
                    for values in zip(*columns, strict=True):
                        number += 1
                        row = {name: value for name, value in zip(names, values, strict=True) if value is not None}
                        mended = any(_has_no_number(row.get(name)) for name in floats)
                        yield RawRow(path, number, encoder.encode(row), mended=mended)
                    self.consumed_bytes = start + size * number // file.metadata.num_rows
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            what = " ".join(str(error).split())
            raise DataError(f"{path}:{number + 1}: damaged Parquet: {what}; copy or write it again") from None


class _Input:
    """A file or standard input: counted, and its first bytes can be looked at without a seek."""

    closed = False

    def __init__(self, path: Path, consume: Callable[[int], None]) -> None:
        self._is_stdin = path == STDIN
        # Unbuffered: a pipe hands over what it has, and each read is as large as its reader wants.
        self._file = sys.stdin.buffer if self._is_stdin else path.open("rb", buffering=0)
        self._read = cast(Callable[[int], bytes], getattr(self._file, "read1", self._file.read))
        self._counted = consume if path.is_file() else lambda num_bytes: None
        self._head = b""

    def __enter__(self) -> _Input:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_stdin:
            self._file.close()

    def peek(self, num_bytes: int) -> bytes:
        while len(self._head) < num_bytes and (more := self._read(num_bytes - len(self._head))):
            self._head += more
            self._counted(len(more))
        return self._head

    def read(self, num_bytes: int = -1) -> bytes:
        if self._head:
            head, self._head = self._head, b""
            return head
        data = self._read(num_bytes)
        self._counted(len(data))
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """For Arrow, which closes what it reads; the file is closed by `with`."""


def _compression(head: bytes) -> str:
    if head.startswith(_GZIP):
        return "gzip"
    # A skippable frame may come before the first one with data.
    return "zstd" if head.startswith(_ZSTD) or (head[:1] and head[0] & 0xF0 == 0x50 and head[1:4] == b"*M\x18") else ""


def is_compressed(path: Path) -> bool:
    """Whether a file holds more than its size tells; whether it can be read at all is told by who reads it."""
    try:
        with path.open("rb") as file:
            return bool(_compression(file.read(_MAGIC_BYTES)))
    except OSError:
        return False


def _stranger(head: bytes) -> str:
    return next((what for magic, what in _STRANGERS.items() if head.startswith(magic)), "")


def _decompressed(file: _Input, compression: str) -> BinaryIO:
    import pyarrow as pa

    return cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(file, mode="r"), compression))


def _chunks(path: Path, read: Callable[[int], bytes]) -> Iterator[bytes]:
    while True:
        try:
            chunk = read(CHUNK_BYTES)
        except OSError as error:
            if error.errno is not None:
                raise
            # Arrow's own words: its decoder met the end too early, or bytes that it never wrote.
            what = "cut off" if "Truncated" in str(error) else f"damaged ({' '.join(str(error).split())})"
            raise DataError(f"{path}: compressed data is {what}; copy the file again") from None
        if not chunk:
            return
        yield chunk


def _first_chunk(chunks: Iterator[bytes]) -> tuple[bytes, int, Iterator[bytes]]:
    """What the file begins with, without a byte order mark and blank lines; how many these were; all that is left."""
    first = b""
    num_blank = 0
    at_start = True
    for chunk in chunks:
        first += chunk
        if at_start and len(first) >= len(_BOM):
            first = first.removeprefix(_BOM)
            at_start = False
        if first.isspace():
            # Let go of as we read: there may be any amount of it.
            at_start = False
            num_blank += first.count(b"\n")
            first = first[first.rfind(b"\n") + 1 :]
            first = first if len(first) <= CHUNK_BYTES else b""
        elif len(first) >= _MAGIC_BYTES:
            break
    if at_start:
        first = first.removeprefix(_BOM)
    rest = chunks

    def all_chunks() -> Iterator[bytes]:
        yield first
        yield from rest

    return first, num_blank, all_chunks()


def _lines(path: Path, chunks: Iterator[bytes], number: int) -> Iterator[RawRow]:
    """The lines that are not blank; `number` came before them."""
    pending: list[bytes] = []
    num_pending = 0
    for chunk in chunks:
        lines = chunk.split(b"\n")
        pending.append(lines[0])
        num_pending += len(lines[0])
        if num_pending > MAX_LINE_BYTES:
            raise _too_long(path, number + 1)
        if len(lines) == 1:
            continue
        lines[0] = b"".join(pending)
        last = lines.pop()
        pending, num_pending = [last], len(last)
        for line in lines:
            number += 1
            if line and not line.isspace():
                yield RawRow(path, number, line)
    last = b"".join(pending)
    if last and not last.isspace():
        yield RawRow(path, number + 1, last, is_last=True)


def _elements(path: Path, chunks: Iterator[bytes]) -> Iterator[RawRow]:
    """The elements of one array, cut at its commas; what stands between them is for the parser to judge."""
    number = 0
    buffer = b""
    start = scanned = depth = 0  # `start`: of the element, `scanned`: up to where the buffer is known
    for chunk in chunks:
        # As much again as is pending: a long string is not scanned over and over.
        while len(chunk) < len(buffer) - start and (more := next(chunks, b"")):
            chunk += more
        buffer, scanned, start = buffer[start:] + chunk, scanned - start, 0
        for token in _TOKEN.finditer(buffer, scanned):
            symbol = token[0]
            if symbol == b'"':
                scanned = token.start()
                break
            scanned = token.end()
            if symbol in (b"{", b"["):
                depth += 1
                if depth == 1:
                    start = scanned
            elif symbol in (b"}", b"]"):
                depth -= 1
                if depth == 0:
                    element = buffer[start : token.start()].strip(_BLANK)
                    if element or number:
                        yield _element(path, number + 1, element)
                    _require_end(path, number + 1, symbol, buffer[scanned:], chunks)
                    return
            elif depth == 1 and symbol == b",":
                number += 1
                yield _element(path, number, buffer[start : token.start()].strip(_BLANK))
                start = scanned
        else:
            # Nothing but digits, letters and blanks behind the last token.
            scanned = len(buffer)
        if len(buffer) - start > MAX_LINE_BYTES:
            raise _too_long(path, number + 1)
    raise DataError(f"{path}:{number + 1}: the JSON array has no end; the file is cut off, copy it again")


def _element(path: Path, number: int, element: bytes) -> RawRow:
    if not element:
        raise DataError(f"{path}:{number}: broken JSON: a comma without an element; mend the array")
    return RawRow(path, number, element)


def _require_end(path: Path, number: int, symbol: bytes, rest: bytes, chunks: Iterator[bytes]) -> None:
    if symbol != b"]":
        raise DataError(f"{path}:{number}: broken JSON: '}}' ends the array; mend it")
    while not rest.strip(_BLANK):
        chunk = next(chunks, None)
        if chunk is None:
            return
        rest = chunk
    raise DataError(f"{path}:{number}: something follows the JSON array; one array per file, or one object per line")


def _too_long(path: Path, number: int) -> DataError:
    return DataError(
        f"{path}:{number}: longer than {MAX_LINE_BYTES >> 20} MiB; one object per line, or one array of objects"
    )


def _require_utf8(row: RawRow) -> None:
    try:
        row.data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{row.where}: invalid UTF-8 at byte {error.start} of the row; save it as UTF-8") from None


def _has_floats(kind: Any) -> bool:
    import pyarrow.types as is_

    return is_.is_floating(kind) or any(_has_floats(kind.field(i).type) for i in range(kind.num_fields))


def _has_no_number(value: Any) -> bool:
    """NaN or Infinity anywhere in it."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_no_number, value.values()))
    return isinstance(value, list) and any(map(_has_no_number, value))


def _plain(kind: Any) -> Callable[[Any], Any] | None:
    """What makes JSON values of a column's values; None where they are already.

    Arrow gives each struct every field that any row has: one that is null was missing, or might as well have been.
    """
    import pyarrow.types as is_

    if is_.is_struct(kind):
        fields = {kind.field(i).name: _plain(kind.field(i).type) for i in range(kind.num_fields)}

        def struct(value: Any) -> Any:
            if value is None:
                return None
            return {
                name: item if (convert := fields[name]) is None else convert(item)
                for name, item in value.items()
                if item is not None
            }

        return struct
    if is_.is_map(kind):
        convert_item = _plain(kind.item_type)

        def mapping(value: Any) -> Any:
            if value is None:
                return None
            return {str(key): item if convert_item is None else convert_item(item) for key, item in value}

        return mapping
    if is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind):
        convert_element = _plain(kind.value_type)
        if convert_element is None:
            return None
        element = convert_element
        return lambda value: None if value is None else [element(item) for item in value]
    return None
