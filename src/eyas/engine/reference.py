"""A server's auxiliary states checked without the server: by the target in this process, or by single layers of it.

Letters: `T` tokens, `H` hidden size.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eyas.config import EngineConfig, TargetConfig
from eyas.errors import ConfigError
from eyas.log import human_bytes
from eyas.records import LAST, CaptureSpec, TokenIds
from eyas.target.files import TargetFiles, open_target, tensor_entries
from eyas.values import median_row_error

logger = logging.getLogger(__name__)

TARGET_BYTES = 4_000_000_000
"""Targets with larger weights are not loaded for a check."""
LAYER_BYTES = 4_000_000_000
NAMED_FROM = 3e-2
"""Relative difference of a layer's output from which it is looked whether it is a neighbouring layer's."""

States = Mapping[int, npt.NDArray[np.float32]]
"""`[T, H]` by hidden-state index."""
Computed = tuple[dict[int, npt.NDArray[np.float32]], npt.NDArray[np.float32] | None]
"""Auxiliary states by index, and the last one as the spec has it."""


class LayerCheck(Protocol):
    """Computes what a sample's hidden states should be."""

    needs_neighbours: bool
    """Whether it needs the state before each auxiliary one."""

    def hidden(self, token_ids: TokenIds, states: States) -> Computed:
        """The auxiliary states `[T, H]` by index, perhaps more, for naming the cause of a difference; and the last one.

        `states` are the captured ones. Empty and None where nothing can be computed.
        """
        ...


def how_checked(files: TargetFiles, engine: EngineConfig) -> str:
    """`target`, `layer` or `off`: what `engine.check_layers` asks for and the target's size allows."""
    if engine.check_layers != "auto":
        return engine.check_layers
    return "target" if sum(e.end - e.start for e in tensor_entries(files).values()) <= TARGET_BYTES else "layer"


def wants_neighbours(files: TargetFiles, engine: EngineConfig) -> bool:
    """Whether the check will need the state before each auxiliary one."""
    return how_checked(files, engine) == "layer"


def layer_check(target: TargetConfig, engine: EngineConfig, spec: CaptureSpec) -> LayerCheck:
    """The check that `engine.check_layers` asks for and the target's size allows; says which one it is."""
    assert target.path is not None
    how = how_checked(open_target(target.path), engine)
    if how == "target":
        logger.info("auxiliary states are checked against the whole target, computed here")
        return _WholeTarget(target, spec)
    if how == "layer":
        logger.info("auxiliary states are checked one decoder layer at a time, computed here")
        return _SingleLayers(target, spec)
    logger.warning("engine.check_layers is off: nothing but the last hidden state is checked")
    return _Nothing()


class LayerChecks:
    """The check of one target's layers, made when it is first needed; several servers may share it."""

    def __init__(self, target: TargetConfig, engine: EngineConfig) -> None:
        self._target, self._engine = target, engine
        self._lock = threading.Lock()
        self._check: LayerCheck | None = None

    def of(self, spec: CaptureSpec) -> LayerCheck:
        """The check; loading it may take long."""
        with self._lock:
            if self._check is None:
                self._check = _OneByOne(layer_check(self._target, self._engine, spec))
            return self._check


class _OneByOne:
    """A check that computes one sample at a time, whichever thread asks: memory is that of one."""

    def __init__(self, check: LayerCheck) -> None:
        self._check, self._lock = check, threading.Lock()
        self.needs_neighbours = check.needs_neighbours

    def hidden(self, token_ids: TokenIds, states: States) -> Computed:
        with self._lock:
            return self._check.hidden(token_ids, states)


class _WholeTarget:
    needs_neighbours = False

    def __init__(self, target: TargetConfig, spec: CaptureSpec) -> None:
        from eyas.engine.hf import HfEngine

        layers = {k + step for k in spec.aux_layers for step in (-1, 0, 1) if 0 <= k + step <= spec.num_layers}
        self._is_pre_norm, self._num_layers = spec.last_hidden_norm == "pre", spec.num_layers
        if self._is_pre_norm:
            layers.add(spec.num_layers)
        config = EngineConfig(kind="hf", dtype="float32", device="cpu")
        self._engine = HfEngine(target, config, tuple(sorted(layers)))

    def hidden(self, token_ids: TokenIds, states: States) -> Computed:
        found = self._engine.states(token_ids)
        last = found.pop(LAST)
        hidden = {int(name.removeprefix("hidden.")): values for name, values in found.items()}
        return hidden, hidden[self._num_layers] if self._is_pre_norm else last


class _SingleLayers:
    needs_neighbours = True

    def __init__(self, target: TargetConfig, spec: CaptureSpec) -> None:
        from eyas.target.layer import TargetLayers

        assert target.path is not None
        self._layers = TargetLayers(target.path, trust_remote_code=target.trust_remote_code)
        self._spec = spec
        self._unable: set[int] = set()

    def hidden(self, token_ids: TokenIds, states: States) -> Computed:
        found = {}
        for k in self._spec.aux_layers:
            if k - 1 not in states or k in self._unable:
                continue
            try:
                num_bytes = self._layers.layer_bytes(k)
                if num_bytes > LAYER_BYTES:
                    raise ConfigError(f"decoder layer {k - 1} has {human_bytes(num_bytes)} of weights")
                found[k] = self._layers.hidden_after(k, states[k - 1])
                if k not in states or median_row_error(states[k], found[k]) <= NAMED_FROM:
                    continue
                # Whose output is it, then? Numbers that are off by one are off for the layer before, too.
                for other in (k - 1, k + 1):
                    if 1 <= other <= self._spec.num_layers and other not in self._spec.aux_layers:
                        found[other] = self._layers.hidden_after(other, states[k - 1])
            except ConfigError as error:
                self._unable.add(k)
                logger.warning("hidden state %d is not checked: %s", k, error)
        return found, None


class _Nothing:
    needs_neighbours = False

    def hidden(self, token_ids: TokenIds, states: States) -> Computed:
        return {}, None
