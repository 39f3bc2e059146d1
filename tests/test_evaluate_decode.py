"""Speculative decoding: written is the target's, whatever the drafter; accepted is what training says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models
import train_data
import train_reference
from eyas.engine.trunk import Taps, examine
from eyas.errors import ConfigError
from eyas.evaluate.choice import Drafted, Greedy, Sampled, choice_of
from eyas.evaluate.decode import Decoded, Target, decode, decode_plainly
from eyas.evaluate.drafter import Drafter
from eyas.evaluate.offline import NotKept, look
from eyas.model import checkpoint as engine_layout
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.shape import DraftShape
from eyas.model.vocab_map import VocabMap
from eyas.target.head import HeadTensors
from eyas.target.structure import LogitMap, find
from eyas.train.attention import Plain
from eyas.train.drafts import find_draft
from eyas.train.loader import batch_of
from eyas.train.metrics import Tally
from eyas.train.step import Pass
from eyas.train.teacher import TargetTeacher
from eyas.train.ttt import DraftWeights, Options, plan_rows, ttt

CPU = torch.device("cpu")
AUX = (1, 2, 3)


def target_of(model: Any, aux_layers: tuple[int, ...] = AUX) -> Target:
    structure = find(model)
    taps = Taps(structure, aux_layers)
    with torch.inference_mode():
        taps.changed_in_place = examine(structure, CPU)
    return Target(structure, taps, aux_layers)


def random_drafter(
    vocab_size: int, draft_vocab_size: int, *, dtype: torch.dtype, seed: int = 0, **shape: Any
) -> Drafter:
    shape = {"target_hidden_size": 32, "hidden_size": 32, "max_position_embeddings": 512} | shape
    sizes = train_reference.tiny_shape(vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, **shape)
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size]
    draft = train_reference.random_draft(sizes, seed=seed, dtype=dtype)
    return Drafter(draft, VocabMap.of(ids, vocab_size), dtype, CPU)


@torch.no_grad()
def own_answer(model: Any, prompt: list[int], num_new: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """What transformers itself writes greedily."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=sorted(stops) or None,
        pad_token_id=0,
    )
    return list(out[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def overfit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with answers of its own, and a drafter that knows most of them by heart."""
    base = train_data.make(tmp_path_factory.mktemp("evaluate") / "base", num_samples=10)
    train_data.train_in(
        base, base / "run", "train.epochs=60", "train.warmup=0.1", "train.log_every=100", "train.eval_every=1000",
        "train.learning_rate=1e-2",
    )  # fmt: skip
    return base


def trained(base: Path, dtype: torch.dtype) -> tuple[Any, Eagle3Draft, VocabMap]:
    model = tiny_models.transformers.AutoModelForCausalLM.from_pretrained(base / "target").to(dtype).eval()
    draft, vocab_map, _ = engine_layout.load(find_draft(None, base / "run"), target=base / "target")
    return model, draft.to(dtype), vocab_map


def prompts_of(base: Path) -> list[list[int]]:
    """The first questions of the samples."""
    table = train_data.SampleTable.open(base / "samples.parquet")
    rows = [row for batch in table.batches(["token_ids", "loss_spans"]) for row in batch.to_pylist()]
    return [row["token_ids"][: row["loss_spans"][0]] for row in rows]


# -- greedy ------------------------------------------------------------------------------------------------------------

FAMILIES = ["llama", "llama_tied", "qwen3", "mistral", "gemma2", "gemma3", "granite", "deepseek_v3", "gpt2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own_with_a_bad_drafter(family: str) -> None:
    model = tiny_models.build(family, initializer_range=0.5)
    target = target_of(model)
    drafter = random_drafter(301, 100, dtype=torch.float32)
    prompt = tiny_models.token_ids(12)
    wanted = own_answer(model, prompt, 24)
    for k in (1, 4):
        found = decode(target, drafter, prompt, num_draft_tokens=k, max_new_tokens=24, choice=Greedy())
        assert list(found.token_ids) == wanted, k
        assert found.cut and sum(v.num_written for v in found.verifications) == 23
    plain = decode_plainly(target, prompt, max_new_tokens=24, choice=Greedy())
    assert list(plain.token_ids) == wanted and plain.num_forwards == 24


def test_greedy_output_is_the_targets_own_with_a_good_drafter(overfit: Path) -> None:
    """Chains are kept whole, in part and not at all, and each k of them writes the same."""
    model, draft, vocab_map = trained(overfit, torch.float32)
    target, drafter = target_of(model, draft.shape.aux_layers), Drafter(draft, vocab_map, torch.float32, CPU)
    kept: set[int] = set()
    for prompt in prompts_of(overfit)[:6]:
        wanted = own_answer(model, prompt, 20)
        for k in (1, 2, 3, 7):
            found = decode(target, drafter, prompt, num_draft_tokens=k, max_new_tokens=20, choice=Greedy())
            assert list(found.token_ids) == wanted
            assert found.num_forwards == len(found.verifications) + 1
            if k == 3:
                kept |= {v.num_accepted for v in found.verifications}
    assert {0, 3} <= kept


def test_an_answer_ends_with_the_first_stop_token_wherever_it_stands_in_a_chain(overfit: Path) -> None:
    model, draft, vocab_map = trained(overfit, torch.float32)
    target, drafter = target_of(model, draft.shape.aux_layers), Drafter(draft, vocab_map, torch.float32, CPU)
    prompt = prompts_of(overfit)[0]
    whole = own_answer(model, prompt, 20)
    for stop in dict.fromkeys(whole):
        found = decode(
            target, drafter, prompt, num_draft_tokens=4, max_new_tokens=20, choice=Greedy(), stop_ids=frozenset({stop})
        )
        assert list(found.token_ids) == whole[: whole.index(stop) + 1]
        assert not found.cut
    found = decode(target, drafter, prompt, num_draft_tokens=4, max_new_tokens=7, choice=Greedy())
    assert list(found.token_ids) == whole[:7] and found.cut


def test_a_target_that_cannot_take_back_a_token_is_refused() -> None:
    model = tiny_models.build("llama")
    model.model.config.layer_types = ["linear_attention"] * 4
    with pytest.raises(ConfigError, match="linear_attention"):
        target_of(model)


# -- what is drafted ---------------------------------------------------------------------------------------------------

SHAPES = {
    "one layer": {},
    "three layers, own width": {"num_layers": 3, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1},
    "EAGLE-3.1": {"norm_aux": True, "carry_normed": True},
    "two layers, normed": {"num_layers": 2, "carry_normed": True, "num_kv_heads": 4},
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_chain_computes_what_training_time_test_computes_at_its_row(name: str) -> None:
    """Logits of every step at every row, float64: rows taken in one by one and several at a time."""
    shape: DraftShape = train_reference.tiny_shape(draft_vocab_size=40, **SHAPES[name])
    draft, steps, num_tokens = train_reference.random_draft(shape), 4, 14
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, shape.vocab_size, (num_tokens,), generator=generator)
    aux = torch.randn(shape.num_aux, num_tokens, shape.target_hidden_size, generator=generator).double()
    rows = plan_rows(torch.ones(num_tokens, dtype=torch.bool), [0, num_tokens], num_steps=steps, rule="drafted")
    weights = DraftWeights.of(draft, torch.float64)
    with torch.no_grad():
        states = ttt(draft, weights, rows, ids, aux, Options(torch.float64, Plain()))
        wanted = states @ draft.lm_head.weight.t()  # [S, n, D]

    chain = Drafter(draft, VocabMap.full(shape.vocab_size), torch.float64, CPU).begin(num_tokens + steps)
    for start, stop in itertools.pairwise([0, 1, 2, 5, 6, 9]):
        chain.extend(aux[:, start:stop], ids[start + 1 : stop + 1])
        row = stop - 1
        found: list[torch.Tensor] = []

        def choose(logits: torch.Tensor, row: int = row, found: list[torch.Tensor] = found) -> Drafted:
            found.append(logits)
            return Drafted(int(ids[row + 1 + len(found)]))

        chain.draft(steps, choose)
        chain.draft(2, lambda logits: Drafted(0))  # nothing of it stays
        at = rows.rows.tolist().index(row)
        torch.testing.assert_close(torch.stack(found), wanted[:, at], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_what_decoding_accepts_is_what_the_offline_tally_says_of_that_row(overfit: Path, k: int) -> None:
    """Greedy answers as samples, float64: each chain is accepted as far as the row's steps are right, to the token."""
    model, draft, vocab_map = trained(overfit, torch.float64)
    target, drafter = target_of(model, draft.shape.aux_layers), Drafter(draft, vocab_map, torch.float64, CPU)
    norm, head = find(model).norm, model.get_output_embeddings()
    teacher = TargetTeacher(HeadTensors(norm, head.weight.detach(), None, LogitMap()), vocab_map, "post", NotKept())
    run = Pass(draft, Options(torch.float64, Plain()))
    seen = total = 0
    decoded_sums, offline_sums = np.zeros(k), np.zeros(k)
    for prompt in prompts_of(overfit):
        answer = decode(target, drafter, prompt, num_draft_tokens=k, max_new_tokens=24, choice=Greedy())
        ids = [*prompt, *answer.token_ids]
        mask = np.arange(len(ids)) >= len(prompt)
        batch = batch_of([(ids, mask, stored(target, ids))])
        tally = Tally(1, k)
        taught, correct = look(run, teacher, batch, tally, np.zeros(1, np.int64))
        chain = torch.cumprod(correct.int(), 0) * taught.rows.supervised  # [S, n]
        row_of = {row: i for i, row in enumerate(taught.rows.rows.tolist())}
        for verification in answer.verifications:
            if verification.row not in row_of:
                # The last token alone is left there: no drafted token falls into the answer.
                assert verification.row + 2 >= len(ids)
                continue
            here = row_of[verification.row]
            inside = int(taught.rows.supervised[:, here].sum())
            assert min(verification.num_accepted, inside) == int(chain[:, here].sum())
            decoded_sums[: min(verification.num_accepted, inside)] += 1
            offline_sums += chain[:, here].numpy()
            seen += 1
        total += len(answer.verifications)
        assert tally["chain"][0].tolist() == chain.sum(1).tolist()
    assert seen > 0.8 * total
    assert decoded_sums.tolist() == offline_sums.tolist()
    assert 0.1 * seen < offline_sums[0] < seen  # neither all nor nothing


@torch.inference_mode()
def stored(target: Target, ids: list[int]) -> torch.Tensor:
    """`[F, T, H]`: the states of a sequence in one pass, as capture keeps them."""
    with target.taps as hidden:
        last = target.structure.trunk(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
    return torch.stack([*(hidden[k][0] for k in target.aux_layers), last[0]])


# -- drawn -------------------------------------------------------------------------------------------------------------


def surprise(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square in standard deviations above what chance gives; rare cells are put together."""
    expected = probabilities / probabilities.sum() * counts.sum()
    order = np.argsort(expected)
    cells: list[tuple[float, float]] = []
    seen = wanted = 0.0
    for i in order:
        seen, wanted = seen + counts[i], wanted + expected[i]
        if wanted >= 5:
            cells.append((seen, wanted))
            seen = wanted = 0.0
    cells[-1] = (cells[-1][0] + seen, cells[-1][1] + wanted)
    value = sum((a - b) ** 2 / b for a, b in cells)
    free = len(cells) - 1
    return float((value - free) / np.sqrt(2 * free))


def test_drawn_answers_follow_the_targets_distribution_whatever_the_drafter() -> None:
    """Whole answers of three tokens over a vocabulary of five, of which the drafter knows three."""
    model = tiny_models.build(
        "llama", vocab_size=5, num_hidden_layers=2, initializer_range=0.35, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    target = target_of(model, (1, 2))
    drafter = random_drafter(5, 3, dtype=torch.float32, aux_layers=(1, 2))
    prompt, temperature, size = [1, 3, 2], 2.0, 5

    def distribution(tail: tuple[int, ...]) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tail]])).logits[0, -1]
        return np.asarray(torch.softmax(logits.double() / temperature, -1))

    wanted = np.zeros((size, size, size))
    for a in range(size):
        for b in range(size):
            wanted[a, b] = distribution(())[a] * distribution((a,))[b] * distribution((a, b))
    found, accepted = np.zeros_like(wanted), 0
    for seed in range(500):
        answer = decode(
            target, drafter, prompt, num_draft_tokens=2, max_new_tokens=3, choice=Sampled(temperature, seed)
        )
        found[answer.token_ids] += 1
        accepted += sum(v.num_accepted for v in answer.verifications)
    assert accepted > 100  # both ways out of a verification are taken
    assert abs(surprise(found.ravel(), wanted.ravel())) < 3
    assert wanted.ravel().max() < 0.2


@pytest.mark.parametrize("flawed", [False, True])
def test_a_judged_chain_follows_the_target_and_a_flawed_judge_is_found_out(flawed: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 6, generator=generator) * 1.5  # of the target; here alike whatever was drafted before
    draft_logits = torch.randn(2, 4, generator=generator) * 1.5
    target_ids = torch.tensor([0, 2, 3, 5])
    p = torch.softmax(logits.double(), -1).numpy()
    wanted = np.einsum("a,b,c->abc", *p)
    found = np.zeros_like(wanted)
    choice = Sampled(1.0, 5)
    for _ in range(3000):
        drafted = [choice.draft(row) for row in draft_logits]
        kept, behind = (2, choice.first(logits[2])) if flawed else choice.judge(logits, drafted, target_ids)
        tokens = [*(int(target_ids[d.draft_id]) for d in drafted[:kept]), behind]
        while len(tokens) < 3:
            tokens.append(choice.first(logits[len(tokens)]))
        found[tuple(tokens)] += 1
    assert (surprise(found.ravel(), wanted.ravel()) > 20) if flawed else (surprise(found.ravel(), wanted.ravel()) < 3)


def test_the_same_seed_draws_the_same_answer() -> None:
    target, drafter = target_of(tiny_models.build("llama")), random_drafter(301, 100, dtype=torch.float32)

    def answer(seed: int) -> Decoded:
        return decode(target, drafter, [5, 6], num_draft_tokens=3, max_new_tokens=12, choice=Sampled(1.0, seed))

    assert answer(1).token_ids == answer(1).token_ids != answer(2).token_ids


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_gpu_decodes_the_same(temperature: float) -> None:
    """Float32: the answers of both devices, greedy and drawn, and what was accepted on the way."""
    prompt, answers = tiny_models.token_ids(12), []
    for device in ("cpu", "cuda"):
        model = tiny_models.build("llama", initializer_range=0.5).to(device)
        structure = find(model)
        taps = Taps(structure, AUX)
        sizes = train_reference.tiny_shape(
            vocab_size=301, draft_vocab_size=301, target_hidden_size=32, hidden_size=32, max_position_embeddings=512
        )
        draft = train_reference.random_draft(sizes, dtype=torch.float32)
        drafter = Drafter(draft, VocabMap.full(301), torch.float32, torch.device(device))
        choice = choice_of(temperature, 3)
        target = Target(structure, taps, AUX)
        answers.append(decode(target, drafter, prompt, num_draft_tokens=3, max_new_tokens=16, choice=choice))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].verifications == answers[1].verifications
