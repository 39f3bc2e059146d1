"""A vLLM server that somebody started with vLLM's own connector: asked and collected from as it is.

It does not say which layers it extracts; that is told, and the probe decides whether it is so.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from eyas.config import TargetConfig
from eyas.engine import room, staged
from eyas.engine.dialect import needs_certificates
from eyas.engine.pickup import Pickup
from eyas.engine.staged import INFO_KEY, ITEM_BYTES, RequestName, StagedError
from eyas.engine.vllm.arguments import WHOLE_SINCE, is_whole
from eyas.engine.vllm.server import FIRST_PATIENCE_S, STOCK_PATH, Vllm
from eyas.engine.vllm.stock_files import NORM, Shape, StockFiles, first_shape
from eyas.errors import ConfigError, EngineError, EngineUnavailable
from eyas.records import LAST
from eyas.target.files import open_target

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 10**9
"""Left free where the server writes."""
_PREFIX_CACHING = re.compile(r"^vllm:cache_config_info\{[^}]*enable_prefix_caching=\"(\w+)\"", re.MULTILINE)
_UNPROTECTED = (
    "the server at %s has vLLM's own connector: no digest across the writing (the first one is made of what is read "
    "here), no quota at the server (only this client's reservation bounds what lies in %s), failed writes told in its "
    "log alone, and what a killed client left stays there; 'eyas serve' starts one without these gaps"
)


class StockVllm(Vllm):
    """See `engine.dialect.Dialect`; the layers of its servers are told by `engine.stock_layers`."""

    settings = ("dtype", "connector", "extracted")

    def __init__(self, target: TargetConfig, extracted: tuple[int, ...], aux_layers: tuple[int, ...] | None) -> None:
        """Raises ConfigError where what is told cannot be."""
        if target.path is None:
            raise ConfigError("target.path is not set: the directory of the model that the server serves")
        config = open_target(target.path).text_config
        self._num_layers, self._vocab_size = int(config["num_hidden_layers"]), int(config["vocab_size"])
        self._extracted = extracted
        aux = tuple(k for k in extracted if k != self._num_layers) if aux_layers is None else aux_layers
        if list(extracted) != sorted(set(extracted)) or not {*aux, self._num_layers} <= set(extracted):
            raise ConfigError(
                f"engine.stock_layers is {list(extracted)}; it must ascend and hold capture.aux_layers "
                f"{list(aux)} and {self._num_layers}, the number of layers, for the last state"
            )
        if not aux:
            raise ConfigError(f"engine.stock_layers is {list(extracted)}: no auxiliary layer is among them")
        self._aux = aux
        self._slot = {k: slot for slot, k in enumerate(extracted)}
        self._has_said = False

    def said(self, told: Mapping[str, Any]) -> dict[str, Any] | None:
        path = told.get(STOCK_PATH)
        if isinstance(path, str):
            return {"path": path}
        if INFO_KEY in told:
            why = "the server has our own connector: leave engine.stock_layers out"
            return {"error": why, "reason": staged.NO_DIRECTORY}
        return None

    def pickup(self, run: staged.Run) -> Pickup:
        """As `engine.pickup.OwnPickup`."""
        return StockFiles(run, self._slots, len(self._extracted))

    def find_out(self, url: str, name: RequestName, said: Mapping[str, Any]) -> dict[str, Any]:
        """As `engine.dialect.FindsOut`: from the file of one token that the server has written."""
        if "error" in said:
            raise ConfigError(f"{url}: {said['error']}")
        path = Path(str(said.get("path", "")))
        if str(name) not in path.name or not path.is_absolute():
            raise EngineError(
                f"the server at {url} cannot be captured from: it answers without a file of hidden states of its own "
                f"for each request ({path}); start it as docs/engines.md says",
                engine=self.engine,
            )
        shape, uid = self._first(url, path)
        if shape.num_layers != len(self._extracted):
            raise ConfigError(
                f"engine.stock_layers is {list(self._extracted)}, the server at {url} extracts {shape.num_layers} "
                "layers: set it to its eagle_aux_hidden_state_layer_ids, ascending"
            )
        told = self._told(url)
        if not self._has_said:
            self._has_said = True
            logger.warning(_UNPROTECTED, url, path.parent)
        return told | self._room(path.parent, shape, told["max_tokens"]) | {
            "quantization": "none",  # it does not say; the probe compares with the target's files
            "num_layers": self._num_layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": self._vocab_size,
            "dtype": shape.dtype,
            "aux_layers": list(self._aux),
            "extracted": list(self._extracted),
            "connector": "ExampleHiddenStatesConnector",
            "neighbours": all(k - 1 in self._slot for k in self._aux if k > 1),
            "last_hidden_norm": NORM,
            "tp_size": 1,  # its first rank alone writes
            "staging": str(path.parent),
            "host": socket.gethostname(),
            "uid": uid,
        }  # fmt: skip

    def _first(self, url: str, path: Path) -> tuple[Shape, int]:
        """The shape of a first file, and whose it is."""
        if not path.parent.is_dir():
            raise EngineError(
                f"the server at {url} writes into {path.parent}, which does not exist here: client and server must "
                "share that directory (its shared_storage_path)",
                engine=self.engine,
            )
        try:
            uid = path.with_name(path.name + ".lock").stat().st_uid
            return first_shape(path, FIRST_PATIENCE_S), uid
        except PermissionError as error:
            raise EngineError(
                f"{error.filename}: {error.strerror}: states must be read and removed here: run client and server as "
                "one user",
                engine=self.engine,
            ) from None
        except (StagedError, OSError) as error:
            raise EngineError(f"the server at {url} cannot be captured from: {error}", engine=self.engine) from None

    def _told(self, url: str) -> dict[str, Any]:
        """Version, model and longest prompt, as any vLLM server tells them."""
        try:
            with httpx.Client(base_url=url, timeout=30.0, verify=needs_certificates(url), trust_env=False) as client:
                version = str(client.get("/version").json()["version"])
                model = client.get("/v1/models").json()["data"][0]
                caching = _PREFIX_CACHING.search(client.get("/metrics").text)
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"the server at {url} is gone ({type(error).__name__})", engine=self.engine
            ) from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise EngineError(
                f"the server at {url} does not tell its version and its model", engine=self.engine
            ) from None
        if not is_whole(version) and caching is not None and caching[1] == "True":
            raise EngineError(
                f"the server at {url} is vLLM {version} with prefix caching, which has given too few rows before "
                f"{WHOLE_SINCE}: start it with --no-enable-prefix-caching",
                engine=self.engine,
            )
        longest = int(model.get("max_model_len") or 0) or 1 << 31
        return {"vllm": version, "model_path": str(model.get("root", "")), "max_tokens": longest - 1}

    def _room(self, directory: Path, shape: Shape, max_tokens: int) -> dict[str, Any]:
        """What this client allows itself, since the server has no quota, in bytes of what is captured.

        Half of what is free; a file holds every extracted layer, captured or not.
        """
        free = room.free_bytes(directory)
        token_bytes = shape.num_layers * shape.hidden_size * ITEM_BYTES[shape.dtype] + 8
        own_bytes = (len(self._aux) + 1) * shape.hidden_size * ITEM_BYTES[shape.dtype] + 4
        limit = max(0, free - MIN_FREE_BYTES) // 2
        told = {"limit": limit * own_bytes // token_bytes, "staged": 0, "free": free, "min_free": MIN_FREE_BYTES}
        return {"room": told, "max_tokens": min(max_tokens, limit // token_bytes)}

    def _slots(self, name: RequestName) -> dict[str, int]:
        """Which slot of a file holds which field of a request."""
        layers = dict.fromkeys(self._aux)
        if staged.NEIGHBOURS in name.flags:
            layers |= dict.fromkeys(k - 1 for k in self._aux if k > 1)
        return {f"hidden.{k}": self._slot[k] for k in layers} | {LAST: self._slot[self._num_layers]}
