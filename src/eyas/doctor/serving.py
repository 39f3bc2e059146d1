"""What a server does, against what the checkpoint, the samples and decoding in this process say it should.

So "the drafter is bad" is told from "it is served wrongly": the same token ids go both ways.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.doctor.bench import NUM_RESAMPLES, Outcome, interval
from eyas.doctor.findings import Finding, broken, ok, unknown
from eyas.doctor.paper import Paper
from eyas.doctor.server import Served
from eyas.errors import EyasError
from eyas.evaluate.counters import Acceptance
from eyas.records import digest_bytes
from eyas.target.files import open_target, quantisation, target_digest

MIN_VERIFICATIONS = 30
"""Fewer say nothing about an acceptance of exactly nothing."""
LESS = 0.9
"""The server may accept a tenth less than decoding here: near-ties of 16-bit arithmetic, other prompts' batches."""
MIN_PROMPTS = 4
SAME_ANSWERS = 0.5
"""Share of the answers whose beginning must be the same: below it, another target answers."""
BEGINNING = 4
"""Tokens of a beginning."""
ADVICE = {
    "sglang": "--speculative-algorithm EAGLE3 --speculative-draft-model-path DIR",
    "vllm": """--speculative-config '{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3}'""",
}
"""With what an engine must be started."""


@dataclass(frozen=True, slots=True)
class Ours:
    """One prompt, decoded in this process."""

    token_ids: tuple[int, ...]
    verifications: int
    accepted: int


def judge_decoding(promised: Outcome, decoded: Sequence[Ours], chain: int) -> Finding:
    """Decoding in this process against what the stored states of the same samples promise."""
    value, low, high = (1 + x for x in interval(promised.accepted, promised.rows))
    accepted = np.array([o.accepted for o in decoded], dtype=np.float64)
    verifications = np.array([o.verifications for o in decoded], dtype=np.float64)
    now, now_low, now_high = (1 + x for x in interval(accepted, verifications))
    numbers: dict[str, Any] = {
        "promised": [value, low, high],
        "decoded": [now, now_low, now_high],
        "prompts": len(decoded),
        "verifications": int(verifications.sum()),
        "num_draft_tokens": chain,
    }
    text = (
        f"acceptance length {now:.2f} [{now_low:.2f}, {now_high:.2f}] on {len(decoded)} prompts, the stored states of "
        f"the same samples promise {value:.2f} [{low:.2f}, {high:.2f}] (chains of {chain})"
    )
    if not verifications.sum():
        return unknown("decoding", "every answer ended with its first token", **numbers)
    if len(decoded) >= MIN_PROMPTS and now_high < low and value - now > max(0.05, 0.2 * (value - 1)):
        return broken(
            "decoding",
            f"{text}",
            "the stored states are not what the target computes now: capture again with the engine and dtype that "
            "serve",
            **numbers,
        )
    return ok("decoding", text, **numbers)


def length_of(decoded: Sequence[Ours]) -> float | None:
    """Acceptance length, pooled; None where nothing was verified."""
    verifications = sum(o.verifications for o in decoded)
    return 1 + sum(o.accepted for o in decoded) / verifications if verifications else None


def judge_engine(served: Served, ours_length: float | None) -> Finding:
    """Does the server speculate at all, and with EAGLE-3?"""
    about, found = served.about, served.acceptance
    verifications, accepted = (found.verifications, found.accepted_tokens) if found is not None else (0, 0)
    numbers: dict[str, Any] = {
        "kind": about.engine,
        "version": about.version,
        "algorithm": about.speculation,
        "verifications": verifications,
        "accepted": accepted,
    }
    who = f"{about.engine} {about.version}".strip()
    do = f"start it with {ADVICE[about.engine]}"
    if not about.speculation and found is None:
        return broken("engine", f"{who} serves without speculative decoding", do, **numbers)
    if about.engine == "sglang" and about.speculation.upper() != "EAGLE3":
        return broken(
            "engine",
            f"{who} runs --speculative-algorithm {about.speculation}: an EAGLE-3 drafter needs EAGLE3 (with EAGLE "
            "nothing is accepted, without an error)",
            do,
            **numbers,
        )
    if not served.answers:
        return unknown("engine", f"{who}: {served.failure or 'no prompt was sent'}", **numbers)
    if not verifications:
        why = _not_counted(served)
        return unknown("engine", f"{who} counted no verification of {len(served.answers)} answers{why}", **numbers)
    told = f"{who}, {about.speculation}"
    if accepted == 0 and verifications >= MIN_VERIFICATIONS and (ours_length or 0.0) > 1.1:
        return broken(
            "engine",
            f"{told}: acceptance length is exactly 1.00 over {verifications} verifications, decoding here gives "
            f"{ours_length:.2f}: the drafter gets no auxiliary states, or another method or drafter runs there",
            f"{do}, where DIR is this checkpoint",
            **numbers,
        )
    return ok("engine", f"{told}, {verifications} verifications on {len(served.answers)} prompts", **numbers)


def _not_counted(served: Served) -> str:
    """Why the acceptance of some answers is not known, where that is known."""
    if not served.foreign_tokens:
        return ""
    return (
        f"; its counters also saw {served.foreign_tokens} tokens of other requests: ask a server that nobody else uses"
    )


def judge_served(
    served: Served, paper: Paper, target: Path, digest: str, quantised: str, ours: Sequence[Ours]
) -> Finding:
    """Has the server these weights? By its own paths where they can be read here, and by what it answers."""
    said: list[str] = []
    about = served.about
    numbers: dict[str, Any] = {"model": about.model_path, "draft": about.draft_path, "quantisation": about.quantisation}
    if about.quantisation and about.quantisation.lower() not in (quantised.lower(), "none"):
        return broken(
            "served",
            f"the server quantises the target ({about.quantisation}), captured was {quantised}",
            "capture from the target as it is served, or serve it as it was captured",
            **numbers,
        )
    there = Path(about.model_path)
    if about.model_path and (there / "config.json").is_file():
        try:
            other, how = target_digest(there), quantisation(open_target(there).config)
        except EyasError as error:
            return unknown("served", f"the server's target {there} cannot be read: {error}", **numbers)
        numbers["target_digest"] = other
        if other != digest or how != quantised:
            return broken(
                "served",
                f"the server's target {there} has digest {other[:12]}… ({how}), target.path {digest[:12]}… "
                f"({quantised})",
                "serve the target that was captured",
                **numbers,
            )
        said.append("target of the same digest")
    if about.draft_path and (Path(about.draft_path) / "config.json").is_file():
        found = _differences(paper, Path(about.draft_path))
        if found:
            return broken(
                "served",
                f"the server's drafter {about.draft_path} is another one: {found}",
                f"start it with {paper.directory}",
                **numbers,
            )
        said.append("drafter of the same bytes")
    same = [
        a.token_ids[:BEGINNING] == o.token_ids[:BEGINNING]
        for a, o in zip(served.answers, ours, strict=False)
        if a.token_ids and o.token_ids
    ]
    if same:
        numbers["same_beginnings"] = [sum(same), len(same)]
        if len(same) >= MIN_PROMPTS and sum(same) < SAME_ANSWERS * len(same):
            return broken(
                "served",
                f"only {sum(same)} of {len(same)} answers begin as the target's own greedy ones: another target or "
                "another quantisation answers there",
                "serve the target that was captured",
                **numbers,
            )
        said.append(f"{sum(same)} of {len(same)} greedy answers begin as decoding here does")
    if not said:
        return unknown("served", "its paths cannot be read from here, and there are no answers to compare", **numbers)
    return ok("served", "; ".join(said), **numbers)


def judge_tokens(pairs: Sequence[tuple[list[int], list[int]]], failure: str) -> Finding:
    """The server's token ids of some conversations beside those that training had. `failure`: why there are none."""
    if not pairs:
        return unknown("tokens", failure or "no conversation to send: data.sources has none with messages")
    wrong = [(mine, theirs) for mine, theirs in pairs if mine != theirs]
    numbers: dict[str, Any] = {"conversations": len(pairs), "differ": len(wrong)}
    if not wrong:
        return ok("tokens", f"{len(pairs)} conversations become the same token ids there", **numbers)
    mine, theirs = wrong[0]
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    how = "a doubled first token" if theirs[:1] == theirs[1:2] and theirs[1:] == mine else f"first at token {at}"
    return broken(
        "tokens",
        f"{len(wrong)} of {len(pairs)} conversations become other token ids there: {how} ({len(mine)} tokens in "
        f"training, {len(theirs)} there)",
        "serve with the chat template, its options and the tokeniser that the samples were made with",
        **numbers,
    )


def judge_serving(served: Served, ours: Sequence[Ours], chain: int) -> Finding:
    """The server's acceptance length against decoding here, on the same token ids, prompt by prompt."""
    if served.acceptance is None or not served.acceptance.verifications or not ours:
        why = f"no counters to compare{_not_counted(served)}" if ours else "nothing was decoded here to compare with"
        return unknown("serving", why)
    pairs = [(a, o) for a, o in zip(served.told, ours, strict=False) if a is not None]
    theirs = np.array([[a.accepted_tokens, a.verifications] for a, _ in pairs], dtype=np.float64)
    mine = np.array([[_counted_as(a, o), o.verifications] for a, o in pairs], dtype=np.float64)
    here, there = 1 + mine[:, 0].sum() / max(1, mine[:, 1].sum()), 1 + theirs[:, 0].sum() / theirs[:, 1].sum()
    _, low, high = interval(theirs[:, 0], theirs[:, 1])
    count = len(pairs)
    drawn = np.random.default_rng(0).integers(count, size=(NUM_RESAMPLES, count))
    a, b = theirs[drawn].sum(axis=1), mine[drawn].sum(axis=1)
    ratio = np.quantile((1 + a[:, 0] / np.maximum(1, a[:, 1])) / (1 + b[:, 0] / np.maximum(1, b[:, 1])), [0.005, 0.995])
    verifications = served.acceptance.verifications
    numbers: dict[str, Any] = {
        "there": there,
        "interval": [1 + low, 1 + high],
        "here": here,
        "prompts": count,
        "ratio": [float(r) for r in ratio],
        "foreign_tokens": served.foreign_tokens,
        "verifications": verifications,
    }
    topk = served.about.topk or 1
    tree = f", a tree of top-k {topk}" if topk > 1 else ""
    text = (
        f"acceptance length {there:.2f} [{1 + low:.2f}, {1 + high:.2f}] there{tree}, {here:.2f} here, chains of "
        f"{chain}, on the same {count} prompts ({verifications} verifications there)"
    )
    if count < MIN_PROMPTS:
        return unknown("serving", f"{text}; {count} prompts are too few{_not_counted(served)}", **numbers)
    if there - 1 < LESS * (here - 1) and ratio[1] < 1 and here - there > 0.05:
        return broken(
            "serving",
            f"the drafter is served wrongly{'' if served.about.draft_path else ', or is another one'}: {text}",
            "compare path, layer ids, rope and dtype of the drafter that the server logs with the checkpoint's; "
            "'eyas export --check' audits what the engine reads",
            **numbers,
        )
    return ok("serving", text, **numbers)


def _counted_as(there: Acceptance, ours: Ours) -> int:
    """What was accepted here, as the server counts: one that tells no drafted tokens has told only verifications, and
    what it accepted behind an answer's end is not known."""
    return ours.accepted if there.drafted_tokens else max(0, len(ours.token_ids) - 1 - ours.verifications)


def _differences(paper: Paper, there: Path) -> str:
    """How the drafter in `there` differs from ours; empty where both are the same bytes."""
    if there.resolve() == paper.directory.resolve():
        return ""
    try:
        other = Paper.read(there)
    except EyasError as error:
        return str(error)
    named = {name: list(ids) for name, ids in other.told_layers().items()}
    own = {name: list(ids) for name, ids in paper.told_layers().items()}
    both = [f"{name} {ids}, here {own[name]}" for name, ids in named.items() if name in own and own[name] != ids]
    if both:
        return "; ".join(both)
    if _weights(other) != _weights(paper):
        return "its weights differ"
    changed = [
        k for k in ("rope_theta", "rope_parameters", "max_position_embeddings") if _said(other, k) != _said(paper, k)
    ]
    return f"its config.json differs in {', '.join(changed)}" if changed else ""


def _weights(paper: Paper) -> str:
    files = sorted(set(paper.files.values()))
    return digest_bytes(*(file.read_bytes() for file in files))


def _said(paper: Paper, key: str) -> Any:
    value: Any = paper.config.get(key)
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value
