"""Staged files: whole, this request's, or refused; the stager fills them and never waits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from eyas.engine import room, staged, stager
from eyas.engine.pinned import HostPool
from eyas.engine.room import StagingLimits
from eyas.engine.staged import RequestName, Run, StagedError
from eyas.engine.stager import Stager

RUN = "0123456789abcdef"
NAME = RequestName(RUN, 7, 5)
H = 4
PLENTY = StagingLimits(staged_bytes=1 << 30, min_free_bytes=0, pool_bytes=1 << 30)


def whole(name: RequestName = NAME, rank: int = 0, *, fields: Sequence[str] = ("hidden.2", "last")) -> bytes:
    """A staged file's bytes: row `t` of each field is about token `t`."""
    layout = dict.fromkeys(fields, ("float32", H))
    ids = np.arange(name.num_tokens, dtype="<i4")
    states = [np.full((name.num_tokens, H), i, dtype="<f4") for i in range(len(fields))]
    parts = [array.data.cast("B") for array in (ids, *states)]
    return staged.header(name, layout, "post", staged.digest_of(parts), rank) + b"".join(parts)


def read(data: bytes, name: RequestName = NAME, rank: int = 0) -> staged.Staged:
    return staged.parse(memoryview(data), Path("x.states"), name, rank)


def forged(change: Any) -> bytes:
    """A file with a changed header whose digests are right: only its sense can give it away."""
    data = whole()
    size = int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8 : 8 + size])
    tensors["__metadata__"]["header_digest"] = "0" * 32
    tensors = change(tensors) or tensors
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text = text.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(text).encode(), 1)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


# --- names ---


@given(st.from_regex(r"[0-9a-f]{16}", fullmatch=True), st.integers(0, 10**18 - 1), st.integers(1, 10**9),
       st.text("hrn", max_size=3))  # fmt: skip
def test_a_name_survives_the_server(run: str, serial: int, num_tokens: int, flags: str) -> None:
    name = RequestName(run, serial, num_tokens, flags)
    assert RequestName.parse(str(name)) == name


def test_a_name_is_this_text() -> None:
    assert str(RequestName(RUN, 7, 5, "rn")) == "eyas.0123456789abcdef.7.rn.5"
    assert NAME.path(Path("/s")) == Path("/s/0123456789abcdef/7.states")
    assert NAME.path(Path("/s"), 3) == Path("/s/0123456789abcdef/7.rank3")


@pytest.mark.parametrize(
    "text",
    ["", "HEALTH_CHECK_1", str(uuid.UUID(int=5)), uuid.UUID(int=5).hex, "eyas", f"eyas.{RUN}.7..5\n",
     f" eyas.{RUN}.7..5", f"eyas.{RUN}.7.5",
     f"eyas.{RUN}.-7..5", f"eyas.{RUN}.7..", f"eyas.{RUN}.7.R.5", f"eyas.{RUN[1:]}.7..5",
     f"eyas.{RUN}0.7..5", f"eyas.{RUN.upper()}.7..5", f"eyas.{RUN}.7../../5", f"eyas.{RUN}.{'9' * 19}..5",
     f"eyas.{RUN}.7..0", f"eyas.{RUN}.07..5", f"eyas.{RUN}.7..05", f"eyas.{RUN}.٧..5", f"eyas.{RUN}.7..5.1"],
)  # fmt: skip
def test_foreign_names_and_near_misses_are_not_ours(text: str) -> None:
    assert RequestName.parse(text) is None


# --- files ---


@pytest.mark.parametrize("dtype", sorted(staged.CODES))
def test_round_trip_and_safetensors_own_loader_agrees(tmp_path: Path, dtype: str) -> None:
    states = torch.randn(5, H).to(getattr(torch, dtype))
    data = states.view(torch.uint8).numpy().tobytes()
    ids = np.array([5, 4, 3, 2, 1], dtype="<i4")
    parts = [ids.data.cast("B"), memoryview(data)]
    path = tmp_path / "7.states"
    head = staged.header(NAME, {"last": (dtype, H)}, "post", staged.digest_of(parts))
    assert len(head) % 8 == 0
    staged.write(path, [head, *parts])
    found = staged.read(path, NAME)
    assert found.token_ids.tolist() == [5, 4, 3, 2, 1]
    assert found.last_hidden_norm == "post"
    assert found.fields["last"][:2] == (dtype, (5, H))
    assert bytes(found.fields["last"][2]) == data
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("last"), states)
        assert file.get_tensor("token_ids").tolist() == [5, 4, 3, 2, 1]
        assert file.metadata()["request"] == str(NAME)


def test_the_header_is_these_bytes() -> None:
    """Pinned: server and client may be two installations."""
    head = staged.header(NAME, {"last": ("bfloat16", 4)}, "post", "d" * 32, 1)
    text = (
        '{"__metadata__":{"eyas.staged":"2","request":"eyas.0123456789abcdef.7..5","run":"0123456789abcdef","rank":"1",'
        '"fields":"last","last_hidden_norm":"post","digest":"dddddddddddddddddddddddddddddddd",'
        '"header_digest":"%s"},"token_ids":{"dtype":"I32","shape":[5],"data_offsets":[0,20]},'
        '"last":{"dtype":"BF16","shape":[5,4],"data_offsets":[20,60]}}'
    )
    blank = (text % ("0" * 32)).encode()
    blank += b" " * (-len(blank) % 8)
    assert head == len(blank).to_bytes(8, "little") + blank.replace(
        b"0" * 32, xxhash.xxh3_128_hexdigest(blank).encode(), 1
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a staged file"),
        (b"\0" * 7, "not a staged file"),
        (whole()[:-1], "behind the header"),
        (whole() + b"\0", "behind the header"),
        ((1 << 40).to_bytes(8, "little") + whole()[8:], "not a staged file"),
        (whole(replace(NAME, serial=8)), f"holds request eyas.{RUN}.8..5 of rank 0, not eyas.{RUN}.7"),
        (whole(replace(NAME, run="f" * 16)), "holds request"),
        (whole(replace(NAME, flags="n")), "holds request"),
        (whole(NAME, rank=1), "of rank 1, not"),
        (forged(lambda t: t["__metadata__"].update({"eyas.staged": "1"})), "version 1, this is 2"),
        (forged(lambda t: t["last"].update(data_offsets=[-80, 0])), "last is"),
        (forged(lambda t: t["last"].update(data_offsets=[20, 100])), "last is"),
        (forged(lambda t: t["last"].update(data_offsets=[100, 180, 0])), "last is"),
        (forged(lambda t: t["last"].update(data_offsets=["100", "x"])), "last is"),
        (forged(lambda t: t["last"].update(shape=[5, -4])), "last is"),
        (forged(lambda t: t["last"].update(shape=[5, 0], data_offsets=[100, -1])), "last is"),
        (forged(lambda t: t["last"].update(shape=[5, 1 << 70])), "last is"),
        (forged(lambda t: t["last"].update(shape=[4, 5])), "last is"),
        (forged(lambda t: t["last"].update(shape="ab")), "last is"),
        (forged(lambda t: t["last"].update(dtype=["F32"])), "last is"),
        (forged(lambda t: t["last"].update(dtype="F64")), "last is"),
        (forged(lambda t: t.update(last=3)), "last is"),
        (forged(lambda t: t.pop("last") and None), "does not fit its fields"),
        (forged(lambda t: t.update(more=t["last"])), "does not fit its fields"),
        (forged(lambda t: t["token_ids"].update(shape=[6])), "does not fit its fields"),
        (forged(lambda t: t["__metadata__"].update(fields="last")), "does not fit its fields"),
        (forged(lambda t: t["__metadata__"].update(fields="last,hidden.2")), "cannot be"),
        (forged(lambda t: t["__metadata__"].update(fields=5)), "cannot be read"),
        (forged(lambda t: t["__metadata__"].pop("digest") and None), "cannot be read"),
        (forged(lambda t: [t]), "cannot be read"),
        (forged(lambda t: t.update(__metadata__=None)), "cannot be read"),
        (len(b"[" * 90000).to_bytes(8, "little") + b"[" * 90000, "cannot be read"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_not_exactly_this_file_is_refused_by_name(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "7.states"
    path.write_bytes(data)
    with pytest.raises(StagedError) as raised:
        staged.read(path, NAME)
    assert str(path) in str(raised.value)
    assert says in str(raised.value)


def test_every_flipped_bit_of_the_header_and_some_of_the_body_are_found() -> None:
    data = whole()
    size = 8 + int.from_bytes(data[:8], "little")
    for at in [*range(size), *range(size, len(data), 7)]:
        for bit in (0, 3, 7) if at > 8 else range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(StagedError):
                read(bytes(flipped))


MUTATION = st.tuples(st.sampled_from(["set", "cut", "insert", "copy"]), st.floats(0, 1), st.integers(0, 255))


@settings(max_examples=150, deadline=None)
@given(st.lists(MUTATION, min_size=1, max_size=4))
def test_mutations_raise_nothing_but_staged_error(mutations: list[tuple[str, float, int]]) -> None:
    data = original = whole()
    for kind, where, value in mutations:
        at = int(where * (len(data) - 1)) if data else 0
        if kind == "set" and data:
            data = data[:at] + bytes([value]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + value :]
        elif kind == "insert":
            data = data[:at] + bytes([value]) + data[at:]
        else:
            data = data[:at] + data[at : at + value] + data[at:]
    if data == original:
        read(data)
    else:
        with pytest.raises(StagedError):
            read(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PLACE = st.sampled_from(["last", "token_ids", "__metadata__", "hidden.2"])


@settings(max_examples=150, deadline=None)
@given(PLACE, st.sampled_from(["dtype", "shape", "data_offsets", "fields", "digest", "request", "rank", ""]), JSON)
def test_headers_without_sense_raise_nothing_but_staged_error(place: str, key: str, value: Any) -> None:
    def change(tensors: dict[str, Any]) -> None:
        if key:
            tensors[place][key] = value
        else:
            tensors[place] = value

    data = forged(change)
    with contextlib.suppress(StagedError):  # unless it is a key that says nothing in that place
        found = read(data)
        assert found.token_ids.tolist() == [0, 1, 2, 3, 4]
        assert np.frombuffer(found.fields["last"][2], "<f4").tolist() == [1.0] * 20


def test_nobody_sees_a_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "7.states"
    seen = []
    writev = os.writev

    def slowly(fd: int, views: Sequence[memoryview]) -> int:
        seen.append(path.exists())
        return writev(fd, [views[0][:3]])

    monkeypatch.setattr(os, "writev", slowly)
    staged.write(path, [b"abcdefg", b"", memoryview(b"hij"), b"k"])
    assert path.read_bytes() == b"abcdefghijk"
    assert len(seen) > 3 and not any(seen)
    assert [p.name for p in tmp_path.iterdir()] == ["7.states"]


def test_many_parts_are_written(tmp_path: Path) -> None:
    parts = [bytes([i % 251]) for i in range(3000)]
    staged.write(tmp_path / "x", parts)
    assert (tmp_path / "x").read_bytes() == b"".join(parts)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()]
)
def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any) -> int:
        raise error

    monkeypatch.setattr(os, "writev", fail)
    with pytest.raises(type(error)):
        staged.write(tmp_path / "7.states", [b"abc"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("apart_bytes", [0, 1 << 24])
def test_a_file_digested_while_it_is_written_is_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart_bytes: int
) -> None:
    parts = [memoryview(bytes(20)), memoryview(random.Random(0).randbytes(5 * H * 4))]
    writev = os.writev
    # A kernel may take a part of what it is given.
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0][:1000]]))
    monkeypatch.setattr(staged, "DIGEST_APART_BYTES", apart_bytes)
    path = tmp_path / "7.states"
    staged.write_states(path, lambda digest: staged.header(NAME, {"last": ("float32", H)}, "post", digest), parts)
    head = staged.header(NAME, {"last": ("float32", H)}, "post", staged.digest_of(parts))
    assert path.read_bytes() == b"".join([head, *parts])
    assert list(tmp_path.iterdir()) == [path]


def test_a_large_file_whose_digest_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "DIGEST_APART_BYTES", 0)

    def no_digest(parts: Sequence[memoryview]) -> str:
        raise MemoryError

    monkeypatch.setattr(staged, "digest_of", no_digest)
    with pytest.raises(MemoryError):
        staged.write_states(tmp_path / "7.states", lambda digest: digest.encode(), [memoryview(b"states")])
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_told_even_when_there_is_no_room_for_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged.write_failure(tmp_path / "7.states", "why")
    assert (tmp_path / "7.states.failed").read_text() == "why"

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    staged.write_failure(tmp_path / "8.states", "why")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["7.states.failed", "8.states.failed"]
    assert (tmp_path / "8.states.failed").read_text() == ""


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    path = tmp_path / "tiny"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "eyas", path], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_file_system_fails_that_request_and_says_so(tiny: Path) -> None:
    (tiny / RUN).mkdir()
    (tiny / "other").write_bytes(bytes(40 * 1024))
    subject = Stager(tiny, PLENTY)
    name = RequestName(RUN, 1, 1000)
    # What the room check believes is stale by the time the file is written.
    subject._room._free = None
    original = room.free_bytes
    room.free_bytes = lambda _: 1 << 40
    try:
        answer = stage(subject, [(name, 1000)])[0]
    finally:
        room.free_bytes = original
    subject.close()
    assert answer["path"] == str(name.path(tiny))
    assert [p.name for p in (tiny / RUN).iterdir()] == ["1.states.failed"]
    assert (tiny / RUN / "1.states.failed").read_text() in ("OSError: [Errno 28] No space left on device", "")
    assert subject.counts == {"failed": 1}
    assert subject._room.staged_bytes() == 0


# --- runs ---

HOLD = """
import sys, time
from pathlib import Path
from eyas.engine.staged import Run
run = Run(Path(sys.argv[1]))
(run.path / "1.states").write_bytes(b"x" * 100)
print(run.path.name, run.num_sharing(), flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def other_process(staging: Path) -> Iterator[tuple[subprocess.Popen[str], Path, int]]:
    with subprocess.Popen([sys.executable, "-c", HOLD, staging], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        token, num = process.stdout.readline().split()
        try:
            yield process, staging / token, int(num)
        finally:
            process.kill()


def test_a_live_run_stays_a_killed_one_goes(tmp_path: Path) -> None:
    mine = Run(tmp_path)
    with other_process(tmp_path) as (process, path, num):
        assert num == mine.num_sharing() == 2
        assert staged.remove_dead_runs(tmp_path) == (0, 0)
        process.kill()
        process.wait()
        assert mine.num_sharing() == 1
        assert staged.remove_dead_runs(tmp_path) == (1, 100)
        assert not path.exists()
    assert mine.path.exists()
    mine.close()
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / staged.OWNER).touch()
    (outside / "precious").touch()
    staging = tmp_path / "staging"
    staging.mkdir()
    (staging / "a.txt").touch()
    (staging / "0123456789abcdee").mkdir()  # no owner: not a run
    (staging / "0123456789abcdee" / "x").touch()
    (staging / "0123456789abcded").write_text("a file")
    (staging / "photos").mkdir()
    (staging / "photos" / staged.OWNER).touch()
    (staging / ".hidden.gone").mkdir()
    (staging / RUN).symlink_to(outside)
    (staging / "0123456789abcdea").mkdir()
    (staging / "0123456789abcdea" / staged.OWNER).symlink_to(outside / "precious")
    (staging / "0123456789abcdeb").mkdir()
    os.mkfifo(staging / "0123456789abcdeb" / staged.OWNER)
    before = sorted(staging.rglob("*"))
    assert staged.runs(staging) == []
    assert staged.remove_dead_runs(staging) == (0, 0)
    assert sorted(staging.rglob("*")) == before
    assert sorted(p.name for p in outside.iterdir()) == ["owner", "precious"]


def test_symlinks_in_a_dead_run_are_removed_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    staging = tmp_path / "staging"
    (staging / RUN).mkdir(parents=True)
    (staging / RUN / staged.OWNER).touch()
    (staging / RUN / "link").symlink_to(outside)
    assert staged.remove_dead_runs(staging)[0] == 1
    assert (outside / "precious").read_text() == "x"
    assert list(staging.iterdir()) == []


def test_what_a_killed_process_left_half_made_or_half_removed_goes(tmp_path: Path) -> None:
    for name in (f".{RUN}.gone", f".{RUN}.new", f".{'1' * 16}.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.states").touch()
    os.utime(tmp_path / f".{RUN}.new", (1, 1))
    staged.remove_dead_runs(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [f".{'1' * 16}.new"]  # somebody may be making it just now


def test_a_file_that_appears_while_a_run_is_removed_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    rmdir = os.rmdir

    def after_a_writer(path: Any, **kwargs: Any) -> None:
        with contextlib.suppress(FileNotFoundError):  # the server knows the run's own name alone
            staged.write(run.path / "1.states", [b"x"])
        rmdir(path, **kwargs)

    monkeypatch.setattr(os, "rmdir", after_a_writer)
    run.close()
    assert list(tmp_path.iterdir()) == []


def test_two_clients_remove_the_same_dead_runs(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i:016x}").mkdir()
        (tmp_path / f"{i:016x}" / staged.OWNER).touch()
        (tmp_path / f"{i:016x}" / "1.states").write_bytes(b"x" * 10)
    removed: list[tuple[int, int]] = []
    threads = [threading.Thread(target=lambda: removed.append(staged.remove_dead_runs(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(tmp_path.iterdir()) == []
    assert sum(count for count, _ in removed) <= 20


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_another_users_run_counts_and_hides_no_others() -> None:
    with tempfile.TemporaryDirectory() as directory:
        staging = Path(directory)
        staging.chmod(0o1777)
        theirs = Run(staging)
        (staging / RUN).mkdir(mode=0o755)
        (staging / RUN / staged.OWNER).touch()
        os.chown(staging / RUN, 65534, 65534)
        os.seteuid(65534)
        try:
            mine = Run(staging)
            assert mine.num_sharing() == 2
            assert staged.remove_dead_runs(staging)[0] == 1
            subject = Stager(staging, PLENTY)
            answer = stage(subject, [(RequestName(theirs.path.name, 1, 2), 2)])[0]
            assert answer["reason"] == "no_directory"
            assert "uid 65534, cannot write into" in answer["error"]
            mine.close()
        finally:
            os.seteuid(0)
        assert theirs.path.exists()
        theirs.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to write for somebody else")
@pytest.mark.parametrize("error", [None, PermissionError(), OSError(errno.EINVAL, "not mapped")])
def test_a_client_that_is_another_user_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    os.chown(tmp_path, 65534, 65534)
    if error is not None:

        def fail(*_: Any) -> None:
            raise error

        monkeypatch.setattr(os, "fchown", fail)
    staged.write(tmp_path / "x", [b"x"])
    about = (tmp_path / "x").stat()
    assert (about.st_uid, about.st_mode & 0o777) == ((65534, 0o600) if error is None else (0, 0o644))


def test_a_run_that_could_not_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="no locks"):
        Run(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- the stager ---


def states_of(name: RequestName, k: int) -> torch.Tensor:
    """`[T, H]`: what a request's hidden state `k` is."""
    rows = torch.arange(name.num_tokens, dtype=torch.float32)[:, None] + torch.arange(H) / 8
    return (rows + 1000 * name.serial + 100_000 * k).to(torch.float32)


def ids_of(name: RequestName) -> torch.Tensor:
    return torch.arange(name.num_tokens) + 10 * name.serial


def stage(
    subject: Stager,
    parts: Sequence[tuple[RequestName | None, int]],
    prefix_rows: Sequence[int] | None = None,
    *,
    fields: Sequence[int] = (2, 9),
    neighbours: Sequence[int] = (),
    then: Any = None,
) -> list[Any]:
    """One forward: so many rows of each request, those after `prefix_rows`; None is another client's."""
    prefixes = list(prefix_rows or [0] * len(parts))
    foreign = RequestName("f" * 16, 5, 10_000)
    ranges = [(name or foreign, start, start + n) for (name, n), start in zip(parts, prefixes, strict=True)]
    ids = torch.cat([ids_of(name)[a:b] for name, a, b in ranges])
    tensors = {f"h{k}": torch.cat([states_of(name, k)[a:b] for name, a, b in ranges]) for k in fields}
    names = [name for name, _ in parts]
    answers = subject.stage(names, [n for _, n in parts], prefixes, ids, tensors, [f"h{k}" for k in neighbours])
    ids.fill_(-1)  # the server's own buffer is filled again by the next forward
    return answers


def check_file(staging: Path, name: RequestName, fields: Sequence[int] = (2, 9), rank: int = 0) -> None:
    found = staged.read(name.path(staging, rank), name, rank)
    assert found.token_ids.tolist() == ids_of(name).tolist()
    assert list(found.fields) == [f"h{k}" for k in fields]
    for k in fields:
        dtype, shape, data = found.fields[f"h{k}"]
        assert (dtype, shape) == ("float32", (name.num_tokens, H))
        assert np.array_equal(np.frombuffer(data, "<f4").reshape(shape), states_of(name, k).numpy())


def request(serial: int, num_tokens: int, flags: str = "") -> RequestName:
    return RequestName(RUN, serial, num_tokens, flags)


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / RUN).mkdir()
    return tmp_path


def file_bytes(num_tokens: int, num_fields: int = 2) -> int:
    return num_tokens * (4 + num_fields * 4 * H)


def test_rows_of_a_batch_go_to_their_requests_and_others_are_left_out(staging: Path) -> None:
    subject = Stager(staging, PLENTY)
    names = [request(1, 3), request(2, 1), request(3, 7)]
    answers = stage(subject, [(None, 4), (names[0], 3), (None, 2), (names[1], 1), (names[2], 7), (None, 1)])
    subject.close()
    assert answers[0] is answers[2] is answers[5] is None
    assert answers[1] == {"path": str(names[0].path(staging)), "bytes": file_bytes(3), "alone": False}
    for name in names:
        check_file(staging, name)
    assert len(list((staging / RUN).iterdir())) == 3
    assert subject.counts == {"staged": 3}
    assert subject._room.staged_bytes() == file_bytes(11)


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int, int]]]]:
    """Lengths, and forwards of `(request, start, end)`: chunks in order, mixed in any way; -1 is somebody else."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    chance = random.Random(draw(st.integers(0, 1 << 32)))
    left = dict.fromkeys(range(len(lengths)), 0)
    forwards = []
    while left:
        forward = [(-1, 0, chance.randint(1, 3)) for _ in range(chance.randint(0, 2))]
        for i in chance.sample(sorted(left), chance.randint(1, len(left))):
            end = chance.randint(left[i] + 1, lengths[i])
            forward.append((i, left[i], end))
            left[i] = end
            if end == lengths[i]:
                del left[i]
        chance.shuffle(forward)
        forwards.append(forward)
    return lengths, forwards


@settings(max_examples=15, deadline=None)
@given(splits())
def test_any_split_into_forwards_gives_the_same_files(
    split: tuple[list[int], list[list[tuple[int, int, int]]]],
) -> None:
    lengths, forwards = split
    names = [request(i + 1, n) for i, n in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as directory:
        chunked, one_shot = Path(directory, "chunked"), Path(directory, "one")
        for path in (chunked, one_shot):
            (path / RUN).mkdir(parents=True)
        subject = Stager(chunked, PLENTY, num_threads=2)
        for forward in forwards:
            parts = [(names[i] if i >= 0 else None, b - a) for i, a, b in forward]
            answers = stage(subject, parts, [a for _, a, _ in forward])
            for (name, _), (_, _, b), answer in zip(parts, forward, answers, strict=True):
                if name is not None:
                    assert ("path" in answer) == (b == name.num_tokens), answer
                    assert answer.get("pending", b) == b
        subject.close()
        other = Stager(one_shot, PLENTY)
        stage(other, [(name, name.num_tokens) for name in names])
        other.close()
        for name in names:
            assert name.path(chunked).read_bytes() == name.path(one_shot).read_bytes()
            check_file(chunked, name)
        assert not subject._partials
        assert subject._room._coming_bytes() == 0


def test_rows_from_a_prefix_cache_are_refused(staging: Path) -> None:
    subject = Stager(staging, PLENTY)
    answer = stage(subject, [(request(1, 5), 2)], [3])[0]
    assert answer["reason"] == "rows" and answer["retry"] is False
    assert answer["error"] == (
        "3 of 5 rows come from a prefix cache or were lost, 0 are here: run the server with its radix cache off"
    )
    assert stage(subject, [(request(2, 5), 2)])[0] == {"pending": 2}
    assert stage(subject, [(request(2, 5), 1)], [4])[0]["reason"] == "rows"
    subject.close()
    assert not list((staging / RUN).iterdir())
    assert not subject._partials and subject._room.staged_bytes() == 0
    assert subject.counts == {"failed": 2}


def test_more_rows_than_tokens_are_refused(staging: Path) -> None:
    subject = Stager(staging, PLENTY)
    name = request(1, 5)
    answers = subject.stage([name], [6], [0], torch.arange(6), {"last": torch.zeros(6, H)})
    assert answers == [{"error": "6 rows for 5 tokens", "reason": "rows", "retry": False}]
    subject.close()
    assert not subject._partials


def test_fewer_rows_than_the_batch_says_is_an_error(staging: Path) -> None:
    subject = Stager(staging, PLENTY)
    with pytest.raises(ValueError, match="last: fewer rows than the 5 of the batch"):
        subject.stage([request(1, 5)], [5], [0], torch.arange(5), {"last": torch.zeros(4, H)})
    with pytest.raises(ValueError, match="token_ids: fewer rows"):
        subject.stage([request(1, 5)], [5], [0], torch.arange(4), {"last": torch.zeros(5, H)})
    subject.close()
    assert subject._room.staged_bytes() == 0


def test_a_prompt_that_the_server_begins_anew_is_taken_anew(staging: Path) -> None:
    subject = Stager(staging, PLENTY)
    name = request(1, 5)
    assert stage(subject, [(name, 3)])[0] == {"pending": 3}
    assert stage(subject, [(name, 2)])[0] == {"pending": 2}
    assert "path" in stage(subject, [(name, 3)], [2])[0]
    subject.close()
    check_file(staging, name)
    assert subject._room.staged_bytes() == file_bytes(5)


def test_a_request_without_a_run_says_no_directory(tmp_path: Path) -> None:
    subject = Stager(tmp_path, PLENTY)
    for staging in (tmp_path, tmp_path / "missing"):
        subject = Stager(staging, PLENTY)
        answer = stage(subject, [(request(1, 2), 2)])[0]
        subject.close()
        assert (answer["reason"], answer["retry"]) == ("no_directory", False)
        assert f"the server sees no directory {staging / RUN}" in answer["error"]
        assert subject._room.staged_bytes() == 0
        assert subject.room()["staged"] == 0
    assert list(tmp_path.iterdir()) == []


def test_over_the_quota_one_request_fails_and_works_when_the_client_has_taken(staging: Path) -> None:
    subject = Stager(staging, replace(PLENTY, staged_bytes=file_bytes(10)))
    answers = stage(subject, [(request(1, 6), 6), (request(2, 5), 5), (request(3, 4), 4)])
    assert "path" in answers[0] and "path" in answers[2]
    assert answers[1]["reason"] == "full" and answers[1]["retry"] is True
    assert answers[1]["error"] == (
        f"{file_bytes(6)} of {file_bytes(10)} staged bytes are in use, {file_bytes(5)} more asked for"
    )
    wait_for(lambda: subject.counts["staged"] == 2)
    assert stage(subject, [(request(4, 5), 5)])[0]["reason"] == "full"
    request(1, 6).path(staging).unlink()
    assert "path" in stage(subject, [(request(5, 5), 5)])[0]
    subject.close()
    assert subject.room() == {
        "staged": file_bytes(9), "limit": file_bytes(10), "free": subject.room()["free"], "min_free": 0,
    }  # fmt: skip
    for path in (staging / RUN).iterdir():
        path.unlink()
    assert subject.room()["staged"] == 0
    assert subject.counts == {"staged": 3, "full": 2, "failed": 2}


def test_chunked_prompts_are_counted_from_their_first_chunk(staging: Path) -> None:
    subject = Stager(staging, replace(PLENTY, staged_bytes=file_bytes(10)))
    first, second = request(1, 8), request(2, 8)
    answers = stage(subject, [(first, 1), (second, 1)])
    assert answers[0] == {"pending": 1}
    assert answers[1]["reason"] == "full"
    # SGLang tells the client what the last chunk's answer was: it must still be the first one's reason.
    assert stage(subject, [(second, 3)], [1])[0]["reason"] == "full"
    last = stage(subject, [(first, 7), (second, 4)], [1, 4])
    assert "path" in last[0]
    assert last[1]["reason"] == "full" and last[1]["retry"] is True
    subject.close()
    check_file(staging, first)
    assert not subject._partials
    assert subject.counts == {"staged": 1, "full": 1, "failed": 1}


def test_a_request_that_never_fits_is_not_sent_again(staging: Path) -> None:
    subject = Stager(staging, replace(PLENTY, staged_bytes=file_bytes(10)))
    answer = stage(subject, [(request(1, 11), 11)])[0]
    subject.close()
    assert answer["reason"] == "too_large" and answer["retry"] is False
    assert f"take {file_bytes(11)} bytes, {file_bytes(10)} may be staged" in answer["error"]


def test_min_free_stays_free_whatever_is_on_its_way(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda _: 1000 + file_bytes(10))
    subject = Stager(staging, replace(PLENTY, min_free_bytes=1000))
    answers = stage(subject, [(request(1, 6), 6), (request(2, 5), 5), (request(3, 4), 4)])
    subject.close()
    assert "path" in answers[0] and "path" in answers[2]
    assert (answers[1]["reason"], answers[1]["retry"]) == ("full", True)
    assert "1000 must stay" in answers[1]["error"]


def test_free_bytes_is_asked_once_a_forward_and_survives_a_missing_directory(
    staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < room.free_bytes(staging) < 1 << 60
    assert room.free_bytes(staging / "missing") == 0
    asked = []
    monkeypatch.setattr(room, "free_bytes", lambda path: asked.append(path) or 1 << 40)
    subject = Stager(staging, PLENTY)
    for forward in (0, 1):
        stage(subject, [(request(10 * forward + i, 2), 2) for i in range(1, 9)])
    subject.close()
    assert len(asked) == 2


def test_aborted_prompts_are_forgotten_and_their_memory_is_freed(
    staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stager, "PARTIAL_PATIENCE", 3)
    subject = Stager(staging, replace(PLENTY, staged_bytes=file_bytes(10)))
    assert stage(subject, [(request(1, 9), 2)])[0] == {"pending": 2}
    assert stage(subject, [(request(2, 9), 2)])[0]["reason"] == "full"
    for _ in range(4):
        stage(subject, [(None, 1)])
    assert not subject._partials
    assert subject._room.staged_bytes() == 0
    assert subject.counts["aborted"] == 2
    assert stage(subject, [(request(1, 9), 7)], [2])[0]["reason"] == "rows"
    assert "path" in stage(subject, [(request(3, 9), 9)])[0]
    subject.close()


def test_neighbours_go_to_those_who_ask(staging: Path) -> None:
    subject = Stager(staging, PLENTY)
    plain, asking = request(1, 3), request(2, 4, "n")
    stage(subject, [(plain, 3), (asking, 4)], fields=(1, 2, 9), neighbours=(1,))
    subject.close()
    check_file(staging, plain)
    check_file(staging, asking, (1, 2, 9))


def test_an_answer_says_whether_its_forwards_held_nothing_else(staging: Path) -> None:
    subject = Stager(staging, PLENTY)
    one, two, three, four = (request(serial, 4) for serial in (1, 2, 3, 4))
    (told,) = stage(subject, [(one, 4)])
    assert told["alone"] is True
    assert [answer and answer["alone"] for answer in stage(subject, [(two, 4), (None, 2)])] == [False, None]
    # In chunks: all of them count.
    stage(subject, [(three, 2), (None, 2)])
    stage(subject, [(four, 2)])
    (last_of_three,), (last_of_four,) = stage(subject, [(three, 2)], [2]), stage(subject, [(four, 2)], [2])
    assert (last_of_three["alone"], last_of_four["alone"]) == (False, True)
    subject.close()


def test_each_rank_has_its_own_file(staging: Path) -> None:
    name = request(1, 3, "r")
    for rank in (0, 1):
        subject = Stager(staging, PLENTY, rank=rank)
        stage(subject, [(name, 3)])
        subject.close()
        check_file(staging, name, rank=rank)
    assert sorted(p.name for p in (staging / RUN).iterdir()) == ["1.rank1", "1.states"]
    with pytest.raises(StagedError, match="of rank 1, not"):
        staged.parse(memoryview(name.path(staging, 1).read_bytes()), Path("x"), name, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_but_the_first_take_no_page_locked_memory(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slabs: list[int] = []
    monkeypatch.setattr(stager, "HostPool", lambda limit: slabs.append(limit) or HostPool(limit))
    name = request(1, 3, "r")
    fields = {f"hidden.{k}": states_of(name, k).cuda() for k in (2, 9)}
    for rank in (0, 1, 2):
        subject = Stager(staging, PLENTY, rank=rank)
        subject.stage([name], [3], [0], ids_of(name).cuda(), fields)
        subject.close()
        found = staged.read(name.path(staging, rank), name, rank)
        for k in (2, 9):
            states = np.frombuffer(found.fields[f"hidden.{k}"][2], dtype="<f4").reshape(3, H)
            assert (states == states_of(name, k).numpy()).all()
        assert slabs == [PLENTY.pool_bytes]


def test_states_in_columns_of_one_tensor_are_taken_apart(staging: Path) -> None:
    subject = Stager(staging, PLENTY)
    name = request(1, 3)
    packed = torch.cat([states_of(name, 2), states_of(name, 9)], dim=1)
    two, nine = packed.split(H, dim=1)
    subject.stage([name], [3], [0], ids_of(name).to(torch.int32), {"h2": two, "h9": nine})
    subject.close()
    check_file(staging, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_bits(staging: Path, dtype: torch.dtype) -> None:
    subject = Stager(staging, PLENTY)
    name = request(1, 5)
    states = torch.randn(5, H).to(dtype)
    for start, end in ((0, 2), (2, 5)):
        subject.stage([name], [end - start], [start], ids_of(name)[start:end], {"last": states[start:end]})
    subject.close()
    field = staged.read(name.path(staging), name).fields["last"]
    assert field[0] == str(dtype).removeprefix("torch.")
    assert bytes(field[2]) == states.view(torch.uint8).numpy().tobytes()


def test_a_writers_failure_is_told_and_counted(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "digest_of", lambda _: 1 / 0)
    subject = Stager(staging, PLENTY)
    stage(subject, [(request(1, 3), 3)])
    subject.close()
    assert [p.name for p in (staging / RUN).iterdir()] == ["1.states.failed"]
    assert (staging / RUN / "1.states.failed").read_text() == "ZeroDivisionError: division by zero"
    assert subject.counts == {"failed": 1}
    assert subject._room.staged_bytes() == 0


def test_close_waits_for_writers_and_later_requests_are_told(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest_of = staged.digest_of

    def slowly(parts: Sequence[memoryview]) -> str:
        time.sleep(0.1)
        return digest_of(parts)

    monkeypatch.setattr(staged, "digest_of", slowly)
    subject = Stager(staging, PLENTY, num_threads=1)
    names = [request(i, 3) for i in range(1, 4)]
    stage(subject, [(name, 3) for name in names])
    subject.close()
    for name in names:
        check_file(staging, name)
    answer = stage(subject, [(request(9, 3), 3)])[0]
    assert answer == {"error": "the server is shutting down", "reason": "closed", "retry": True}
    assert subject._room._coming_bytes() == 0


def test_a_client_that_dies_while_its_file_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    writing, go_on = threading.Event(), threading.Event()
    writev = os.writev

    def wait(fd: int, views: Sequence[memoryview]) -> int:
        writing.set()
        assert go_on.wait(10)
        return writev(fd, views)

    monkeypatch.setattr(os, "writev", wait)
    subject = Stager(tmp_path, PLENTY, num_threads=1)
    names = [RequestName(run.path.name, i, 3) for i in (1, 2)]
    with caplog.at_level(logging.ERROR):
        stage(subject, [(name, 3) for name in names])
        assert writing.wait(10)
        run.close()
        go_on.set()
        subject.close()
    assert list(tmp_path.iterdir()) == []
    assert subject.counts == {"failed": 2}
    assert subject._room.staged_bytes() == 0
    assert not caplog.records  # nobody did anything wrong


def test_the_quota_is_never_passed_and_never_counts_twice(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files appear, are taken and are counted in three threads: whatever the order, the sum stays true."""
    limit = file_bytes(12)
    subject = Stager(staging, replace(PLENTY, staged_bytes=limit), num_threads=3)
    seen: list[int] = []
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set():
            for path in list((staging / RUN).glob("*.states")):
                path.unlink()

    def watch() -> None:
        while not stop.is_set():
            seen.append(subject._room.staged_bytes())

    threads = [threading.Thread(target=take), threading.Thread(target=watch)]
    for thread in threads:
        thread.start()
    staged_count = 0
    for serial in range(1, 200):
        staged_count += "path" in stage(subject, [(request(serial, 4), 4)])[0]
    stop.set()
    for thread in threads:
        thread.join()
    subject.close()
    assert max(seen) <= limit
    assert subject.counts["staged"] == staged_count > 10
    assert subject.counts["full"] == subject.counts["failed"] == 199 - staged_count
    for path in (staging / RUN).iterdir():
        path.unlink()
    assert subject.room()["staged"] == 0


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
