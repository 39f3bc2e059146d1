"""A stand-in for an SGLang server with our plugin: a tiny transformers model behind real HTTP and the real stager.

It computes honestly, in batches, in another order than it was asked, and misbehaves as a test's script says. Run as a
program, `stand_in_server.py TARGET STAGING`, it starts processes that serve until they are killed.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import queue
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers

from eyas.engine import staged
from eyas.engine.room import StagingLimits
from eyas.engine.staged import RequestName
from eyas.engine.stager import Stager

torch.set_num_threads(1)
_COMPUTING = threading.Lock()
"""Several stand-ins of one process share a model, and its hooks with it."""


@dataclass
class Asked:
    """One request to capture, as a script sees it."""

    name: RequestName
    ids: list[int]
    logprobs: bool
    nth: int
    """The how-manieth about these token ids, from 1."""


@dataclass
class Act:
    """What a script wants instead of the right answer; what is left out is right."""

    before: Callable[[], object] | None = None
    """Called before anything else; may wait."""
    status: int = 200
    text: str | None = None
    reset: bool = False
    meta: dict[str, Any] = field(default_factory=dict)
    """Overrides entries of `meta_info`."""
    said: Any = None
    """What the plugin says, without staging anything."""
    stage: Callable[[Asked, Path, dict[str, torch.Tensor]], object] | None = None
    """Put something else at the path."""
    after: Callable[[], object] | None = None


def right(asked: Asked) -> Act | None:
    return None


@functools.cache
def load(target: Path) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return model.eval()


class StandIn:
    """Serves from threads of this process until `kill` (connections are reset, as by SIGKILL)."""

    def __init__(self, target: Path, staging: Path, *, port: int = 0, layers: tuple[int, ...] = (1, 2, 3),
                 staged_bytes: int = 1 << 26, script: Callable[[Asked], Act | None] = right, plugin: bool = True,
                 shift: int = 0, pre_norm: bool = False, tp_size: int = 1, rank_noise: float = 0.0,
                 noise: float = 0.0, residual: bool = True, **about: Any) -> None:  # fmt: skip
        self.model = load(target)
        self.layers, self.script, self.plugin, self.shift = layers, script, plugin, shift
        self.pre_norm, self.tp_size, self.noise = pre_norm, tp_size, noise
        self.rank_noise, self.residual = rank_noise, residual
        limits = StagingLimits(staged_bytes, 0, 1 << 26)
        self.stagers = [Stager(staging, limits, rank=rank, num_threads=2) for rank in range(tp_size)]
        self.staging = staging
        config = self.model.config
        self.about = {
            "staged_version": staged.VERSION, "sglang": "0.0.stand-in", "torch": "0", "architecture": "Llama",
            "model_path": str(target), "quantization": "none", "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "dtype": "float32",
            "aux_layers": list(layers), "read_back": list(layers), "neighbours": True, "last_hidden_norm": "post",
            "tp_rank": 0, "tp_size": tp_size, "device": "cpu", "attention": "eager", "chunked_prefill_size": -1,
            "max_prefill_tokens": 1024, "staging": str(staging), "host": "here", "uid": 0, "pid": 1, **about,
        }  # fmt: skip
        self.asked: list[Asked] = []
        """In order of arrival; hellos are not among them."""
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[Asked, Act, queue.Queue[dict[str, Any]]] | None] = queue.Queue()
        self._random = random.Random(0)
        self.sockets: set[socket.socket] = set()
        self.dead = False
        stand_in = self

        class Handler(_Handler):
            server_is = stand_in

        class Listener(ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = True
            block_on_close = False
            request_queue_size = 512

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that went away

        self._http = Listener(("127.0.0.1", port), Handler)
        self.port = int(self._http.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        threading.Thread(target=self._compute, daemon=True).start()

    def kill(self) -> None:
        """Gone at once: nothing listens, every connection is reset."""
        self.dead = True
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self.sockets):
            reset(connection)
        self._queue.put(None)

    def ask(self, body: dict[str, Any]) -> tuple[Act, dict[str, Any]]:
        """The answer's action and `meta_info` of one /generate."""
        name = RequestName.parse(body["rid"])
        ids = list(body["input_ids"])
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "prompt_tokens": len(ids)}
        return self.answer(name, ids, bool(body.get("return_logprob")), meta)

    def hello(self, name: RequestName) -> Any:
        room = self.stagers[0].room()
        return [{"hello": {**self.about, "room": room, "counts": {}}}]

    def pages(self) -> dict[str, str]:
        """What is told without a question."""
        return {
            "/health": "",
            "/server_info": json.dumps({"max_req_input_len": 400}),
            "/v1/loads": json.dumps({"loads": [{"num_waiting_reqs": 0}]}),
        }

    def text(self, meta: dict[str, Any]) -> str:
        """The body of an answer."""
        return json.dumps({"text": "", "meta_info": meta})

    def answer(
        self, name: RequestName | None, ids: list[int], logprobs: bool, meta: dict[str, Any]
    ) -> tuple[Act, dict[str, Any]]:
        if name is None or not self.plugin:
            return Act(), meta
        if staged.HELLO in name.flags:
            return Act(), meta | {"eyas": self.hello(name)}
        with self._lock:
            nth = 1 + sum(asked.ids == ids for asked in self.asked)
            asked = Asked(name, ids, logprobs, nth)
            self.asked.append(asked)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            act = self.script(asked) or Act()
            if act.before is not None:
                act.before()
            if act.said is not None:
                return act, meta | {"eyas": act.said} | act.meta
            if act.status != 200 or act.text is not None or act.reset:
                return act, meta
            told: queue.Queue[dict[str, Any]] = queue.Queue()
            self._queue.put((asked, act, told))
            return act, meta | told.get() | act.meta
        finally:
            with self._lock:
                self.in_flight -= 1

    def _compute(self) -> None:
        """Batches of what has arrived, in any order."""
        while True:
            batch = [self._queue.get()]
            time.sleep(0.002)
            while not self._queue.empty() and len(batch) < 8:
                batch.append(self._queue.get())
            if None in batch:
                return
            work = [item for item in batch if item is not None]
            self._random.shuffle(work)
            computed = [self.states(asked.ids) for asked, _, _ in work]
            rows = [len(asked.ids) for asked, _, _ in work]
            zeros = [0] * len(rows)
            ids = torch.tensor([i for asked, _, _ in work for i in asked.ids])
            wanted = set(self.layers)
            if any(staged.NEIGHBOURS in asked.name.flags for asked, _, _ in work):
                wanted |= {k - 1 for k in self.layers if k > 1}
            names = {f"hidden.{k}" for k in wanted}
            fields = {f: torch.cat([s[f] for s, _ in computed]) for f in computed[0][0] if f == "last" or f in names}
            extra = {f for f in names if int(f.removeprefix("hidden.")) not in self.layers}
            told: list[dict[str, Any] | None] = [None] * len(work)
            for rank, stager in enumerate(self.stagers):
                of_rank = {f: t + rank * self.rank_noise for f, t in fields.items()}
                mine = [a.name if act.stage is None and (not rank or staged.RANKS in a.name.flags) else None
                        for a, act, _ in work]  # fmt: skip
                answers = stager.stage(mine, rows, zeros, ids, of_rank, extra)
                told = answers if rank == 0 else told
            for (asked, act, out), said, (states, logprobs) in zip(work, told, computed, strict=True):
                path = asked.name.path(self.staging)
                if act.stage is not None:
                    own = {f: t for f, t in states.items() if f == "last" or int(f[7:]) in self.layers}
                    act.stage(asked, path, own)
                    said = {"path": str(path), "bytes": 0}
                meta: dict[str, Any] = {"eyas": [said]}
                if asked.logprobs:
                    first: list[float | None] = [None]
                    # As the real one, which tells the vocabulary's last id as 0.
                    told_ids = [i if i < self.model.config.vocab_size - 1 else 0 for i in asked.ids]
                    entries = zip(first + logprobs, told_ids, itertools.repeat(None), strict=False)
                    meta["input_token_logprobs"] = [list(entry) for entry in entries]
                out.put(meta)

    @torch.inference_mode()
    def states(self, ids: list[int]) -> tuple[dict[str, torch.Tensor], list[float]]:
        """Every hidden state of a sequence by field, and the log-probabilities of its tokens but the first."""
        with _COMPUTING:
            return self._states(ids)

    def _states(self, ids: list[int]) -> tuple[dict[str, torch.Tensor], list[float]]:
        inner = self.model.model
        before: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        handles = [inner.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))]
        for layer in inner.layers:
            ending = getattr(layer, "post_feedforward_layernorm", layer.mlp)
            handles.append(ending.register_forward_hook(lambda _, __, states: added.append(states)))
        output = inner(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        for handle in handles:
            handle.remove()
        last = output.last_hidden_state
        hidden = [*output.hidden_states[:-1], before[0]]
        if not self.residual:  # as SGLang's Gemma 3, whose residual stream runs beside the states
            hidden[1:] = added
        logits = self.model.lm_head(last)[0].log_softmax(-1)
        logprobs = [float(logits[t, i]) for t, i in enumerate(ids[1:])]
        states = {
            f"hidden.{k}": hidden[min(max(k + self.shift, 0), len(hidden) - 1)][0] + self.noise
            for k in range(len(hidden))
        }
        return states | {"last": (before[0] if self.pre_norm else last)[0] + self.noise}, logprobs


def reset(connection: socket.socket) -> None:
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    except OSError:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_is: StandIn

    def setup(self) -> None:
        super().setup()
        self.server_is.sockets.add(self.connection)

    def finish(self) -> None:
        self.server_is.sockets.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        told = self.server_is.pages().get(self.path.partition("?")[0])
        self._answer(404 if told is None else 200, told or "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        act, meta = self.server_is.ask(body)
        if act.reset or self.server_is.dead:
            reset(self.connection)
            self.close_connection = True
            return
        text = act.text if act.text is not None else self.server_is.text(meta)
        self._answer(act.status, text)
        if act.after is not None:
            act.after()

    def _answer(self, status: int, text: str) -> None:
        data = text.encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self.wfile.write(head.encode() + data)


def main() -> None:
    """For each port on stdin a process that serves there; its pid goes to stdout once it does."""
    target, staging = Path(sys.argv[1]), Path(sys.argv[2])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    load(target)
    for line in sys.stdin:
        if os.fork() == 0:
            StandIn(target, staging, port=int(line))
            os.write(1, f"{os.getpid()}\n".encode())
            threading.Event().wait()


if __name__ == "__main__":
    main()
