"""The `[megatron]` table of a run: TransformerConfig's own fields, passed on untouched after they were checked.

The field list is read from the installed megatron's source, not imported, so that a process without torch can check a configuration.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.trainer.types import TrainerError

SOURCES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
)
"""Files under megatron/core and the dataclass that each contributes."""

FROM_MODEL = "it comes from the model's config.json"
FROM_BACKEND = "the backend depends on its own value"
ONE_PROCESS = "not built: the backend trains in one process"
NO_AUX = "not built: the loss is normalised by rollouts, and megatron would scale the auxiliary loss by tokens"

OWNED: dict[str, str] = {
    **dict.fromkeys(
        (
            "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
            "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_layer_freq",
            "moe_router_score_function", "moe_shared_expert_intermediate_size", "normalization", "layernorm_epsilon",
            "qk_layernorm", "gated_linear_unit", "activation_func", "add_bias_linear", "add_qkv_bias",
            "multi_latent_attention", "mtp_num_layers", "softmax_scale", "window_size", "moe_router_enable_expert_bias",
            "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor", "rotary_interleaved",
            "glu_linear_offset", "no_rope_freq", "moe_apply_probs_on_input", "moe_input_jitter_eps", "activation_func_clamp_value",
            "apply_residual_connection_post_layernorm", "qk_l2_norm", "moe_router_force_load_balancing",
            "layernorm_zero_centered_gamma", "softmax_type",
        ),
        FROM_MODEL,
    ),
    **dict.fromkeys(
        (
            "params_dtype", "bf16", "fp16", "fp8", "fp4", "pipeline_dtype", "calculate_per_token_loss", "finalize_model_grads_func",
            "grad_scale_func", "hidden_dropout", "attention_dropout", "use_cpu_initialization", "moe_grouped_gemm",
            "moe_token_dispatcher_type", "moe_expert_capacity_factor", "transformer_impl", "perform_initialization",
        ),
        FROM_BACKEND,
    ),
    **dict.fromkeys(
        (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
            "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
        ),
        ONE_PROCESS,
    ),
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type"), NO_AUX),
}  # fmt: skip
"""Keys that cannot be passed through, and why."""


@functools.cache
def known_fields() -> frozenset[str]:
    """Every field of the installed TransformerConfig, inherited ones included.

    Raises:
        TrainerError: megatron-core is not installed.
    """
    # find_spec of a dotted name would import the parent; `megatron` is a namespace without code, so that is free.
    spec = importlib.util.find_spec("megatron")
    roots = [Path(root) / "core" for root in (spec.submodule_search_locations or [])] if spec else []
    root = next((folder for folder in roots if folder.is_dir()), None)
    if root is None:
        raise TrainerError("megatron-core is not installed: pip install 'palestra[train]'")
    return frozenset(name for file, cls in SOURCES for name in _class_fields(root / file, cls))


def _class_fields(path: Path, class_name: str) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return [
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def check_passthrough(table: Mapping[str, Any]) -> None:
    """Refuses a `[megatron]` table with unknown keys or keys that are set elsewhere. Imports neither torch nor megatron.

    Raises:
        TrainerError: names the key, and the nearest known one or where its value comes from.
    """
    for key in table:
        if key in OWNED:
            raise TrainerError(f"megatron.{key} cannot be set here: {OWNED[key]}")
        if key not in known_fields():
            near = difflib.get_close_matches(key, sorted(known_fields() | OWNED.keys()), n=1, cutoff=0.0)
            raise TrainerError(f"unknown field megatron.{key}; did you mean {near[0]}?")
