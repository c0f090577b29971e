"""Options that go straight through to SGLang and to the router: the tables `[sglang]` and `[router]`, `--sglang-X` and `--router-X`, and
the `overrides` of a topology file.

In: names and values. Out: words of a command line, or an error that names the nearest option there is, or the field of ours that decides
the matter. The names are those that the installed upstream itself has; it is asked once, when it is installed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from palestra.cli.engines.environment import FIELDS, STANDINS, has_smg
from palestra.cli.engines.interpreter import ask
from palestra.cli.engines.types import EngineEnvironment, EngineSetupError

Kind = Literal["sglang", "sglang-router", "smg"]

DECIDED = {
    "context_length": "rollout.context_len",
    "max_running_requests": "rollout.max_running",
    "max_total_tokens": "rollout.max_total_tokens",
    "page_size": "rollout.page_size",
    "mem_fraction_static": "rollout.mem_fraction",
    "dtype": "rollout.weight_dtype",
    "kv_cache_dtype": "rollout.kv_dtype",
    "mamba_ssm_dtype": "rollout.ssm_dtype",
    "mamba_full_memory_ratio": "rollout.state_ratio",
    "max_mamba_cache_size": "rollout.state_slots_pin",
    "mamba_radix_cache_strategy": "rollout.state_strategy",
    "disable_radix_cache": "rollout.prefix_cache",
    "attention_backend": "rollout.attention_backend",
    "enable_deterministic_inference": "rollout.deterministic",
    "enable_hierarchical_cache": "rollout.hicache",
    "hicache_ratio": "rollout.hicache_ratio",
    "ep_size": "rollout.ep",
    "attn_dp_size": "rollout.dp with rollout.dp_attention",
    "disaggregation_transfer_backend": "rollout.pd.transfer",
    "disaggregation_ib_device": "rollout.pd.ib_device",
    "enable_return_routed_experts": "rollout.routed_experts",
}
"""SGLang's options that have a field of ours; a topology's overrides may still give them for one group of engines."""
OWNED = {
    "model_path": "it is model.path",
    "host": "palestra chooses where engines listen",
    "port": "palestra chooses where engines listen",
    "tp_size": "it is rollout.gpus_per_engine, or a group's gpus_per_engine",
    "pp_size": "engines are tensor parallel only",
    "dp_size": "copies of an engine are rollout.engines, attention by data parallel ranks is rollout.dp_attention",
    "enable_dp_attention": "it is rollout.dp with rollout.dp_attention, or attn_dp_size of a group",
    "device": "it is rollout.device",
    "base_gpu_id": "palestra gives each engine its GPUs",
    "gpu_id_step": "palestra gives each engine its GPUs",
    "nnodes": "it follows from gpus_per_engine",
    "node_rank": "it follows from gpus_per_engine",
    "dist_init_addr": "palestra chooses it",
    "disaggregation_mode": "it is rollout.pd, or the kind of a group",
    "disaggregation_bootstrap_port": "palestra chooses it",
    "weight_version": "publishing weights sets it",
    "enable_metrics": "it is always on",
    "config": "options of a file would not be checked: write them here",
    "api_key": "the service calls engines without a key, on addresses that are not public",
    "admin_api_key": "the service calls engines without a key, on addresses that are not public",
    "skip_tokenizer_init": "engines find stop texts, for which they need their tokenizer",
}
"""SGLang's options that are never passed through, and why."""
ROUTER_OWNED = {
    "worker_urls": "it follows from the engines",
    "prefill_urls": "it follows from the engines",
    "decode_urls": "it follows from the engines",
    "prefill": "it follows from the engines",
    "decode": "it follows from the engines",
    "pd_disaggregation": "it follows from the engines",
    "host": "palestra chooses where the router listens",
    "port": "palestra chooses where the router listens",
    "policy": "it is rollout.router_policy",
    "disable_retries": "the service repeats requests itself, since it knows their tokens: it is always on",
    "retry_max_retries": "the service repeats requests itself, since it knows their tokens",
    "disable_circuit_breaker": "the service takes engines out of routing itself: it is always on",
    "health_check_endpoint": "/model_info: the others make an engine sample, and fail while it is paused",
    "disable_health_check": "the service needs to know which engines are ready",
    "mini_lb": "it is a test's router",
    "service_discovery": "engines are given by name",
    "api_key": "the service calls engines without a key, on addresses that are not public",
    "control_plane_api_keys": "the service lists and removes workers without a key",
    "prometheus_port": "palestra chooses where the router listens",
}
"""The routers' options that are never passed through, and why."""
TABLES = {"sglang": "sglang", "sglang-router": "router", "smg": "router"}
"""Kind -> name of its table."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of an upstream's command line."""

    name: str
    """Of the field that it sets, which is how tables write it."""
    flag: str
    form: Literal["flag", "value", "words"] = "value"
    """flag: it stands alone; value: one word follows; words: several do."""
    off: str | None = None
    """What switches it off, where it can be."""
    default: object = None
    aliases: tuple[str, ...] = ()


Fields = Mapping[str, Option]


def known(environment: EngineEnvironment, kind: Kind) -> Fields:
    """The options that an environment's SGLang or router has.

    Raises:
        EngineSetupError: it is not installed there, or cannot be loaded.
    """
    if kind == "smg" and not has_smg(environment):
        raise EngineSetupError(
            f"the router smg is not in {environment.folder}; install it with: "
            f"palestra engine install --{environment.device} --smg --into {environment.folder}"
        )
    try:
        listed: dict[str, Any] = json.loads((environment.folder / FIELDS).read_text())
    except (OSError, ValueError):
        listed = {}
    if kind not in listed:
        listed = read_fields(environment, "smg" if kind == "smg" else "engine")
    return fields_of(listed[kind])


def read_fields(environment: EngineEnvironment, which: Literal["engine", "smg"]) -> dict[str, Any]:
    """Asks the installed SGLang and router (`engine`), or `smg`, which options they have; about 15 s.

    Raises:
        EngineSetupError: they cannot be loaded.
    """
    said = ask(environment, [str(STANDINS / "fields.py"), which], 300).strip().splitlines()
    try:
        fields: dict[str, Any] = json.loads(said[-1])
    except (ValueError, IndexError):
        raise EngineSetupError(
            f"{environment.folder} does not say which options its engines have: {said[-3:]}"
        ) from None
    return fields


def fields_of(listed: Mapping[str, Mapping[str, Any]]) -> Fields:
    """Options as `standins/fields.py` prints them."""
    return {
        name: Option(name, said["flag"], said["form"], said["off"], said["default"], tuple(said["aliases"]))
        for name, said in listed.items()
    }


def check(table: Mapping[str, object], kind: Kind, fields: Fields, *, where: str = "", overrides: bool = False) -> None:
    """Refuses what cannot be passed through. `overrides`: the table is a group's of a topology file, which may give for that group what
    a field of ours gives for all. `where` names the table in errors; "" for `[sglang]` or `[router]`.

    Raises:
        EngineSetupError: the upstream has no such option, palestra decides it, or it takes no such value.
    """
    where = where or f"[{TABLES[kind]}]"
    for written, value in table.items():
        option = _option(written, fields)
        if option is None:
            names = [*fields, *(alias for each in fields.values() for alias in each.aliases)]
            near = difflib.get_close_matches(_plain(written), names, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise EngineSetupError(f"{where}: {kind} has no option {written}{meant}")
        owned = OWNED if kind == "sglang" else ROUTER_OWNED
        if option.name in owned:
            raise EngineSetupError(f"{where} {written} is not passed through: {owned[option.name]}")
        if kind == "sglang" and not overrides and option.name in DECIDED:
            raise EngineSetupError(f"{where} {written} is {DECIDED[option.name]} in palestra; set that")
        _check_value(f"{where} {written}", option, value)


def argv_of(options: Mapping[str, object], fields: Fields | None = None) -> tuple[str, ...]:
    """The words of a command line: flags alone, lists as several words or as JSON (as the option has it), None left out. Without `fields`
    an option is written as its name with dashes.

    Raises:
        EngineSetupError: an option cannot be switched off, or is not among `fields`.
    """
    words: list[str] = []
    for name, value in options.items():
        option = _guess(name, value) if fields is None else _option(name, fields)
        if option is None:
            raise EngineSetupError(f"{name} is no option of the installed version")
        if value is None:
            continue
        _check_value(name, option, value)
        if isinstance(value, bool):
            words += [option.flag] if value else [option.off] if option.off else []
        elif isinstance(value, list | tuple) and option.form == "words":
            words += [option.flag, *map(str, value)]
        elif isinstance(value, list | tuple | Mapping):
            words += [option.flag, json.dumps(value)]
        else:
            words += [option.flag, str(value)]
    return tuple(words)


def merged(fields: Fields | None, *tables: Mapping[str, object]) -> dict[str, object]:
    """Tables as one, later ones first; aliases and dashes become the field's name, so that one option is never written twice."""
    found: dict[str, object] = {}
    for table in tables:
        for written, value in table.items():
            option = None if fields is None else _option(written, fields)
            found[_plain(written) if option is None else option.name] = value
    return found


def take(argv: Sequence[str]) -> tuple[list[str], dict[str, object], dict[str, object]]:
    """Takes `--sglang-X [VALUE ...]` and `--router-X [VALUE ...]` out of a command line: what is left, and the two tables. Values go on to
    the next word that begins with two dashes; numbers, true and false are read as such, and an option alone is true."""
    left: list[str] = []
    tables: dict[str, dict[str, object]] = {"sglang": {}, "router": {}}
    words = list(argv)
    while words:
        word = words.pop(0)
        prefix = next((name for name in tables if word.startswith(f"--{name}-")), None)
        if prefix is None:
            left.append(word)
            continue
        name, given, value = word.removeprefix(f"--{prefix}-").partition("=")
        values = [_read(value)] if given else []
        while not given and words and not words[0].startswith("--"):
            values.append(_read(words.pop(0)))
        tables[prefix][_plain(name)] = True if not values else values[0] if len(values) == 1 else values
    return left, tables["sglang"], tables["router"]


def _check_value(where: str, option: Option, value: object) -> None:
    if option.form == "flag" and value is not None and not isinstance(value, bool):
        raise EngineSetupError(f"{where} is a switch: true or false, not {value!r}")
    if value is False and option.form == "flag" and option.default is True and option.off is None:
        raise EngineSetupError(f"{where} cannot be switched off: it is on unless another option says otherwise")
    # Options without a flag are a router's fields, which may well be true or false.
    if option.form != "flag" and option.flag and isinstance(value, bool):
        raise EngineSetupError(f"{where} takes a value, not {str(value).lower()}")


def _option(written: str, fields: Fields) -> Option | None:
    name = _plain(written)
    return fields.get(name) or next((each for each in fields.values() if name in each.aliases), None)


def _guess(name: str, value: object) -> Option:
    form: Literal["flag", "value", "words"]
    form = "flag" if isinstance(value, bool) else "words" if isinstance(value, list | tuple) else "value"
    return Option(name, "--" + name.replace("_", "-"), form)


def _plain(written: str) -> str:
    return written.replace("-", "_")


def _read(word: str) -> object:
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if isinstance(value, bool | int | float | list | dict) else word
