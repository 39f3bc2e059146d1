"""Every knob, in one frozen tree: one TOML file, one dotted path per field, one default, one sentence."""

from __future__ import annotations

import datetime
import difflib
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.errors import ConfigError

GB = 1_000_000_000


class Section(BaseModel):
    """A frozen part of the tree; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetConfig(Section):
    """The model whose hidden states are captured."""

    path: Path | None = None
    """Directory with `config.json`, weights as safetensors and the tokenizer."""
    trust_remote_code: bool = False
    """Run Python code that the target brings along."""


class DataConfig(Section):
    """Conversations and the sample table made of them."""

    sources: tuple[Path, ...] = ()
    """Files of conversations: JSONL, JSON arrays or Parquet, also gzip or zstd; patterns like `chats/*.jsonl`."""
    samples: Path | None = None
    """The sample table (`samples.parquet`): written by `prepare`, read by `plan`, `capture` and `inspect`."""
    max_tokens: int = Field(4096, ge=2)
    """Tokens of the longest sample; `too_long` says what becomes of longer ones."""
    too_long: Literal["drop", "turn", "cut"] = "drop"
    """A longer sample is dropped, ends with the last `turn` that fits, or is `cut` in the middle of one; counted."""
    last_turn_only: bool = False
    """Supervise the last assistant turn alone."""
    reasoning: bool = True
    """Supervise what the target thought before it answered; else it is context only."""
    ignore: tuple[str, ...] = ()
    """Regular expressions: supervised text that matches one becomes context."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Handed to the chat template, `enable_thinking` say."""
    date: datetime.date = datetime.date(2026, 1, 1)
    """Today, for templates that write the date into the prompt: the same whenever `prepare` runs."""
    held_out: float = Field(0.02, ge=0.0, lt=1.0)
    """Share of the conversations held out of training, by the hash of their first user turn."""
    max_unsupervised: float = Field(0.01, ge=0.0, le=1.0)
    """`prepare` stops when more than this share of the rows has no supervised token: the masks are suspect then."""
    draft_vocab_sizes: tuple[Annotated[int, Field(ge=1)], ...] = (8192, 16384, 32768)
    """Sizes of a draft vocabulary whose coverage is reported."""
    workers: int | None = Field(None, ge=1)
    """Processes that tokenise; default: one for each core."""


class MergeSource(Section):
    """One source of `eyas data merge`."""

    path: Path
    """A file, a pattern like `chats/*.jsonl.gz`, or `-` for standard input."""
    name: str = ""
    """Becomes each conversation's `source`, unless it has one; default: the file's name."""
    weight: float = Field(1.0, gt=0.0, le=1.0)
    """Share of its conversations that is kept, by the hash of their content: a larger share holds a smaller one."""
    cap: int | None = Field(None, ge=1)
    """At most so many of its conversations."""
    tags: tuple[str, ...] = ()
    """Added to each conversation's tags."""


class MergeConfig(Section):
    """Several sources to one file of conversations."""

    sources: tuple[MergeSource, ...] = ()
    out: Path | None = None
    """JSONL in one canonical form; gzip or zstd by its suffix."""
    seed: int = 0
    """Order of the conversations in `out`."""
    benchmarks: tuple[Path, ...] = ()
    """Prompts that the drafter will be evaluated on: conversations that share long passages with them are told."""
    leakage: Literal["drop", "report"] = "drop"
    """What becomes of conversations that share a passage with a benchmark."""
    ngram: int = Field(13, ge=3)
    """Words in a row that make a shared passage."""


class GenerateConfig(Section):
    """Answers from the target: from OpenAI-compatible servers, or, with none named, in this process."""

    prompts: Path | None = None
    """JSONL of conversations whose assistant turns are to be answered."""
    out: Path | None = None
    """JSONL of answered conversations, generated token ids kept."""
    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0.0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """For servers."""
    batch_size: int = Field(16, ge=1)
    """Prompts answered together in this process."""
    seed: int = 0
    """Of answers that are drawn, temperature above 0. Servers are told unless it is 0: it slows some down."""
    endpoints: tuple[str, ...] = ()
    """Addresses of servers up to and with `/v1`; several share the work by what they finish."""
    model: str = ""
    """The model's name at the servers; default: the only one that they list."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key."""
    api_key_file: Path | None = None
    """File that holds the key and nothing else."""
    concurrency: int = Field(64, ge=1)
    """Requests in flight at most, for each endpoint."""
    max_attempts: int = Field(6, ge=1)
    """Tries of one answer before its conversation is rejected."""
    timeout_s: float = Field(60.0, gt=0.0)
    """Time for one answer, beside `timeout_s_per_1k_tokens`."""
    timeout_s_per_1k_tokens: float = Field(60.0, ge=0.0)
    """Of `max_new_tokens`."""
    reconnect_s: float = Field(900.0, ge=0.0)
    """How long the run waits for a server when all of them are gone."""
    max_reject_burst: int = Field(20, ge=1)
    """The run stops when so many conversations are refused, or fail `max_attempts` times, and none succeeds between."""
    keep_cut: bool = False
    """Keep answers that `max_new_tokens` cut; else they are rejects. For servers; in this process they are kept."""
    providers: tuple[str, ...] = ()
    """For gateways: the providers that may answer, in this order."""
    quantizations: tuple[str, ...] = ()
    """For gateways: the quantisations that may answer."""
    mixed_providers: bool = False
    """Accept answers from several providers or quantisations in one file."""
    price_per_1m: dict[Literal["prompt", "completion"], float] = Field(default_factory=dict)
    """Price of a million tokens, where answers do not name their cost."""
    max_cost: float | None = Field(None, gt=0.0)
    """The run stops before it costs more, in the currency of the prices."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Handed to the servers in each request, untouched."""


class EngineConfig(Section):
    """Who computes hidden states."""

    kind: Literal["hf", "sglang", "vllm", "fake"] = "hf"
    """`hf` computes in this process; `sglang` and `vllm` ask a server that `eyas serve` started."""
    url: str = "http://127.0.0.1:30000"
    """The server's address."""
    urls: tuple[str, ...] = ()
    """Addresses of several servers of one target that share a capture; `eyas serve` starts the one of `url`."""
    stock_layers: tuple[int, ...] | None = None
    """Hidden-state indices that a vLLM server with vLLM's own connector extracts (its
    `eagle_aux_hidden_state_layer_ids`, ascending); unset: the server is one that `eyas serve` starts."""
    reconnect_s: float = Field(900.0, ge=0.0)
    """How long capture waits for a server that is gone to come back."""
    check_layers: Literal["auto", "target", "layer", "off"] = "auto"
    """How a probe checks a server's auxiliary states: against the whole `target` in this process, or each against its
    one decoder `layer`; `auto` takes the target when its weights are at most 4 GB."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """`auto` is the dtype of the target's own config."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    batch_tokens: int = Field(8192, ge=1)
    """Tokens in one forward, padding included; a longer sample gets a forward of its own."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Options handed to the engine untouched."""


class ServeConfig(Section):
    """A stock SGLang or vLLM server that captures; host and port are in `engine.url`, its flags in `engine.extra`."""

    python: str | None = None
    """Interpreter of the server's environment: a path, or a name on PATH; default: the one that runs eyas."""
    staging: Path | None = None
    """Directory in shared memory through which states come; default: `/dev/shm/eyas-<port>`."""
    staging_bytes: int | None = Field(None, ge=1)
    """Bytes that may lie there at one time; default: half of what is free, the container's memory limit counted."""
    min_free_bytes: int = Field(GB, ge=0)
    """Left free there and under the container's memory limit, whatever happens."""
    pool_bytes: int = Field(4 * 1024**3, ge=1)
    """Page-locked host memory of the server for copies from the GPU."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs over which the target is split."""
    max_prefill_tokens: int = Field(16384, ge=1)
    """Tokens in one forward of the server; a longer sample gets a forward of its own."""
    start_timeout_s: float = Field(1800.0, gt=0.0)
    """How long the server may load before it counts as failed."""
    max_restarts: int = Field(5, ge=0)
    """Restarts in a row before `serve` gives up; a server that was ready for five minutes begins a new row."""
    backoff_s: float = Field(1.0, ge=0.0)
    """Pause before the first restart; doubles up to 60 s."""


class CaptureConfig(Section):
    """Samples times engine to shards."""

    out: Path | None = None
    """Directory of the data set."""
    aux_layers: tuple[int, ...] | None = None
    """Hidden-state indices; default `[2, L//2, L-3]`."""
    limit: int | None = Field(None, ge=1)
    """At most this many samples; raise it later and only the rest is captured."""
    tags: tuple[str, ...] = ()
    """Only samples with one of these tags."""
    sources: tuple[str, ...] = ()
    """Only samples from one of these sources."""
    seed: int = 0
    """Order of the samples in the data set."""
    shard_tokens: int | None = Field(None, ge=1)
    """Tokens in a shard; default: as many as fill 1 GiB."""
    in_flight_bytes: int = Field(2 * GB, ge=1)
    """Bytes of hidden states that may exist outside the data set at one time."""
    max_reject_fraction: float = Field(0.01, ge=0.0, le=1.0)
    """The run stops when more than this share of the planned samples is rejected."""
    max_reject_burst: int = Field(20, ge=1)
    """The run stops after this many rejects in a row."""
    check_fraction: float = Field(0.002, ge=0.0, le=1.0)
    """Share of the samples whose values are checked during the run; the probe at the start is always checked."""
    max_attempts: int = Field(5, ge=1)
    """Tries of one sample before it is rejected as unavailable."""
    backoff_s: float = Field(1.0, ge=0.0)
    """First pause after a retryable failure; doubles up to 60 s."""
    timeout_s: float = Field(600.0, gt=0.0)
    """Time for the answer to one sample, beside `timeout_s_per_1k_tokens`."""
    timeout_s_per_1k_tokens: float = Field(60.0, ge=0.0)
    min_free_bytes: int = Field(2 * GB, ge=0)
    """The run stops cleanly when the disk has less left than this."""
    interval_s: float = Field(10.0, gt=0.0)
    """Seconds between two progress lines in a file."""


class DraftConfig(Section):
    """The drafter's shape; what is unset comes from the target."""

    vocab_size: int = Field(32000, ge=1)
    """Draft vocabulary: the most frequent supervised tokens; as many as the target has, or more, are all of them."""
    num_layers: int = Field(1, ge=1)
    hidden_size: int | None = Field(None, ge=1)
    """Another one than the target's makes the drafter learn an embedding of its own."""
    num_heads: int | None = Field(None, ge=1)
    num_kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    intermediate_size: int | None = Field(None, ge=1)
    norm_aux: bool = False
    """EAGLE-3.1: a norm for each auxiliary state before `fc`."""
    carry_normed: bool = False
    """EAGLE-3.1: a step hands on its state after the final norm."""
    start_from: Path | None = None
    """Directory of an EAGLE-3 checkpoint of the same shape to start from: ours, SGLang's, vLLM's or speculators'."""
    start_from_aux_layers: tuple[int, ...] | None = None
    """Hidden-state indices of that checkpoint, where it does not say them."""


class TrainConfig(Section):
    """Training a drafter from the states of `capture.out` and the sample table."""

    out: Path | None = None
    """Directory of the run: checkpoints, events, report."""
    ttt_length: int = Field(7, ge=1, le=16)
    """Steps of training-time test."""
    step_decay: float = Field(0.8, gt=0.0, le=1.0)
    """Step `s` weighs `step_decay ** s`."""
    mask_rule: Literal["drafted", "usual"] = "drafted"
    """Train on exactly what a server drafts, or on the rows that other trainers take."""
    pack_tokens: int = Field(16384, ge=2)
    """Tokens that are computed together; no sample may be longer."""
    step_packs: int = Field(1, ge=1)
    """Packs of one optimizer step, over all ranks; at least one for each rank."""
    epochs: int = Field(10, ge=1)
    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps at most, whatever `epochs` says."""
    learning_rate: float = Field(1e-4, gt=0.0)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: float = Field(0.015, ge=0.0, le=1.0)
    """Share of the steps in which the learning rate rises."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    weight_decay: float = Field(0.0, ge=0.0)
    clip: float = Field(0.5, gt=0.0)
    """Largest norm of the gradient."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the arithmetic; weights and optimizer are float32. `auto` is bfloat16 on a GPU, float32 on a CPU."""
    recompute: bool = False
    """Compute each step again for its gradients: a third slower, a fraction of the memory."""
    compile: bool | None = None
    """Fuse with `torch.compile`; default: on a GPU."""
    sharded: bool = False
    """Several ranks: spread weights, gradients and optimizer over them (FSDP2)."""
    device: str = ""
    """`cuda`, `cpu`; default: a GPU if there is one."""
    seed: int = 0
    """Of the first weights and of the order of the samples."""
    max_train_samples: int | None = Field(None, ge=1)
    eval_every: int | None = Field(None, ge=1)
    """Steps between two looks at the held-out samples; default: after each epoch."""
    checkpoint_every: int = Field(1000, ge=1)
    """Steps between two checkpoints; one is written with each evaluation, too."""
    keep: int = Field(2, ge=1)
    """Latest checkpoints that are kept, beside the best one."""
    log_every: int = Field(10, ge=1)
    """Steps between two lines of `events.jsonl`."""
    prefetch_bytes: int = Field(4 * GB, ge=1)
    """Bytes of states that are read ahead."""
    wandb_project: str = ""
    """Weights & Biases, when it is installed: the project's name."""
    interval_s: float = Field(10.0, gt=0.0)
    """Seconds between two progress lines in a file."""


class EvaluateConfig(Section):
    """How good a drafter is: from stored states, or in real speculative decoding."""

    split: Literal["held_out", "train", "all"] = "held_out"
    """Samples of the table that stored states are read of."""
    ttt_length: int = Field(8, ge=1, le=16)
    """Steps, and so the longest chain, that stored states are asked about."""
    aux_layers: tuple[int, ...] | None = None
    """Hidden-state indices of a checkpoint that does not say them."""
    max_new_tokens: int = Field(256, ge=1)
    """Of one answer."""
    num_draft_tokens: int = Field(4, ge=1)
    """Tokens that are drafted before the target is asked."""
    temperature: float = Field(0.0, ge=0.0)
    """0 is greedy."""
    seed: int = 0
    """Of answers that are drawn, temperature above 0."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2, 4, 8, 16, 32, 64), min_length=1)
    """Requests in flight at a running server."""
    repeats: int = Field(3, ge=1)
    """Runs of each batch size, with the drafter and without, in turns."""
    timeout_s: float = Field(600.0, gt=0.0)
    """For one whole answer of a running server."""


class Config(Section):
    """The whole tree; pass the section that is needed, never the tree."""

    target: TargetConfig = TargetConfig()
    data: DataConfig = DataConfig()
    merge: MergeConfig = MergeConfig()
    generate: GenerateConfig = GenerateConfig()
    engine: EngineConfig = EngineConfig()
    serve: ServeConfig = ServeConfig()
    capture: CaptureConfig = CaptureConfig()
    draft: DraftConfig = DraftConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The tree from a TOML file and `section.field=value` overrides.

    Paths in the file are relative to the file, paths in overrides to the working directory. Raises ConfigError with one
    line per problem, naming the file, the field and the nearest known name.
    """
    tree: dict[str, Any] = {}
    problems: list[str] = []
    if path is not None:
        tree = _read(path)
        problems += _unknown(tree, str(path))
        _resolve_paths(tree, path.resolve().parent)
    for override in overrides:
        problems += _apply(tree, override)
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        where = f"{path}: " if path is not None else ""
        lines = [f"{where}{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def dump(config: Config) -> str:
    """The resolved tree as TOML; fields that are unset are left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a run's TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _sections() -> dict[str, type[Section]]:
    return {name: typing.cast(type[Section], f.annotation) for name, f in Config.model_fields.items()}


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known here: {', '.join(known)}"


def _unknown(tree: dict[str, Any], where: str) -> list[str]:
    problems = []
    sections = _sections()
    for section, values in tree.items():
        if section not in sections:
            problems.append(f"{where}: unknown section '{section}'{_nearest(section, list(sections))}")
        elif not isinstance(values, dict):
            problems.append(f"{where}: '{section}' must be a table, as in [{section}]")
        else:
            known = list(sections[section].model_fields)
            problems += [
                f"{where}: unknown key '{section}.{key}'{_nearest(key, known)}" for key in values if key not in known
            ]
    return problems


def _apply(tree: dict[str, Any], override: str) -> list[str]:
    dotted, equals, text = override.partition("=")
    parts = dotted.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        return [f"'{override}' is not of the form section.field=value"]
    section, name, *inner = parts
    problems = _unknown({section: {name: None}}, f"'{override}'")
    if problems:
        return problems
    if inner and name not in ("extra", "template_options", "price_per_1m"):
        return [f"'{override}': {section}.{name} has no fields"]
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    node = tree.setdefault(section, {})
    if inner:
        for part in (name, *inner[:-1]):
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                return [f"'{override}': '{part}' has a value of its own and can hold no fields"]
        name = inner[-1]
    node[name] = value
    if not inner:
        _resolve_paths({section: node}, Path.cwd(), only=name)
    return []


def _holds_paths(annotation: Any) -> bool:
    if annotation in (Path, MergeSource):
        return True
    if typing.get_origin(annotation) in (tuple, typing.Union, types.UnionType):
        return any(_holds_paths(arg) for arg in typing.get_args(annotation))
    return False


def _resolve_paths(tree: dict[str, Any], base: Path, only: str | None = None) -> None:
    for section, values in tree.items():
        model = _sections().get(section)
        if model is None or not isinstance(values, dict):
            continue
        for name, field in model.model_fields.items():
            if name not in values or (only is not None and name != only) or not _holds_paths(field.annotation):
                continue
            value = values[name]
            own = name == "sources"
            is_list = typing.get_origin(field.annotation) is tuple
            if isinstance(value, str):
                values[name] = [_resolved(value, base, own)] if is_list else _resolved(value, base, own)
            elif isinstance(value, list):
                values[name] = [_resolved(v, base, own) for v in value]


def _resolved(value: Any, base: Path, own_name: bool) -> Any:
    """A path made absolute, also the one inside a table; `-`, standard input, stays.

    With `own_name` a link keeps its own name, which is a label, instead of that of its target.
    """
    if isinstance(value, dict) and "path" in value:
        return {**value, "path": _resolved(value["path"], base, own_name)}
    if not isinstance(value, str) or value == "-":
        return value
    path = base / Path(value).expanduser()
    if own_name and path.name not in ("", ".."):
        return path.parent.resolve() / path.name
    return path.resolve()
