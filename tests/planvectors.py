"""The vectors of data/plan/golden.json, and what computes each kind of them with the planner's own functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from palestra.cli.planner import flow, memory
from palestra.cli.planner import model as shapes
from palestra.cli.planner.memory import GIB
from palestra.cli.planner.presets import MODELS
from palestra.trainer.layout.types import Layout, ModelDims

Values = Mapping[str, Any]
GB = 10**9
VECTORS = json.loads((Path(__file__).parent / "data/plan/golden.json").read_text(encoding="utf-8"))


def _parameters(it: Values) -> Values:
    found = shapes.parameters(MODELS[it["preset"]])
    return {name: getattr(found, name) for name in ("total", "active", "routed", "dense")}


def _cache(it: Values) -> Values:
    return {"bytes": shapes.kv_token_bytes(MODELS[it["preset"]], it["attn_tp"], it["kv_bits"])}


def _slot(it: Values) -> Values:
    return {
        "bytes": shapes.state_slot_bytes(MODELS[it["preset"]], it["attn_tp"], it["ssm_bits"], it["conv_bits"]),
    }


def _boot_log(it: Values) -> Values:
    heads, size = it["heads"], it["head_dim"]
    dims = ModelDims(
        layers=it["layers"],
        hidden=heads * size,
        heads=heads,
        kv_heads=heads,
        head_dim=size,
        vocab=1,
        linear_layers=it["layers"],
        lin_k_heads=heads,
        lin_v_heads=heads,
        lin_k_dim=size,
        lin_v_dim=size,
        lin_conv=it["conv"],
        linear_kind="kda",
    )
    slots = it["slots_allocated"]
    return {
        "ssm_gib": shapes.state_slot_bytes(dims, 1, it["ssm_bits"], 0) * slots / GIB,
        "conv_gib": shapes.state_slot_bytes(dims, 1, 0, it["conv_bits"]) * slots / GIB,
        # One slot of those is nobody's.
        "max_running": (slots - 1) // 5,
    }


def _state(it: Values) -> Values:
    layout = Layout(
        it["gpus"], it["tp"], it["pp"], 1, it["cp"], it["ep"], it["etp"], True, it.get("first"), it.get("last")
    )
    each = memory.StateBytes(it.get("w", 2), it.get("g", 4), it.get("o", 12))
    found = memory.training_state(MODELS[it["preset"]], layout, each, it.get("offload", 0.0))
    worst = max(found, key=lambda stage: stage.gpu_bytes)
    return {
        "dp": layout.dp,
        "edp": layout.edp,
        "stage_layers": [stage.layers for stage in found],
        "worst_stage": worst.stage,
        "dense_params": round(worst.dense_parameters),
        "expert_params": round(worst.expert_parameters),
        "gpu_gib": worst.gpu_bytes / GIB,
        "host_gib_per_gpu": max(stage.host_bytes for stage in found) / GIB,
    }


def _layer(it: Values) -> Values:
    model, tp = MODELS[it["preset"]], it["tp"]
    return {
        "layer": memory.layer_bytes(model, tp=tp, etp=it["etp"], sp=it["sp"], moe=model.experts > 0),
        "logits_with_entropy": memory.logits_bytes(model, tp, entropy=True),
        "logits_without": memory.logits_bytes(model, tp, entropy=False),
    }


def _activations(it: Values) -> Values:
    model, layers = MODELS[it["preset"]], it.get("layers")
    found = memory.activations(
        model,
        Layout(it["tp"], it["tp"], it.get("pp", 1), cp=it.get("cp", 1), sp=it["tp"] > 1),
        tokens=it["tokens"],
        layers=layers or model.layers,
        dense_layers=0 if model.experts else layers or model.layers,
        microbatches=it.get("microbatches", 4),
        recompute=it["recompute"],
        last=layers is None,
        entropy=it.get("entropy", True),
        imbalance=1.0,
    )
    return {"gib": found.total / GIB}


def _pool(it: Values) -> Values:
    model, tp = MODELS[it["preset"]], it["tp"]
    found = memory.engine_pool(
        memory_bytes=it["gpu_bytes"],
        fraction=it["mem_fraction"],
        weights=memory.engine_weights(model, gpus=tp, ep=it.get("ep", 1), weight_bytes=it.get("weight_bytes", 2)),
        kv_bytes=shapes.kv_token_bytes(model, tp, it.get("kv_bits", 16)),
        slot_bytes=shapes.state_slot_bytes(model, tp),
        ratio=it.get("ratio", 0.9),
        slots_per_request=it.get("slots_per_request", 5),
    )
    return {
        "weights_gib": found.weights / GIB,
        "rest_gib": found.rest / GIB,
        "kv_tokens": found.kv_tokens,
        "state_slots": found.state_slots,
        "max_running": found.max_running,
    }


def _ratio(it: Values) -> Values:
    model = MODELS[it["preset"]]
    slot, token = shapes.state_slot_bytes(model), shapes.kv_token_bytes(model)
    return {
        "ratio": memory.balanced_ratio(slot, token, it["context"], it["slots"]),
        "token_equiv": slot / token,
    }


def _narrow_cache(it: Values) -> Values:
    def held(kv_bytes: float) -> float:
        return memory.cached_bytes(it["N"], kv_bytes, it["K"], it["c_R"]) / GIB

    return {"bf16_gib": held(it["c_A"]), "fp8_gib": held(it["c_A"] / 2)}


def _touched(it: Values) -> Values:
    return {"expected": flow.experts_touched(it["experts"], it["topk"], it["batch"])}


def _decode(it: Values) -> Values:
    found = flow.decode_step(
        MODELS[it["preset"]],
        gpus=it["tp"],
        batch=it["batch"],
        context=it["context"],
        hbm=it["hbm"],
        flops=it["flops"],
    )
    return {
        "mem_ms": found.memory_s * 1e3,
        "flop_ms": found.compute_s * 1e3,
        "ceiling_tok_s": round(it["batch"] / found.seconds),
    }


def _train(it: Values) -> Values:
    return {
        "seconds": flow.train_seconds(
            MODELS[it["preset"]],
            tokens=it["tokens"],
            gpus=it["gpus"],
            flops=it["peak"],
            mfu=it["mfu"],
            full_recompute=it["full_recompute"],
            extra_forwards=it["extra_forwards"],
            pp=it["pp"],
            microbatches=it["microbatches"],
            vpp=it["vpp"],
        )
    }


def _publish(it: Values) -> Values:
    assert it["bytes"] == shapes.parameters(MODELS[it["preset"]]).total * 2
    return {"seconds": flow.publish_seconds(it["bytes"], it["bandwidth"], it["t0"])}


def _delta(it: Values) -> Values:
    found = flow.delta_seconds(
        it["bytes"],
        disk=it["disk"],
        diff_rate=it["diff_rate"],
        apply_rate=it["apply_rate"],
        density=it["rho"],
        t0=it["t0"],
    )
    return {"full": found.full_s, "delta": found.delta_s, "break_even_rho": found.break_even}


def _step(it: Values) -> Values:
    found = flow.step_times(it["t_R"], it["t_T"], it["t_W"])
    return {"sync": found.sync, "async_floor": found.overlapped, "speedup": found.speedup}


def _cap(it: Values) -> Values:
    version, staleness, batch = it["version"], it["max_staleness"], it["batch"]
    flight = flow.in_flight(rollouts=batch, period_s=1, duration_s=1, staleness=staleness)
    return {"admitted_total": flow.admitted(version, staleness, batch), "in_flight_or_queued": flight.cap}


def _little(it: Values) -> Values:
    found = flow.in_flight(
        rollouts=it["rollouts"], period_s=it["period"], duration_s=it["duration"], staleness=it["max_staleness"]
    )
    return {
        "in_flight": found.demand,
        "cap": found.cap,
        "idle_fraction": found.idle,
        "versions_per_rollout": found.versions,
    }


def _rate(it: Values) -> Values:
    return {
        "rate": flow.pd_rate(
            prefill=it["n_prefill"],
            prefill_rate=it["mu_prefill"],
            decode=it["n_decode"],
            decode_rate=it["mu_decode"],
            kv_bytes=it["kv_bytes"],
            kv_bandwidth=it["kv_bandwidth"],
        )
    }


def _split(it: Values) -> Values:
    return dict(
        zip(("n_prefill", "rate"), flow.best_split(it["engines"], it["mu_prefill"], it["mu_decode"]), strict=True)
    )


def _hicache(it: Values) -> Values:
    return {"saved_s": flow.hicache_saved(it["hit"], it["prefill_s"], it["io_s"], it["bookkeeping_s"])}


def _group(it: Values) -> Values:
    found = flow.group_prefix(it["group"], it["prompt"], it["response"])
    return {
        "hit": found.hit,
        "prefill_saved": found.saved,
        "kv_shared": found.shared_tokens,
        "kv_unshared": found.unshared_tokens,
        "ratio": found.shared_tokens / found.unshared_tokens,
    }


def _turns(it: Values) -> Values:
    found = flow.turn_prefix(it["prompt"], it["assistant"], it["observation"], it["turns"])
    return {"prompt_tokens": found.prompt_tokens, "new_tokens": found.new_tokens, "hit": found.hit}


def _variance(it: Values) -> Values:
    wasted = flow.zero_variance(it["success"], it["group"])
    return {"zero_variance": wasted, "groups_to_submit": flow.groups_to_submit(it["groups"], wasted)}


def _boxes(it: Values) -> Values:
    return {"boxes": flow.boxes_needed(it["episodes_per_s"], it["create"], it["busy"], it["destroy"])}


def _checkpoints(it: Values) -> Values:
    one = memory.checkpoint_bytes(MODELS[it["preset"]], it["bytes_per_param"])
    return {"one_gb": one / GB, "kept_gb": memory.kept_checkpoint_bytes(one, it["keep"]) / GB}


def _records(it: Values) -> Values:
    model = MODELS[it["preset"]]
    return {
        "bytes_per_token": memory.record_bytes_per_token(model, True) - memory.record_bytes_per_token(model),
    }


FORMULAS: Mapping[str, Callable[[Values], Values]] = {
    "F1 parameters": _parameters,
    "F2 kv bytes per token per GPU": _cache,
    "F3 state slot bytes": _slot,
    "F3 + engine boot log": _boot_log,
    "F4 training state": _state,
    "F5 activation bytes/token/layer": _layer,
    "F5 activation total, pp=1": _activations,
    "F5 stage 0 of 4": _activations,
    "F6 engine pool": _pool,
    "F6 hybrid pool r=0.9": _pool,
    "F6 balanced ratio": _ratio,
    "F6 fp8 kv in a hybrid": _narrow_cache,
    "F7 experts touched": _touched,
    "F7 decode roofline": _decode,
    "F8 training time": _train,
    "F9 weight transfer": _publish,
    "F9 delta": _delta,
    "F10 step time": _step,
    "F11 staleness cap": _cap,
    "F11 Little": _little,
    "F12 PD flow": _rate,
    "F12 best split": _split,
    "F13 HiCache": _hicache,
    "F14 group prefix": _group,
    "F14 turns": _turns,
    "F15 zero variance": _variance,
    "F16 sandboxes": _boxes,
    "F17 checkpoints": _checkpoints,
    "F17 routing record": _records,
}
