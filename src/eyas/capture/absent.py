"""An engine that is not there: enough for a data set in which nothing is left to capture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eyas.config import TargetConfig
from eyas.engine.base import CaptureAnswer, CaptureFailure, EngineInfo, RequestSource
from eyas.errors import EngineGone, EngineUnavailable
from eyas.store import manifest
from eyas.store import record as records
from eyas.store.layout import Layout
from eyas.store.writer import read_head
from eyas.target.files import target_digest


class AbsentEngine:
    """Says what the engine said that made a data set, and whatever it is asked for, why it is not there."""

    def __init__(
        self, out: Path, target: TargetConfig, aux_layers: tuple[int, ...] | None, why: EngineUnavailable
    ) -> None:
        """Raises `why` where `out` holds nothing yet, or was made of another target or other layers."""
        self._why = why
        layout = Layout(out)
        if not layout.head.exists() or target.path is None:
            raise why
        spec = read_head(layout.head)
        if spec.target_digest != target_digest(target.path) or aux_layers not in (None, spec.aux_layers):
            raise why
        entries = manifest.summaries(layout, spec)
        if not entries:
            raise why
        latest = max(entries, key=lambda entry: entry.committed_at)
        made_by = records.read(layout.record(latest.shard_id)).provenance
        self._info = EngineInfo(spec, made_by, max_tokens=np.iinfo(np.int32).max)

    def info(self) -> EngineInfo:
        """As of the latest commit."""
        return self._info

    def capture(self, source: RequestSource) -> Iterator[CaptureAnswer | CaptureFailure]:
        """Raises EngineGone: what is left to capture needs the engine itself."""
        raise EngineGone(str(self._why), engine=self._why.engine)

    def close(self) -> None:
        """Nothing to be done."""
