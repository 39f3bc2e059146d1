"""The drafter and its target in this process, decoding a few prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.doctor.material import Question
from eyas.doctor.serving import Ours
from eyas.engine.hf import HfEngine
from eyas.evaluate.choice import Greedy
from eyas.evaluate.decode import Target, decode
from eyas.evaluate.drafter import Drafter
from eyas.evaluate.prompts import stop_ids
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.vocab_map import VocabMap


@dataclass(frozen=True, slots=True)
class Live:
    target: Target
    drafter: Drafter
    stops: frozenset[int]

    @classmethod
    def load(cls, engine: HfEngine, draft: Eagle3Draft, vocab_map: VocabMap, target: Path) -> Live:
        """`engine` must have been made for the drafter's layers. EngineError or ConfigError where it cannot decode."""
        structure, taps = engine.target()
        asked = Target(structure, taps, draft.shape.aux_layers)
        dtype = structure.embeddings.weight.dtype
        return cls(asked, Drafter(draft, vocab_map, dtype, asked.device), stop_ids(target))  # type: ignore[arg-type]


def decode_questions(live: Live, questions: Sequence[Question], *, chain: int) -> list[Ours]:
    """Each question greedily, by chains of `chain` tokens."""
    found = []
    for question in questions:
        one = decode(
            live.target,
            live.drafter,
            question.prompt.tolist(),
            num_draft_tokens=chain,
            max_new_tokens=question.num_new_tokens,
            choice=Greedy(),
            stop_ids=live.stops,
        )
        accepted = sum(v.num_accepted for v in one.verifications)
        found.append(Ours(one.token_ids, len(one.verifications), accepted))
    return found
