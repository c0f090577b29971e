"""What goes straight through to SGLang and the router: names that exist, nothing that palestra decides, words that the upstream reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from palestra.cli.engines import environment, options
from palestra.cli.engines.options import DECIDED, OWNED, ROUTER_OWNED, Option, argv_of, check, known, merged, take
from palestra.cli.engines.types import EngineEnvironment, EngineSetupError
from palestra.server.config import EngineSection, PdSection

FIELDS = {
    each.name: each
    for each in (
        Option("chunked_prefill_size", "--chunked-prefill-size"),
        Option("context_length", "--context-length"),
        Option("disable_cuda_graph", "--disable-cuda-graph", "flag", default=False),
        Option("dllm_fdfo", "--dllm-fdfo", "flag", off="--no-dllm-fdfo", default=True),
        Option("always", "--always", "flag", default=True),
        Option("cuda_graph_bs_decode", "--cuda-graph-bs-decode", "words"),
        Option("preferred_sampling_params", "--preferred-sampling-params"),
        Option("ep_join_rank_offset", "--elastic-ep-join-rank-offset"),
        Option("port", "--port"),
        Option("tp_size", "--tp-size", aliases=("tensor_parallel_size",)),
    )
}
ROUTER = {each.name: each for each in (Option("policy", ""), Option("cache_threshold", ""), Option("enable_trace", ""))}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"chunked_prefil_size": 1},
            r"\[sglang\]: sglang has no option chunked_prefil_size; did you mean chunked_prefill_size",
        ),
        ({"nonsense_xyzzy": 1}, "has no option nonsense_xyzzy$"),
        ({"port": 1}, r"\[sglang\] port is not passed through: palestra chooses"),
        ({"tensor-parallel-size": 2}, "tensor-parallel-size is not passed through: it is rollout.gpus_per_engine"),
        ({"context_length": 4096}, "context_length is rollout.context_len in palestra; set that"),
        ({"disable_cuda_graph": "yes"}, "disable_cuda_graph is a switch: true or false, not 'yes'"),
        ({"chunked_prefill_size": True}, "chunked_prefill_size takes a value, not true"),
        ({"always": False}, "always cannot be switched off"),
    ],
)
def test_tables_that_cannot_be_passed_through_say_why(table: Mapping[str, object], said: str) -> None:
    with pytest.raises(EngineSetupError, match=said):
        check(table, "sglang", FIELDS)


def test_what_the_upstream_has_passes_and_overrides_may_give_what_a_field_of_ours_gives_for_all() -> None:
    check({"chunked-prefill-size": 512, "dllm_fdfo": False, "cuda_graph_bs_decode": [1, 2]}, "sglang", FIELDS)
    check({"context_length": 4096}, "sglang", FIELDS, overrides=True)
    with pytest.raises(EngineSetupError, match=r"a\.yaml tp_size is not passed"):
        check({"tp_size": 2}, "sglang", FIELDS, where="a.yaml", overrides=True)


def test_the_routers_table_has_its_own_rules() -> None:
    check({"cache_threshold": 0.5, "enable_trace": True}, "sglang-router", ROUTER)
    with pytest.raises(EngineSetupError, match=r"\[router\] policy is not passed through: it is rollout.router_policy"):
        check({"policy": "random"}, "sglang-router", ROUTER)


def test_a_command_lines_words() -> None:
    table = {
        "disable_cuda_graph": True,
        "dllm_fdfo": False,
        "cuda_graph_bs_decode": [1, 2, 4],
        "preferred_sampling_params": {"top_k": 5},
        "chunked_prefill_size": -1,
        "ep_join_rank_offset": 8,
        "context_length": None,
    }
    assert argv_of(table, FIELDS) == (
        *("--disable-cuda-graph", "--no-dllm-fdfo", "--cuda-graph-bs-decode", "1", "2", "4"),
        *("--preferred-sampling-params", '{"top_k": 5}', "--chunked-prefill-size", "-1"),
        *("--elastic-ep-join-rank-offset", "8"),
    )
    assert argv_of({"disable_cuda_graph": False}, FIELDS) == ()
    assert argv_of({"mem_fraction_static": 0.85, "x": True, "y": [1, 2]}) == (
        "--mem-fraction-static",
        "0.85",
        "--x",
        "--y",
        "1",
        "2",
    )
    with pytest.raises(EngineSetupError, match="nothing_like_it is no option"):
        argv_of({"nothing_like_it": 1}, FIELDS)


def test_one_option_under_two_names_is_written_once_and_the_later_counts() -> None:
    assert merged(FIELDS, {"tp_size": 1}, {"tensor-parallel-size": 2}) == {"tp_size": 2}


def test_options_are_taken_out_of_a_command_line() -> None:
    line = "MODEL --num 2 --sglang-disable-cuda-graph --router-cache-threshold 0.5 --sglang-dtype=bfloat16"
    line += " --sglang-cuda-graph-bs-decode 1 2 --sglang-chunked-prefill-size -1 --port 8000"
    left, sglang, router = take(line.split())
    assert left == ["MODEL", "--num", "2", "--port", "8000"]
    assert sglang == {
        "disable_cuda_graph": True,
        "dtype": "bfloat16",
        "cuda_graph_bs_decode": [1, 2],
        "chunked_prefill_size": -1,
    }
    assert router == {"cache_threshold": 0.5}


def test_the_list_that_the_installation_left_is_read_and_another_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    said = {"sglang": {"x": {"flag": "--x", "form": "value", "off": None, "default": 3, "aliases": ["y"]}}}

    def answer(environment: EngineEnvironment, arguments: list[str], timeout_s: float) -> str:
        asked.append(arguments[-1])
        return f"a warning\n{json.dumps(said)}\n"

    monkeypatch.setattr(options, "ask", answer)
    env = EngineEnvironment(tmp_path, tmp_path / "bin" / "python", "cpu")
    assert known(env, "sglang") == {"x": Option("x", "--x", default=3, aliases=("y",))}
    (tmp_path / environment.FIELDS).write_text(json.dumps(said))
    assert known(env, "sglang")["x"].default == 3
    assert asked == ["engine"]
    with pytest.raises(EngineSetupError, match=f"palestra engine install --cpu --smg --into {tmp_path}"):
        known(env, "smg")


def test_every_field_that_is_named_instead_of_an_option_exists() -> None:
    fields = {f"rollout.{name}" for name in EngineSection.model_fields} | {
        f"rollout.pd.{name}" for name in PdSection.model_fields
    }
    for said in DECIDED.values():
        assert set(said.split(" with ")) <= fields, said
    named = {word.strip(",:;.") for said in (*OWNED.values(), *ROUTER_OWNED.values()) for word in said.split()}
    assert {word for word in named if word.startswith("rollout.")} <= fields
    assert not DECIDED.keys() & OWNED.keys()
