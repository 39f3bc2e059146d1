"""The target in this process, tiny and random: ids kept, masks exact, any kill resumed, every row accounted for."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eyas.config import EngineConfig, GenerateConfig, TargetConfig
from eyas.errors import ConfigError, DataError, DataSetLocked
from eyas.generate.answerer import Answerer
from eyas.generate.answers import rejects_path
from eyas.generate.inprocess import generate, next_batch
from eyas.generate.receipt import GenerateReceipt
from eyas.log import Progress

torch.set_num_threads(1)  # threads cost a model this small a hundredfold where other jobs hold the cores

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL_TEMPLATE = TEMPLATE.replace("message['content'] }}", "message['content'] if loop.last else '…' }}")
WORDS = "the target writes what it wants and the user asks again, again and again: what is that thing there?\n"
MAX_NEW_TOKENS = 12


def build_target(path: Path, *, end_bias: float = 0.6, template: str = TEMPLATE, positions: int = 512) -> Path:
    """A Llama of two layers that ends a turn now and then: the higher `end_bias`, the sooner."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator([WORDS] * 4, trainer)
    trained.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    path.mkdir(parents=True)
    trained.save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    end = trained.token_to_id("<|im_end|>")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=trained.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.3,
        eos_token_id=end,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Feature 0 is the same for every token, and only the end of a turn listens to it: a bias.
        model.model.embed_tokens.weight[:, 0] = 2.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[end, 0] = 10 * end_bias
    model.save_pretrained(path)
    return path


def prompt_rows() -> list[dict[str, Any]]:
    def asking(*users: str, system: str = "") -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for user in users:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": None}]
        return messages

    single = [asking(f"what is {thing}?") for thing in ("that", "it", "the thing over there", "x", "größer", "他")]
    several = [asking(*(f"{word} {i}" for i in range(1 + n % 4))) for n, word in enumerate(("again", "what", "user"))]
    several += [asking("one", "two", "three", "four"), asking("again and again", "and?", system="the target writes")]
    messages = [*single, *several, asking("long " * 60), asking("the " * 90, "and")]
    return [{"id": f"p{i}", "tags": ["t"], "messages": m} for i, m in enumerate(messages)]


class Setting:
    """A target, prompts and an output in one directory, and the way to run them."""

    def __init__(self, directory: Path, target: Path, rows: list[dict[str, Any]] | None = None) -> None:
        self.target = target
        self.prompts = directory / "prompts.jsonl"
        self.out = directory / "out.jsonl"
        self.write_prompts(prompt_rows() if rows is None else rows)
        self.stream = io.StringIO()

    def write_prompts(self, rows: list[dict[str, Any]]) -> None:
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, **config: Any) -> GenerateReceipt:
        options = {"max_new_tokens": MAX_NEW_TOKENS, "batch_size": 4, **config}
        return generate(
            GenerateConfig(prompts=self.prompts, out=self.out, **options),
            TargetConfig(path=self.target),
            EngineConfig(dtype="float32", device="cpu"),
            Progress(interval_s=0.0, stream=self.stream),
        )

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in map(json.loads, self.out.read_text().splitlines())}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def setting(tmp_path: Path, tiny: Path) -> Setting:
    return Setting(tmp_path, tiny)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Setting:
    """A complete greedy run, not to be changed."""
    setting = Setting(tmp_path_factory.mktemp("whole"), tiny)
    setting.run()
    return setting


def spans(mask: list[int]) -> list[tuple[int, int]]:
    edges = [i for i in range(len(mask) + 1) if (mask[i - 1] if i else 0) != (mask[i] if i < len(mask) else 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def contents(path: Path) -> list[str]:
    """Rows without the order in which they were written, which depends on where a run was interrupted."""
    return sorted(path.read_text().splitlines())


def test_the_tiny_target_does_everything_that_the_tests_are_about(whole: Setting) -> None:
    rows = whole.rows().values()
    assert {reason for row in rows for reason in row["finish_reason"]} == {"stop", "length"}
    assert {row.get("ended_early") for row in rows} >= {None, "cut_answer"}
    assert any(len(row["finish_reason"]) >= 3 for row in rows)


def test_masked_ids_are_exactly_what_the_target_wrote(whole: Setting) -> None:
    tokenizer = AutoTokenizer.from_pretrained(whole.target)
    model = AutoModelForCausalLM.from_pretrained(whole.target, dtype=torch.float32)
    end = tokenizer.eos_token_id
    retokenised_differently = 0
    for row in whole.rows().values():
        ids, mask = row["input_ids"], row["loss_mask"]
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert len(ids) == len(mask)
        assert mask[-1] == 1, "nothing follows the last answer"
        assert len(spans(mask)) == len(answers) == len(row["finish_reason"])
        for (start, stop), answer, reason in zip(spans(mask), answers, row["finish_reason"], strict=True):
            written = ids[start:stop]
            assert (written[-1] == end) == (reason == "stop")
            assert end not in written[:-1]
            assert len(written) == MAX_NEW_TOKENS or reason == "stop"
            assert tokenizer.decode([i for i in written if i != end], clean_up_tokenization_spaces=False) == answer
            retokenised_differently += tokenizer(answer)["input_ids"] != [i for i in written if i != end]
            with torch.inference_mode():
                logits = model(torch.tensor([ids[:stop]])).logits[0]  # [T, V]
            assert logits[start - 1 : -1].argmax(-1).tolist() == written, "greedy, on the whole history"
    assert retokenised_differently, "the test would not notice ids that were encoded anew"


def test_text_between_answers_is_the_templates(whole: Setting) -> None:
    tokenizer = AutoTokenizer.from_pretrained(whole.target)
    for row in whole.rows().values():
        ids, messages = row["input_ids"], row["messages"]
        asked = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        last_end = 0
        for turn, (position, (start, end)) in enumerate(zip(asked, spans(row["loss_mask"]), strict=True)):
            rendered = tokenizer.apply_chat_template(messages[:position], tokenize=False, add_generation_prompt=True)
            if turn == 0:
                assert ids[:start] == tokenizer(rendered)["input_ids"]
            else:
                user = messages[position - 1]["content"]
                between = f"<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
                assert rendered.endswith(between)
                assert ids[last_end - 1 : start] == tokenizer(between)["input_ids"], "the end of the turn occurs once"
            last_end = end


class Waiting:
    """As much of a dialogue as batching looks at."""

    def __init__(self, num_tokens: int, num_turns_left: int = 1) -> None:
        self.token_ids = [0] * num_tokens
        self.num_turns_left = num_turns_left


def batches(waiting: list[Waiting], *, batch_size: int, max_new_tokens: int = 10) -> list[list[int]]:
    made = []
    left: Any = waiting
    while left:
        batch, left = next_batch(left, batch_size=batch_size, max_new_tokens=max_new_tokens)
        made.append([len(dialogue.token_ids) for dialogue in batch])
    return made


def test_batches_are_of_similar_length_and_conversations_with_most_turns_go_first() -> None:
    assert batches([Waiting(n) for n in (9, 5, 7, 6, 8)], batch_size=2) == [[5, 6], [7, 8], [9]]
    assert batches([Waiting(5), Waiting(9, 2), Waiting(50, 3)], batch_size=2) == [[50, 9], [5]]
    assert batches([Waiting(10), Waiting(11), Waiting(400), Waiting(401)], batch_size=4) == [[10, 11], [400, 401]]
    assert batches([Waiting(10), Waiting(11), Waiting(400)], batch_size=4, max_new_tokens=100) == [[10, 11, 400]]
    assert batches([Waiting(3000)] * 3, batch_size=4) == [[3000], [3000], [3000]]


def test_row_carries_how_it_was_made(whole: Setting) -> None:
    row = whole.rows()["p0"]
    assert row["sampling"] == {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS}
    assert set(row["target"]) == {"digest", "config_digest", "tokenizer_digest"}
    assert (row["target_name"], row["dtype"], row["source"], row["tags"]) == ("tiny", "float32", "prompts", ["t"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_alone_and_in_a_batch_are_equal(tmp_path: Path, tiny: Path, temperature: float) -> None:
    made = []
    for batch_size in (1, 3, 16):
        directory = tmp_path / str(batch_size)
        directory.mkdir()
        setting = Setting(directory, tiny)
        setting.run(batch_size=batch_size, temperature=temperature, seed=5)
        made.append(contents(setting.out))
    assert made[0] == made[1] == made[2]


def test_sampled_answers_depend_on_the_seed(tmp_path: Path, tiny: Path) -> None:
    made = []
    for seed in (1, 2):
        directory = tmp_path / str(seed)
        directory.mkdir()
        setting = Setting(directory, tiny, prompt_rows()[:4])
        setting.run(temperature=1.0, seed=seed)
        made.append([row["input_ids"] for row in setting.rows().values()])
    assert made[0] != made[1]


def test_sampling_follows_the_softmax() -> None:
    from eyas.generate.answerer import _Sampler

    scores = torch.tensor([[0.0, 1.0, -1.0, 2.0, -30.0]]).repeat(20_000, 1)
    draws = ((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)[:, None]
    chosen = _Sampler(draws, 0.5, width=3)(torch.zeros(20_000, 3, dtype=torch.long), scores).argmax(-1)
    shares = torch.bincount(chosen, minlength=5) / 20_000
    assert torch.allclose(shares, torch.softmax(scores[0] / 0.5, -1), atol=1e-4)


@pytest.mark.parametrize(
    "keep", ["nothing", "a few bytes", "one row", "half a row", "all but a newline", "all but one"]
)
def test_resume_after_a_kill_gives_the_same_rows(setting: Setting, whole: Setting, keep: str) -> None:
    data = whole.out.read_bytes()
    lines = data.splitlines(keepends=True)
    cut = {
        "nothing": 0,
        "a few bytes": 5,
        "one row": len(lines[0]),
        "half a row": len(lines[0]) + len(lines[1]) // 2,
        "all but a newline": len(data) - 1,
        "all but one": len(data) - len(lines[-1]),
    }[keep]
    setting.out.write_bytes(data[:cut])
    receipt = setting.run()
    assert contents(setting.out) == contents(whole.out)
    assert receipt.new_conversations == len(lines) - data[:cut].count(b"\n")
    assert setting.out.read_bytes().startswith(data[: data.rfind(b"\n", 0, cut) + 1]), (
        "finished rows stay where they are"
    )


def test_interrupted_in_the_second_batch_resumes(
    setting: Setting, whole: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Answerer.answer, 0

    def interrupted(self: Answerer, *args: Any, **kwargs: Any) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Answerer, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setting.run()
    assert 0 < len(setting.rows()) < len(whole.rows())
    assert setting.out.read_bytes().endswith(b"\n")
    monkeypatch.undo()
    setting.run()
    assert contents(setting.out) == contents(whole.out)


def test_complete_run_loads_nothing_and_changes_nothing(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    first = setting.run()
    before = setting.out.read_bytes()
    monkeypatch.setattr(Answerer, "__init__", lambda *_: pytest.fail("the target was loaded"))
    again = setting.run()
    assert setting.out.read_bytes() == before
    assert (again.new_conversations, again.new_tokens, again.dtype) == (0, 0, "")
    assert (again.planned, again.answered, again.finish_reasons) == (
        first.planned,
        first.answered,
        first.finish_reasons,
    )
    assert "this run: nothing left to do" in again.lines()


def test_more_prompts_later_are_added(setting: Setting, whole: Setting) -> None:
    setting.write_prompts(prompt_rows()[:5])
    setting.run()
    setting.write_prompts(prompt_rows())
    receipt = setting.run()
    assert receipt.new_conversations == receipt.planned - 5
    assert contents(setting.out) == contents(whole.out)


def test_every_prompt_is_answered_or_rejected_with_a_reason(setting: Setting) -> None:
    rows = prompt_rows()
    extra = [
        {"id": "twice", "messages": rows[0]["messages"]},
        {"id": "nobody", "messages": [{"role": "system", "content": "s"}]},
        {"id": "huge", "messages": [{"role": "user", "content": "x " * 600}]},
    ]
    setting.write_prompts([*rows, *extra])
    receipt = setting.run()
    assert receipt.planned == len(rows) + 3 == receipt.answered + 3
    assert dict(receipt.rejected) == {"duplicate": 1, "no_user_turn": 1, "too_long": 1}
    rejects = [json.loads(line) for line in rejects_path(setting.out).read_text().splitlines()]
    assert {(row["id"], row["line"]) for row in rejects} == {
        ("twice", len(rows) + 1),
        ("nobody", len(rows) + 2),
        ("huge", len(rows) + 3),
    }
    assert "512 positions" in next(row["detail"] for row in rejects if row["id"] == "huge")
    assert setting.run().new_conversations == 0
    assert len(rejects_path(setting.out).read_text().splitlines()) == 3
    assert receipt.lines()[0] == f"planned {len(rows) + 3} = answered {len(rows)} + rejected 3 " + (
        "(duplicate 1, no_user_turn 1, too_long 1)"
    )


def test_target_that_says_nothing_is_an_error_and_its_rejects_have_reasons(tmp_path: Path) -> None:
    setting = Setting(tmp_path, build_target(tmp_path / "silent", end_bias=50.0), prompt_rows()[:3])
    for _ in range(2):
        with pytest.raises(DataError, match=r"not one of 3 prompts has an answer \(empty_answer 3\)"):
            setting.run()
    assert not setting.out.exists()
    rejects = [json.loads(line) for line in rejects_path(setting.out).read_text().splitlines()]
    assert [row["reason"] for row in rejects] == ["empty_answer"] * 3


def test_target_that_never_stops_has_its_answers_cut_and_counted(tmp_path: Path) -> None:
    setting = Setting(tmp_path, build_target(tmp_path / "endless", end_bias=-50.0))
    receipt = setting.run()
    assert dict(receipt.finish_reasons) == {"length": receipt.planned}
    assert dict(receipt.ended_early) == {"cut_answer": sum(len(r["messages"]) > 3 for r in prompt_rows())}
    assert all(sum(row["loss_mask"]) == MAX_NEW_TOKENS for row in setting.rows().values())


def test_template_that_rewrites_history_keeps_the_first_exact_turn(tmp_path: Path) -> None:
    target = build_target(tmp_path / "forgetful", template=FORGETFUL_TEMPLATE, end_bias=0.9)
    setting = Setting(tmp_path, target)
    receipt = setting.run()
    assert receipt.ended_early["template_rewrites_history"] > 0
    assert all(len(row["finish_reason"]) == 1 for row in setting.rows().values())


def test_other_settings_are_refused(setting: Setting) -> None:
    setting.run()
    before = setting.out.read_bytes()
    for changed in ({"max_new_tokens": 5}, {"temperature": 0.5}):
        with pytest.raises(ConfigError, match=r"out\.jsonl:1: made with other settings .*choose another generate\.out"):
            setting.run(**changed)
    setting.write_prompts([{"messages": [{"role": "user", "content": "other"}]}])
    with pytest.raises(ConfigError, match=r"none of them about a prompt of .*choose another generate\.out"):
        setting.run()
    assert setting.out.read_bytes() == before
    setting.write_prompts(prompt_rows()[1:])
    assert setting.run().not_planned == 1


def test_second_writer_is_refused(setting: Setting) -> None:
    fd = os.open(setting.out.with_name("out.jsonl.lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(DataSetLocked):
            setting.run()
    finally:
        os.close(fd)


def test_progress_begins_before_the_target_is_loaded(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    real = Answerer.__init__

    def loading(self: Answerer, *args: Any) -> None:
        shown.append(setting.stream.getvalue())
        real(self, *args)

    monkeypatch.setattr(Answerer, "__init__", loading)
    setting.run()
    assert "generate: reading" in shown[0]
    assert "loading target" in shown[0]
    text = setting.stream.getvalue()
    assert f"token {MAX_NEW_TOKENS // 2}/{MAX_NEW_TOKENS}" in text
    assert "tokens/s" in text
    assert " left" in text


def test_importing_the_stage_does_not_import_torch() -> None:
    code = "import sys, eyas.generate.inprocess; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bad_settings_are_one_clear_line(setting: Setting, tmp_path: Path) -> None:
    def error(generate_config: GenerateConfig, target: Path | None, engine: EngineConfig | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            generate(
                generate_config, TargetConfig(path=target), engine or EngineConfig(), Progress(stream=setting.stream)
            )
        assert "\n" not in str(caught.value)
        return str(caught.value)

    good = GenerateConfig(prompts=setting.prompts, out=setting.out)
    assert "generate.prompts is not set" in error(GenerateConfig(out=setting.out), setting.target)
    assert "generate.out is not set" in error(GenerateConfig(prompts=setting.prompts), setting.target)
    same = GenerateConfig(prompts=setting.prompts, out=setting.prompts)
    assert "are the same file" in error(same, setting.target)
    assert "is a directory" in error(GenerateConfig(prompts=setting.prompts, out=tmp_path), setting.target)
    assert "target.path is not set" in error(good, None)
    assert "no such directory" in error(good, tmp_path / "nowhere")
    assert "engine.device 'cuda:99'" in error(good, setting.target, EngineConfig(device="cuda:99"))
    assert "engine.device 'abacus'" in error(good, setting.target, EngineConfig(device="abacus"))
    assert not setting.out.exists()


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("model.safetensors", "no *.safetensors weights"),
        ("config.json", "no config.json"),
        ("tokenizer.json", "its tokenizer cannot be loaded"),
        ("tokenizer_config.json", "has no chat template"),
    ],
)
def test_incomplete_target_is_one_clear_line(tmp_path: Path, remove: str, message: str) -> None:
    target = build_target(tmp_path / "target")
    (target / remove).unlink()
    with pytest.raises(ConfigError) as caught:
        Setting(tmp_path, target).run()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_target_with_missing_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    target = build_target(tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights are missing .*first 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        Setting(tmp_path, target).run()
