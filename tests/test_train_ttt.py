"""Training-time test: the fast form against the definition, values and gradients; packed against separate."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_reference as reference
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.shape import DraftShape
from eyas.train.attention import Plain, causal_for
from eyas.train.loss import Outcome, Teacher, argmax_of, ttt_loss, valid_rows
from eyas.train.ttt import DraftWeights, MaskRule, Options, plan_rows, ttt

Document = tuple[list[int], np.ndarray, torch.Tensor, torch.Tensor]


def documents_of(shape: DraftShape, masks: list[str], *, seed: int = 0) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for text in masks:
        mask = np.array([c == "1" for c in text])
        ids = torch.randint(0, shape.vocab_size, (len(mask),), generator=generator).tolist()
        aux = torch.randn(len(mask), shape.num_aux, shape.target_hidden_size, generator=generator).double()
        last = torch.randn(len(mask), shape.target_hidden_size, generator=generator).double()
        made.append((ids, mask, aux, last))
    return made


def head_of(shape: DraftShape, *, seed: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's head `[V, Ht]`, and the target ids of the draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(shape.vocab_size, shape.target_hidden_size, generator=generator).double()
    ids = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    return head, ids


def fast(
    draft: Eagle3Draft,
    documents: list[Document],
    head: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    num_steps: int,
    rule: MaskRule,
    options: Options | None = None,
    device: str = "cpu",
) -> tuple[torch.Tensor, Outcome, torch.Tensor]:
    options = options or Options(dtype=torch.float64, causal=Plain())
    bounds = [0, *itertools.accumulate(len(d[0]) for d in documents)]
    mask = torch.from_numpy(np.concatenate([d[1] for d in documents])).to(device)
    ids = torch.tensor([i for d in documents for i in d[0]], device=device)
    aux = torch.cat([d[2] for d in documents]).transpose(0, 1).to(options.dtype)
    last = torch.cat([d[3] for d in documents]).to(options.dtype)
    rows = plan_rows(mask, bounds, num_steps=num_steps, rule=rule)
    weights = DraftWeights.of(draft, options.dtype)
    states = ttt(draft, weights, rows, ids, aux, options)
    asked = last[rows.teacher_rows]
    best = argmax_of(asked, head.to(options.dtype), None, lambda x: x)
    draft_ids = torch.full((len(head),), -1, device=device)
    draft_ids[target_ids] = torch.arange(len(target_ids), device=device)
    teacher = Teacher(asked, head[target_ids].to(options.dtype), None, lambda x: x, draft_ids[best])
    valid = valid_rows(rows.supervised, rows.teacher, teacher.best)
    weight = 0.8 ** torch.arange(num_steps, dtype=torch.float64, device=device) / valid.sum(1).clamp(min=1)
    loss, outcome = ttt_loss(
        states,
        weights.lm_head,
        teacher,
        rows.teacher,
        valid,
        weight.to(torch.float32 if options.dtype == torch.bfloat16 else options.dtype),
    )
    return loss, outcome, rows.supervised


def gradients(draft: Eagle3Draft, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    draft.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None}


SHAPES = {
    "one layer": reference.tiny_shape(),
    "two layers": reference.tiny_shape(num_layers=2),
    "three layers, own width": reference.tiny_shape(num_layers=3, hidden_size=8, num_heads=2, num_kv_heads=1),
    "one auxiliary layer": reference.tiny_shape(aux_layers=(2,)),
    "five auxiliary layers": reference.tiny_shape(aux_layers=(0, 1, 2, 3, 4)),
    "normed": reference.tiny_shape(norm_aux=True, carry_normed=True),
    "full vocabulary": reference.tiny_shape(draft_vocab_size=40),
}
MASKS = ["0001111100", "00111011110111", "11", "1111111", "000", "0000011", "01110"]


@pytest.mark.parametrize("rule", ["drafted", "usual"])
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_those_of_the_definition(name: str, rule: MaskRule) -> None:
    shape = SHAPES[name]
    draft = reference.random_draft(shape)
    documents = documents_of(shape, MASKS)
    head, target_ids = head_of(shape)
    expected, num_supervised, num_valid, num_correct = reference.loss(
        draft, documents, head, target_ids, num_steps=4, rule=rule
    )
    slow = gradients(draft, expected)
    loss, outcome, supervised = fast(draft, documents, head, target_ids, num_steps=4, rule=rule)
    assert supervised.sum(1).tolist() == num_supervised.tolist()
    assert outcome.valid.sum(1).tolist() == num_valid.tolist()
    assert (outcome.correct & outcome.valid).sum(1).tolist() == num_correct.tolist()
    assert num_valid.min() > 0
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    found = gradients(draft, loss)
    assert found.keys() == slow.keys()
    for weight, gradient in slow.items():
        torch.testing.assert_close(found[weight], gradient, rtol=1e-9, atol=1e-12, msg=lambda m, w=weight: f"{w}: {m}")
        assert gradient.abs().max() > 0, weight


def test_float32_is_the_definition_to_rounding() -> None:
    shape = SHAPES["one layer"]
    draft = reference.random_draft(shape)
    documents, (head, target_ids) = documents_of(shape, MASKS), head_of(shape)
    expected = reference.loss(draft, documents, head, target_ids, num_steps=4, rule="drafted")[0]
    slow = gradients(draft, expected)
    draft.float()
    options = Options(dtype=torch.float32, causal=Plain())
    loss, _, _ = fast(draft, documents, head, target_ids, num_steps=4, rule="drafted", options=options)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for weight, gradient in gradients(draft, loss).items():
        torch.testing.assert_close(gradient.double(), slow[weight], rtol=1e-4, atol=1e-5)


@given(
    masks=st.lists(st.text("01", min_size=1, max_size=12), min_size=1, max_size=5),
    rule=st.sampled_from(["drafted", "usual"]),
    num_steps=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_packed_equals_separate(masks: list[str], rule: MaskRule, num_steps: int) -> None:
    """Each document's losses, whatever stands beside it in the pack."""
    shape = SHAPES["one layer"]
    draft = reference.random_draft(shape)
    documents, (head, target_ids) = documents_of(shape, masks), head_of(shape)
    _, together, _ = fast(draft, documents, head, target_ids, num_steps=num_steps, rule=rule)
    alone = [fast(draft, [d], head, target_ids, num_steps=num_steps, rule=rule)[1] for d in documents]
    for name in ("loss", "valid", "correct"):
        whole, parts = getattr(together, name), torch.cat([getattr(o, name) for o in alone], dim=1)
        torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-12)


@given(text=st.text("01", min_size=1, max_size=14), num_steps=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_rows_follow_the_rule_word_by_word(text: str, num_steps: int) -> None:
    mask = np.array([c == "1" for c in text])
    for rule in ("drafted", "usual"):
        rows = plan_rows(torch.from_numpy(mask), [0, len(mask)], num_steps=num_steps, rule=rule)
        expected = {
            (s, t) for s in range(num_steps) for t in range(len(mask)) if reference.supervised(mask, t, s, rule)
        }
        found = {(s, int(rows.rows[i])) for s, i in rows.supervised.nonzero().tolist()}
        assert found == expected
        for s, i in rows.supervised.nonzero().tolist():
            t = int(rows.rows[i])
            assert int(rows.read[s, i]) == t + 1 + s == int(rows.teacher_rows[rows.teacher[s, i]])
        assert set(rows.rows.tolist()) == {t for _, t in expected}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=["float32", "bfloat16"]
)
def test_a_gpu_computes_the_same(compiled: bool, recompute: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Kernels, flash attention and fused pieces against float64 on the CPU; three heads share a key."""
    shape = reference.tiny_shape(
        target_hidden_size=96, hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=32, intermediate_size=64,
        vocab_size=400, draft_vocab_size=300, max_position_embeddings=512,
    )  # fmt: skip
    draft = reference.random_draft(shape)
    masks = ["0" * 30 + "1" * 60 + "0" * 11 + "1" * 40, "1" * 77, "000", "0" * 9 + "1" * 120]
    documents, (head, target_ids) = documents_of(shape, masks), head_of(shape)
    expected, _, _ = fast(draft, documents, head, target_ids, num_steps=5, rule="drafted")
    exact = gradients(draft, expected)
    draft.float().cuda()
    documents = [(ids, mask, aux.cuda(), last.cuda()) for ids, mask, aux, last in documents]
    options = Options(dtype, causal_for(torch.device("cuda"), dtype), compiled, recompute)
    loss, _, _ = fast(
        draft, documents, head.cuda(), target_ids.cuda(), num_steps=5, rule="drafted", options=options, device="cuda"
    )
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=tolerance, atol=0)
    for weight, gradient in gradients(draft, loss).items():
        error = (gradient.cpu().double() - exact[weight]).norm() / exact[weight].norm()
        assert error < tolerance * 3, weight


def test_recomputing_changes_nothing() -> None:
    shape = SHAPES["two layers"]
    draft = reference.random_draft(shape)
    documents, (head, target_ids) = documents_of(shape, MASKS), head_of(shape)
    found = []
    for recompute in (False, True):
        options = Options(dtype=torch.float64, causal=Plain(), recompute=recompute)
        loss, _, _ = fast(draft, documents, head, target_ids, num_steps=4, rule="drafted", options=options)
        found.append((loss, gradients(draft, loss)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_long_documents_are_scored_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.train import attention
    from eyas.train import loss as loss_module

    shape = SHAPES["one layer"]
    draft = reference.random_draft(shape)
    documents, (head, target_ids) = documents_of(shape, ["0" * 5 + "1" * 30, "1" * 9]), head_of(shape)
    whole = fast(draft, documents, head, target_ids, num_steps=3, rule="drafted")[0]
    expected = gradients(draft, whole)
    monkeypatch.setattr(attention, "BLOCK", 4)
    monkeypatch.setattr(loss_module, "BLOCK", {"cpu": 7})
    monkeypatch.setattr(loss_module, "ARGMAX_BLOCK", {"cpu": 5})
    pieces = fast(draft, documents, head, target_ids, num_steps=3, rule="drafted")[0]
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(draft, pieces), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("masks", [["000", "0"], ["1"], ["11"]])
def test_a_pack_without_a_supervised_row_costs_and_teaches_nothing(masks: list[str]) -> None:
    shape = SHAPES["one layer"]
    draft = reference.random_draft(shape)
    documents, (head, target_ids) = documents_of(shape, masks), head_of(shape)
    loss, outcome, _ = fast(draft, documents, head, target_ids, num_steps=3, rule="drafted")
    assert loss.item() == 0 and outcome.valid.sum() == 0
    assert all(g.abs().max() == 0 for g in gradients(draft, loss).values())
