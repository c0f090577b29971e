"""Which engines there are: from the fields of `[rollout]`, or from a topology file.

In: a section of the configuration, or a YAML file in one of two forms. Out: a checked `Topology`. Pure but for reading the file.

    models:                                                    sglang:
      - name: policy                                             - name: policy
        update_weights: true                                       update_weights: true
        groups:                                                    server_groups:
          - {kind: prefill, gpus: 2, gpus_per_engine: 2}             - {worker_type: prefill, num_gpus: 2, num_gpus_per_engine: 2}

The second is slime's, so that its files can be carried over. `overrides` of a group are SGLang's options by their field names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped, unused-ignore]

from palestra.cli.engines import rules
from palestra.cli.engines.types import EngineGroup, EngineSetupError, Topology, WorkerType
from palestra.envs.findings import Finding
from palestra.server.config import EngineSection

KINDS: tuple[WorkerType, ...] = ("regular", "prefill", "decode")
FORMS = {
    "models": (
        "groups",
        {"kind": "kind", "gpus": "gpus", "gpus_per_engine": "gpus_per_engine", "overrides": "overrides"},
    ),
    "sglang": (
        "server_groups",
        {"worker_type": "kind", "num_gpus": "gpus", "num_gpus_per_engine": "gpus_per_engine", "overrides": "overrides"},
    ),
}
"""Key at the top of a file -> key of a model's groups, and what a group's keys mean."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def of_config(rollout: EngineSection, gpus_per_node: int = 8) -> Topology:
    """The engines that `[rollout]` asks for, each with the options that follow from its fields; those of a topology file where one is
    named, whose overrides come after the fields.

    Raises:
        EngineSetupError: they cannot be as they are described.
    """
    options = options_of(rollout)
    if rollout.topology is not None:
        read = read_topology(Path(rollout.topology), gpus_per_node)
        split = any(group.kind != "regular" for group in read.groups)
        groups = tuple(
            replace(group, options={**_for_kind(options, group.kind, split), **group.options}) for group in read.groups
        )
    elif rollout.pd is None:
        groups = (EngineGroup("regular", rollout.engines, rollout.gpus_per_engine, options),)
    else:
        pd = rollout.pd
        sizes = (pd.prefill_gpus_per_engine, pd.decode_gpus_per_engine)
        _refuse(rules.beside_split(rollout.engines, rollout.gpus_per_engine, sizes))
        transfer = {"disaggregation_transfer_backend": pd.transfer, "disaggregation_ib_device": pd.ib_device}
        options |= {name: value for name, value in transfer.items() if value is not None}
        groups = (
            EngineGroup(
                "prefill",
                pd.prefill_gpus // pd.prefill_gpus_per_engine,
                pd.prefill_gpus_per_engine,
                _for_kind(options, "prefill", True),
            ),
            EngineGroup(
                "decode",
                pd.decode_gpus // pd.decode_gpus_per_engine,
                pd.decode_gpus_per_engine,
                _for_kind(options, "decode", True),
            ),
        )
    topology = Topology(tuple(replace(group, env=env_of(rollout)) for group in groups), gpus_per_node)
    check(topology, "rollout")
    return topology


def env_of(rollout: EngineSection) -> dict[str, str]:
    """What SGLang takes from its environment alone. Its own default of the convolution's inputs is bfloat16."""
    return {"SGLANG_MAMBA_CONV_DTYPE": DTYPES["fp32"]} if rollout.conv_dtype == "fp32" else {}


def options_of(rollout: EngineSection) -> dict[str, object]:
    """SGLang's options that follow from the fields of `[rollout]` and are the same for all engines.

    Raises:
        EngineSetupError: two fields contradict each other.
    """
    _refuse(rules.copies(rollout.dp, rollout.dp_attention))
    _refuse(rules.second_cache(rollout.hicache, rollout.prefix_cache))
    _refuse(rules.sized_twice(rollout.state_ratio is not None, rollout.state_slots_pin is not None))
    ratio = type(rollout).model_fields["hicache_ratio"].default
    asked: dict[str, object] = {
        "context_length": rollout.context_len,
        "max_running_requests": rollout.max_running,
        "max_total_tokens": rollout.max_total_tokens,
        "page_size": rollout.page_size,
        "mem_fraction_static": rollout.mem_fraction,
        "ep_size": rollout.ep if rollout.ep > 1 else None,
        "attn_dp_size": rollout.dp if rollout.dp > 1 else None,
        # A block-quantised folder says by itself that it is one.
        "dtype": DTYPES.get(rollout.weight_dtype or ""),
        "kv_cache_dtype": rollout.kv_dtype if rollout.kv_dtype != "auto" else None,
        "mamba_ssm_dtype": DTYPES.get(rollout.ssm_dtype),
        "mamba_full_memory_ratio": rollout.state_ratio,
        "max_mamba_cache_size": rollout.state_slots_pin,
        "mamba_radix_cache_strategy": rollout.state_strategy,
        "disable_radix_cache": True if not rollout.prefix_cache else None,
        "attention_backend": rollout.attention_backend,
        "enable_deterministic_inference": True if rollout.deterministic else None,
        "enable_hierarchical_cache": True if rollout.hicache else None,
        # SGLang takes a given ratio as it is, and shrinks its own default to what the host's memory holds.
        "hicache_ratio": rollout.hicache_ratio if rollout.hicache and rollout.hicache_ratio != ratio else None,
        "enable_return_routed_experts": True if rollout.routed_experts else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def read_topology(path: Path, gpus_per_node: int = 8) -> Topology:
    """The engines of a topology file.

    Raises:
        EngineSetupError: it cannot be read, has another form, or describes engines that cannot be.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EngineSetupError(f"topology {path} cannot be read: {' '.join(str(error).split())}") from None
    form = next((name for name in FORMS if isinstance(content, dict) and name in content), None)
    if form is None:
        raise EngineSetupError(f"topology {path} has neither `models:` nor `sglang:` at its top")
    model = _only_model(content[form], f"topology {path}", form)
    key, meanings = FORMS[form]
    where = f"topology {path}, {key}"
    listed = model.get(key)
    if not isinstance(listed, list) or not listed:
        raise EngineSetupError(f"{where}: a list of groups is missing")
    each = model.get("num_gpus_per_engine" if form == "sglang" else "gpus_per_engine", 1)
    groups = tuple(_group(entry, meanings, each, f"{where}[{index}]") for index, entry in enumerate(listed))
    topology = Topology(groups, gpus_per_node)
    check(topology, str(path))
    return topology


def check(topology: Topology, where: str) -> None:
    """Holds a topology to what SGLang and its router can do.

    Raises:
        EngineSetupError: it breaks a rule; `where` begins the message.
    """
    _refuse(rules.mixed({group.kind for group in topology.groups}), where)
    for index, group in enumerate(topology.groups):
        _check_group(group, topology.gpus_per_node, f"{where}, group {index} ({group.kind})")


def _check_group(group: EngineGroup, gpus_per_node: int, where: str) -> None:
    size, options = group.gpus_per_engine, group.options
    deterministic = bool(options.get("enable_deterministic_inference"))
    _refuse(rules.whole_nodes(size, gpus_per_node), where)
    _refuse(rules.expert_ranks(size, options.get("ep_size", 1)), where)
    _refuse(rules.data_ranks(size, options.get("attn_dp_size", 1)), where)
    _refuse(rules.decode_cache(group.kind == "decode" and bool(options.get("enable_hierarchical_cache"))), where)
    _refuse(rules.deterministic_backend(deterministic, options.get("attention_backend")), where)


def _refuse(findings: Iterator[Finding], where: str = "") -> None:
    """Raises the first of them as what it is here; `where` begins the message.

    Raises:
        EngineSetupError: there is one.
    """
    for finding in findings:
        message = f"{finding.message}; {finding.fix}" if finding.fix else finding.message
        raise EngineSetupError(f"{where}: {message}" if where else message)


def _for_kind(options: Mapping[str, object], kind: WorkerType, split: bool) -> dict[str, object]:
    """The options of all engines, as one kind of them has them."""
    left = dict(options)
    if split and kind == "decode":
        for name in ("enable_hierarchical_cache", "hicache_ratio"):
            left.pop(name, None)
    return left


def _only_model(models: object, where: str, form: str) -> Mapping[str, Any]:
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise EngineSetupError(f"{where}: {form} is no list of models")
    trained = [model for model in models if model.get("update_weights", True)]
    if len(models) != 1 or len(trained) != 1:
        raise EngineSetupError(
            f"{where} must have one model, whose update_weights is true; serve others apart, with palestra engine serve"
        )
    known = {"name", "update_weights", "model_path", FORMS[form][0], "gpus_per_engine", "num_gpus_per_engine"}
    _no_others(trained[0], known, where)
    if trained[0].get("model_path") is not None:
        raise EngineSetupError(f"{where}: model_path is model.path of the run; leave it out")
    return cast("Mapping[str, Any]", trained[0])


def _group(entry: object, meanings: Mapping[str, str], each: object, where: str) -> EngineGroup:
    if not isinstance(entry, dict):
        raise EngineSetupError(f"{where} is no table")
    _no_others(entry, meanings.keys(), where)
    said = {meanings[key]: value for key, value in entry.items()}
    kind = said.get("kind", "regular")
    if kind not in KINDS:
        raise EngineSetupError(f"{where}: {kind!r} is no kind of engine; there are {', '.join(KINDS)}")
    gpus = _count(said.get("gpus"), f"{where}: gpus")
    size = _count(said.get("gpus_per_engine", each), f"{where}: gpus_per_engine")
    if gpus % size:
        raise EngineSetupError(f"{where}: {gpus} GPUs are no multiple of {size} per engine")
    overrides = said.get("overrides") or {}
    if not isinstance(overrides, dict) or not all(isinstance(name, str) for name in overrides):
        raise EngineSetupError(f"{where}: overrides is no table of SGLang's options")
    return EngineGroup(
        cast("WorkerType", kind), gpus // size, size, {n.replace("-", "_"): v for n, v in overrides.items()}
    )


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EngineSetupError(f"{where} must be a whole number from 1 on, not {value!r}")
    return value


def _no_others(table: Mapping[str, object], known: Sequence[str] | Any, where: str) -> None:
    others = [str(key) for key in table if key not in known]
    if others:
        raise EngineSetupError(f"{where}: unknown {', '.join(others)}; there are {', '.join(sorted(known))}")
