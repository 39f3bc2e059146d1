"""Format version 1, byte for byte: what `docs/format.md` promises. A change here is a change of the format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from eyas.records import (
    CaptureSpec,
    Provenance,
    StateBlock,
    digest_bytes,
    sample_id_of,
    shard_id_of,
)
from eyas.store import record, writer
from eyas.store.layout import Layout
from eyas.store.plan import Segment, SegmentHead, cut, write_segment
from eyas.store.reader import DataSet
from eyas.store.verify import verify
from eyas.store.writer import DataSetWriter

FORMAT_MD = Path(__file__).parent.parent / "docs" / "format.md"

SPEC = CaptureSpec(
    target_digest="00112233445566778899aabbccddeeff",
    num_layers=3,
    hidden_size=2,
    vocab_size=100,
    aux_layers=(1,),
    last_hidden_norm="post",
    dtype="bfloat16",
)
TOKENS = [[1, 2, 3], [4], [5, 6], [2**31 - 1]]
SAMPLE_IDS = [
    "17a0d10fb16c588b32431992a2e976c7",
    "7ffc68f670f9d279df43dbd8fb8d9bdc",
    "2dce4801227c2e1924f6e78361b8d5d2",
    "1fd60a5b383ec3cf1c26f00c1fdb02e7",
]
FIRST, SECOND = "955d255540eb4003c3752bcc8fcb138b", "a47eea2e0ea56bff7b4ffccf7452953a"

HEAD = (
    b'{"fingerprint":"3d5b435dc06683a2481389eeae4847d1","format":1,"head_digest":"58430faaab53e5b9907656035298'
    b'9405","made_by":"eyas 0.1.0","requires":[],"spec":{"aux_layers":[1],"dtype":"bfloat16","hidden_size":2,"'
    b'last_hidden_norm":"post","num_layers":3,"origin":{},"quantisation":"none","target_digest":"0011223344556'
    b'6778899aabbccddeeff","vocab_size":100}}\n'
)
SEGMENT_METADATA = {
    b"eyas.format": b"1",
    b"eyas.segment": (
        b'{"attempt":0,"kind":"capture","max_tokens":3,"num_new":4,"num_new_tokens":7,"num_samples":4,"num_tokens":7,'
        b'"number":0,"samples_digest":"abababababababababababababababab","seed":0,'
        b'"selection":{"limit":null,"sources":[],"tags":[]},"shard_tokens":4}'
    ),
    b"eyas.shards": (b'[["955d255540eb4003c3752bcc8fcb138b",2,4],["a47eea2e0ea56bff7b4ffccf7452953a",2,3]]'),
    b"eyas.digest": b"f0abaefd79d60711b80ff1dcdbb6a779",
}
FIRST_PAYLOAD_DIGEST = "a0a377ac035e0f1a9224bcf7dec55330"
FIRST_HEADER = (
    b'{"__metadata__":{"eyas.format":"1","eyas.shard_id":"955d255540eb4003c3752bcc8fcb138b","eyas.fingerprint"'
    b':"3d5b435dc06683a2481389eeae4847d1"},"0.hidden.1":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]},"'
    b'0.last":{"dtype":"BF16","shape":[3,2],"data_offsets":[12,24]},"1.hidden.1":{"dtype":"BF16","shape":[1,2]'
    b',"data_offsets":[24,28]},"1.last":{"dtype":"BF16","shape":[1,2],"data_offsets":[28,32]}}'
)
FIRST_TENSORS = bytes.fromhex("803f813f823f833f843f853f8a3f8b3f8c3f8d3f8e3f8f3f943f953f9e3f9f3f")
FIRST_RECORD = (
    b'{"duplicates":[],"field_order":["hidden.1","last"],"fields":{"hidden.1":{"codec":"raw","digest":null,"dt'
    b'ype":"bfloat16","parts":{"":{"bytes":[12,4],"digest":["56ef31598392d09559871b9a96c77de2","e51163891867b0'
    b'dc333a507062724a5e"],"offset":[4096,4120]}},"rows":null,"shape":["T",2]},"last":{"codec":"raw","digest":'
    b'null,"dtype":"bfloat16","parts":{"":{"bytes":[12,4],"digest":["d61ab0192edc0e1546098bfb6c44aaae","9949a6'
    b'5f840590376b4109880bff5ab1"],"offset":[4108,4124]}},"rows":null,"shape":["T",2]}},"fingerprint":"3d5b435'
    b'dc06683a2481389eeae4847d1","format":1,"payload":{"bytes":4128,"digest":"a0a377ac035e0f1a9224bcf7dec55330'
    b'","header_bytes":4096,"name":"955d255540eb4003c3752bcc8fcb138b.a0a377ac035e0f1a9224bcf7dec55330.safetens'
    b'ors"},"provenance":{"committed_at":1700000000.25,"engine":"fake","host":"host","run_id":"run","settings"'
    b':{"drift":"0.0"},"version":"1"},"record_digest":"84b98ff9ef9dc57f54e1ac649cd4218a","rejects":[],"release'
    b'd":false,"requires":[],"samples":{"num_tokens":[3,1],"position":[0,1],"sample_id":["17a0d10fb16c588b3243'
    b'1992a2e976c7","7ffc68f670f9d279df43dbd8fb8d9bdc"]},"shard_id":"955d255540eb4003c3752bcc8fcb138b"}\n'
)
SECOND_PAYLOAD_DIGEST = "72464d5c2e74d9d033baf5f4ecc35740"
SECOND_HEADER = (
    b'{"__metadata__":{"eyas.format":"1","eyas.shard_id":"a47eea2e0ea56bff7b4ffccf7452953a","eyas.fingerprint"'
    b':"3d5b435dc06683a2481389eeae4847d1"},"1.hidden.1":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},"1'
    b'.last":{"dtype":"BF16","shape":[1,2],"data_offsets":[4,8]}}'
)
SECOND_TENSORS = bytes.fromhex("e43fe53fee3fef3f")
SECOND_RECORD = (
    b'{"duplicates":[],"field_order":["hidden.1","last"],"fields":{"hidden.1":{"codec":"raw","digest":null,"dt'
    b'ype":"bfloat16","parts":{"":{"bytes":[4],"digest":["e26eeec3189e8168abcc977ee6d851de"],"offset":[4096]}}'
    b',"rows":null,"shape":["T",2]},"last":{"codec":"raw","digest":null,"dtype":"bfloat16","parts":{"":{"bytes'
    b'":[4],"digest":["57a4a7f290808dbf26581f032bb40d91"],"offset":[4100]}},"rows":null,"shape":["T",2]}},"fin'
    b'gerprint":"3d5b435dc06683a2481389eeae4847d1","format":1,"payload":{"bytes":4104,"digest":"72464d5c2e74d9'
    b'd033baf5f4ecc35740","header_bytes":4096,"name":"a47eea2e0ea56bff7b4ffccf7452953a.72464d5c2e74d9d033baf5f'
    b'4ecc35740.safetensors"},"provenance":{"committed_at":1700000000.25,"engine":"fake","host":"host","run_id'
    b'":"run","settings":{"drift":"0.0"},"version":"1"},"record_digest":"2b8721f3b4f994902d83c7824ff5a5c4","re'
    b'jects":[{"detail":"scripted","reason":"refused","sample_id":"2dce4801227c2e1924f6e78361b8d5d2"}],"releas'
    b'ed":false,"requires":[],"samples":{"num_tokens":[1],"position":[1],"sample_id":["1fd60a5b383ec3cf1c26f00'
    b'c1fdb02e7"]},"shard_id":"a47eea2e0ea56bff7b4ffccf7452953a"}\n'
)


def block(start: int, num_tokens: int) -> StateBlock:
    values = 0x3F80 + np.arange(start, start + 2 * num_tokens, dtype=np.uint16)
    return StateBlock("bfloat16", (num_tokens, 2), values.view(np.uint8).data)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of two samples each; the first sample of the second shard is rejected."""
    root = tmp_path_factory.mktemp("golden") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "__version__", "0.1.0")
        with DataSetWriter(root, SPEC) as out:
            token_ids = [np.array(ids, np.int32) for ids in TOKENS]
            samples = [(sample_id_of(ids), ids) for ids in token_ids]
            head = SegmentHead(0, "capture", 0, 0, 4, "ab" * 16, {"limit": None, "sources": [], "tags": []})
            shards = [(shard, [True] * len(shard)) for shard in cut(samples, 4)]
            write_segment(out.files, out.layout.segment(0), head, shards)
            (segment,) = out.segments()
            first, second = (
                out.shard_writer(shard, [(sample_id, len(ids)) for sample_id, ids in segment.read(shard)])
                for shard in segment.shards
            )
            first.append({"last": block(10, 3), "hidden.1": block(0, 3)})
            first.append({"last": block(30, 1), "hidden.1": block(20, 1)})
            second.reject("refused", "scripted")
            second.append({"last": block(110, 1), "hidden.1": block(100, 1)})
            for shard in (first, second):
                made = Provenance("fake", "1", {"drift": "0.0"}, "host")
                shard.commit(made, run_id="run", committed_at=1700000000.25)
            segment.close()
    return root


def stripped_digest(data: bytes, key: str) -> str:
    """As the contract says it: without the line feed, without the member itself."""
    return digest_bytes(re.sub(rb'"%s":"[0-9a-f]{32}",' % key.encode(), b"", data.removesuffix(b"\n"), count=1))


def test_the_digest_is_xxh3_128() -> None:
    assert digest_bytes() == "99aa06d3014798d86001c324468d497f"  # the empty input, as the xxHash project states it
    assert digest_bytes(b"a", b"bc") == digest_bytes(b"abc") == "06b05ab6733a618578af5f94892f3950"


def test_sample_ids() -> None:
    assert [sample_id_of(ids) for ids in TOKENS] == SAMPLE_IDS
    assert digest_bytes(b"eyas.sample.1\0\x01\0\0\0\x02\0\0\0\x03\0\0\0") == SAMPLE_IDS[0]
    assert digest_bytes(b"eyas.sample.1\0\xff\xff\xff\x7f") == SAMPLE_IDS[3]
    image = bytes(range(16))
    assert sample_id_of([4], image) == digest_bytes(b"eyas.sample.1\0\x04\0\0\0" + image)


def test_shard_ids() -> None:
    assert shard_id_of(SAMPLE_IDS[:2]) == FIRST
    assert shard_id_of(SAMPLE_IDS[2:]) == SECOND
    raw = bytes.fromhex("".join(SAMPLE_IDS[:2]))
    assert digest_bytes(b"eyas.shard.1\0" + raw) == FIRST
    assert shard_id_of(SAMPLE_IDS[:2], 2) == digest_bytes(b"eyas.shard.1\0\x02\0\0\0" + raw)
    assert shard_id_of(SAMPLE_IDS[:2], 2) == "54302630642c28bc7e9b06e0cc141708"


def test_fingerprint() -> None:
    spec = re.search(rb'"spec":(\{.*?\}.*?\})\}', HEAD)
    assert spec is not None
    assert digest_bytes(spec[1]) == SPEC.fingerprint == "3d5b435dc06683a2481389eeae4847d1"


def test_names(root: Path) -> None:
    assert sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) == [
        "eyas.json",
        "lock",
        "plan/00000.parquet",
        f"records/{FIRST}.json",
        f"records/{SECOND}.json",
        f"shards/{FIRST}.{FIRST_PAYLOAD_DIGEST}.safetensors",
        f"shards/{SECOND}.{SECOND_PAYLOAD_DIGEST}.safetensors",
    ]
    assert {p.stat().st_mode & 0o777 for p in root.rglob("*") if p.is_file()} == {0o600}
    assert {p.stat().st_mode & 0o777 for p in root.rglob("*") if p.is_dir()} == {0o700}


def test_head(root: Path) -> None:
    assert (root / "eyas.json").read_bytes() == HEAD
    assert json.loads(HEAD)["head_digest"] == stripped_digest(HEAD, "head_digest")


def test_segment(root: Path) -> None:
    file = pq.ParquetFile(root / "plan" / "00000.parquet")
    metadata = {k: v for k, v in file.metadata.metadata.items() if k.startswith(b"eyas.")}
    assert metadata == SEGMENT_METADATA
    joined = b"".join(metadata[key] for key in (b"eyas.format", b"eyas.segment", b"eyas.shards"))
    assert digest_bytes(joined).encode() == metadata[b"eyas.digest"]
    assert [(field.name, field.type) for field in file.schema_arrow] == [
        ("sample_id", pa.binary(16)),
        ("num_tokens", pa.int32()),
        ("token_ids", pa.large_list(pa.int32())),
    ]
    groups = [file.read_row_group(i) for i in range(file.num_row_groups)]
    assert [[s.hex() for s in g["sample_id"].to_pylist()] for g in groups] == [SAMPLE_IDS[:2], SAMPLE_IDS[2:]]
    assert [g["num_tokens"].to_pylist() for g in groups] == [[3, 1], [2, 1]]
    assert [g["token_ids"].to_pylist() for g in groups] == [TOKENS[:2], TOKENS[2:]]
    assert all(isinstance(g, pa.Table) for g in groups)


@pytest.mark.parametrize(
    ("shard_id", "digest", "header", "tensors"),
    [
        (FIRST, FIRST_PAYLOAD_DIGEST, FIRST_HEADER, FIRST_TENSORS),
        (SECOND, SECOND_PAYLOAD_DIGEST, SECOND_HEADER, SECOND_TENSORS),
    ],
)
def test_payload(root: Path, shard_id: str, digest: str, header: bytes, tensors: bytes) -> None:
    data = (root / "shards" / f"{shard_id}.{digest}.safetensors").read_bytes()
    assert data == b"\xf8\x0f\0\0\0\0\0\0" + header + b" " * (4088 - len(header)) + tensors
    # The digest in the name: header, then the digest of each tensor in file order.
    listing = json.loads(header)
    spans = [entry["data_offsets"] for name, entry in listing.items() if name != "__metadata__"]
    parts = [bytes.fromhex(digest_bytes(tensors[a:b])) for a, b in spans]
    assert digest_bytes(data[:4096], *parts) == digest


@pytest.mark.parametrize(("shard_id", "expected"), [(FIRST, FIRST_RECORD), (SECOND, SECOND_RECORD)])
def test_record(root: Path, shard_id: str, expected: bytes) -> None:
    path = root / "records" / f"{shard_id}.json"
    assert path.read_bytes() == expected
    assert json.loads(expected)["record_digest"] == stripped_digest(expected, "record_digest")
    parsed = record.from_bytes(expected, path)
    assert record.to_bytes(parsed) == expected


def test_reading_the_golden_bytes(tmp_path: Path) -> None:
    """A data set laid down from the literals alone, whoever wrote it, is read and verified."""
    for name in ("shards", "records", "plan"):
        (tmp_path / name).mkdir()
    (tmp_path / "eyas.json").write_bytes(HEAD)
    for shard_id, digest, header, tensors, text in (
        (FIRST, FIRST_PAYLOAD_DIGEST, FIRST_HEADER, FIRST_TENSORS, FIRST_RECORD),
        (SECOND, SECOND_PAYLOAD_DIGEST, SECOND_HEADER, SECOND_TENSORS, SECOND_RECORD),
    ):
        payload = (4088).to_bytes(8, "little") + header.ljust(4088) + tensors
        (tmp_path / "shards" / f"{shard_id}.{digest}.safetensors").write_bytes(payload)
        (tmp_path / "records" / f"{shard_id}.json").write_bytes(text)
    schema = pa.schema(
        [("sample_id", pa.binary(16)), ("num_tokens", pa.int32()), ("token_ids", pa.large_list(pa.int32()))]
    )
    with pq.ParquetWriter(tmp_path / "plan" / "00000.parquet", schema) as out:
        for a, b in ((0, 2), (2, 4)):
            ids = [bytes.fromhex(s) for s in SAMPLE_IDS[a:b]]
            out.write_table(pa.table([ids, [len(t) for t in TOKENS[a:b]], TOKENS[a:b]], schema=schema))
        out.add_key_value_metadata(SEGMENT_METADATA)
    report = verify(tmp_path)
    assert (report.problems, report.planned, report.committed, report.rejected) == ([], 4, 3, 1)
    data = DataSet(tmp_path)
    assert [data.sample_id(i) for i in range(3)] == [SAMPLE_IDS[0], SAMPLE_IDS[1], SAMPLE_IDS[3]]
    assert bytes(data[0].field("last")).hex() == "8a3f8b3f8c3f8d3f8e3f8f3f"
    assert data[0].last_hidden_state()[0].tolist() == [1.078125, 1.0859375]


def test_permutation() -> None:
    """Against the definition, in whole numbers of Python, and against pinned orders."""
    mask = 2**64 - 1

    def mix64(x: int) -> int:
        w = (x + 0x9E3779B97F4A7C15) & mask
        y = ((w ^ (w >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((y ^ (y >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def order(ids: list[str], seed: int, epoch: int) -> list[int]:
        def place(i: int) -> tuple[int, int, int]:
            raw = bytes.fromhex(ids[i])
            high, low = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
            return mix64(low ^ mix64((mix64(seed) + epoch) & mask)), low, high

        return sorted(range(len(ids)), key=place)

    from eyas.store.reader import Permutation

    ids = [digest_bytes(str(i).encode()) for i in range(64)]
    ids += [ids[0][:16] + ids[1][16:]]  # the same low half as another's
    raw = np.frombuffer(bytes.fromhex("".join(ids)), np.uint8).reshape(-1, 16)
    for seed, epoch in ((0, 0), (7, 0), (7, 1), (2**64 - 1, 5)):
        assert Permutation(raw, seed=seed, epoch=epoch).indices().tolist() == order(ids, seed, epoch)
    assert Permutation(raw[:12], seed=7, epoch=0).indices().tolist() == [10, 3, 6, 1, 4, 11, 2, 8, 0, 5, 9, 7]
    assert Permutation(raw[:12], seed=7, epoch=1).indices().tolist() == [9, 5, 4, 1, 7, 10, 11, 6, 8, 2, 0, 3]


def test_plan_order() -> None:
    from eyas.capture.plan import order_key

    assert order_key(SAMPLE_IDS[0], 3).hex() == digest_bytes(b"\x03\0\0\0\0\0\0\0" + bytes.fromhex(SAMPLE_IDS[0]))
    assert order_key(SAMPLE_IDS[0], -1).hex() == digest_bytes(b"\xff" * 8 + bytes.fromhex(SAMPLE_IDS[0]))
    assert order_key(SAMPLE_IDS[0], 3).hex() == "5fd1730338e8a5820c792856d28b53ff"


def test_cut() -> None:
    """A shard ends before the sample that would take it past the limit; a longer one stands alone."""
    samples = [(str(i), np.zeros(n, np.int32)) for i, n in enumerate([2, 2, 1, 9, 4, 1])]
    assert [[s for s, _ in shard] for shard in cut(samples, 4)] == [["0", "1"], ["2"], ["3"], ["4"], ["5"]]
    tiny = [(str(i), np.zeros(1, np.int32)) for i in range(4_097)]
    assert [len(shard) for shard in cut(tiny, 10**9)] == [4_096, 1]


def test_header_has_room_for_all_planned_samples(tmp_path: Path) -> None:
    """A multiple of 4096 that does not depend on which samples are rejected."""
    samples = [(sample_id_of([i]), np.array([i], np.int32)) for i in range(40)]
    sizes = []
    for rejected in (0, 39):
        root = tmp_path / str(rejected)
        with DataSetWriter(root, SPEC) as out:
            head = SegmentHead(0, "capture", 0, 0, 100, "", {})
            write_segment(out.files, out.layout.segment(0), head, [(samples, [True] * 40)])
            with Segment(out.layout.segment(0)) as segment:
                shard = out.shard_writer(segment.shards[0], [(s, 1) for s, _ in samples])
            for i in range(40):
                if i < rejected:
                    shard.reject("refused", "")
                else:
                    shard.append({"hidden.1": block(i, 1), "last": block(i, 1)})
            sizes.append(shard.commit(Provenance("fake", "1"), run_id="r", committed_at=1.0).header_bytes)
        assert verify(root).problems == []
    assert sizes == [8192, 8192]


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", FORMAT_MD.read_text(), re.DOTALL)
    return str(code)


def test_the_example_of_the_contract_reads_a_data_set(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    names: dict[str, Any] = {}
    exec(compile(example(), str(FORMAT_MD), "exec"), names)
    assert set(names["where"]) == {SAMPLE_IDS[0], SAMPLE_IDS[1], SAMPLE_IDS[3]}
    data = DataSet(root)
    for sample_id in names["where"]:
        aux, last = names["read"](sample_id)
        sample = data[data.index_of(sample_id)]
        assert torch.equal(torch.stack(aux, 1), sample.aux_hidden_states())
        assert torch.equal(last, sample.last_hidden_state())


def test_the_example_needs_safetensors_alone_and_is_short() -> None:
    assert set(re.findall(r"^(?:import|from) (\w+)", example(), re.MULTILINE)) == {"json", "pathlib", "safetensors"}
    assert len([line for line in example().splitlines() if line.strip()]) <= 25


def test_any_safetensors_reader_opens_a_payload(root: Path) -> None:
    path = Layout(root).payload(FIRST, FIRST_PAYLOAD_DIGEST)
    with safe_open(path, framework="pt") as tensors:
        assert list(tensors.keys()) == ["0.hidden.1", "0.last", "1.hidden.1", "1.last"]
        assert tensors.metadata() == {
            "eyas.format": "1",
            "eyas.shard_id": FIRST,
            "eyas.fingerprint": SPEC.fingerprint,
        }


def test_every_key_of_the_files_is_in_the_contract(root: Path) -> None:
    text = FORMAT_MD.read_text()

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    found = keys(json.loads(HEAD)) | keys(json.loads(SECOND_RECORD)) | keys(json.loads(FIRST_HEADER))
    found |= keys(json.loads(SEGMENT_METADATA[b"eyas.segment"])) | {k.decode() for k in SEGMENT_METADATA}
    named = set(re.findall(r"[\w.]+", text)) | {
        part for word in re.findall(r"[\w.]+", text) for part in word.split(".")
    }
    own = {"", "drift", "hidden.1", "1.hidden.1", "0.hidden.1", "0.last", "1.last"}
    assert found - named - own == set()
