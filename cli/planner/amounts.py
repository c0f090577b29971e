"""Memory of a plan as quantities: of training, stage by stage, and of an engine. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.planner.case import Case
from palestra.cli.planner.engines import EngineShape, mem_fraction
from palestra.cli.planner.local import ENGINE_RUNTIME, LocalEngine, local_engine, local_kept, local_tokens
from palestra.cli.planner.memory import FRAGMENTATION, RUNTIME_BYTES, StageState
from palestra.cli.planner.stating import estimate, exact
from palestra.cli.planner.training import StageMemory
from palestra.cli.planner.types import Grade, Quantity


def train_amounts(case: Case) -> Iterator[Quantity]:
    """Of each stage's GPU, of the fullest, of the host."""
    memories = case.stage_memories()
    if case.on_cpu:
        yield from _of_process(case, memories[0])
    else:
        for state, memory in zip(case.state, memories, strict=True):
            yield from _of_stage(case, f"train.stage.{state.stage}", state, memory)
    if not memories:
        return
    worst, measured = memories[case.worst_stage], case.input.workload.measured.peak_train_bytes
    yield Quantity(
        "train.gpu_bytes",
        case.worst_train_bytes,
        "bytes",
        "as it was measured" if measured else "F4 + F5 of the fullest stage, with fragmentation and runtime",
        {
            "stage": worst.stage,
            "state": worst.state,
            "activations": worst.activations,
            "logits": worst.logits,
            "overhead": worst.overhead,
        },
        Grade.ESTIMATE,
        None if measured else "workload.measured.peak_train_bytes",
    )
    if case.device is not None and case.device.memory_bytes:
        formula = (
            "as it was given"
            if case.input.hardware.gpu_mem_bytes
            else "of a table; hardware.gpu_mem_bytes takes what a card has"
        )
        yield exact("hardware.gpu_bytes", case.device.memory_bytes, "bytes", formula)
    if case.optimizer_host_bytes:
        yield exact(
            "train.host_bytes",
            case.optimizer_host_bytes,
            "bytes",
            "F4: of the optimizer on one node: ranks of a node * bytes of a rank of the fullest stage",
            ranks=min(case.input.hardware.gpus_per_node, case.train_gpus),
            rank=max(stage.host_bytes for stage in case.state),
        )


def _of_stage(case: Case, name: str, state: StageState, memory: StageMemory) -> Iterator[Quantity]:
    each = case.state_bytes
    held = {"dense": state.dense_parameters, "experts": state.expert_parameters}
    formula = "F4: (dense + experts) * bytes of a parameter's"
    yield exact(f"{name}.weights_bytes", memory.weights, "bytes", f"{formula} weight", **held, weight=each.weight)
    yield exact(
        f"{name}.gradients_bytes", memory.gradients, "bytes", f"{formula} gradient", **held, gradient=each.gradient
    )
    yield exact(
        f"{name}.optimizer_bytes",
        memory.optimizer,
        "bytes",
        "F4: (dense / (dp * cp) + experts / edp) * bytes of the optimizer * (1 - offload)",
        **held,
        dp=case.layout.dp,
        cp=case.layout.cp,
        edp=case.layout.edp,
        optimizer=each.optimizer,
        offload=case.input.train.optimizer_offload,
    )
    if memory.reference:
        yield exact(f"{name}.reference_bytes", memory.reference, "bytes", f"{formula} weight", **held)
    tokens = case.max_tokens_per_gpu
    yield estimate(
        f"{name}.activations_bytes",
        memory.activations,
        "bytes",
        "F5: of the layers, for the micro-batches under way",
        layers=state.layers,
        moe_layers=state.moe_layers,
        tokens=tokens,
    )
    if memory.logits:
        yield estimate(
            f"{name}.logits_bytes",
            memory.logits,
            "bytes",
            "F5: bytes of a token's logits * tokens whose logits exist at a time",
            tokens=tokens,
            chunk=case.input.train.logprob_chunk_tokens,
        )
    yield estimate(
        f"{name}.gpu_bytes",
        memory.total,
        "bytes",
        "(F4 + F5) * fragmentation + runtime",
        asked=memory.total - memory.overhead,
        fragmentation=FRAGMENTATION,
        runtime=RUNTIME_BYTES,
    )


def _of_process(case: Case, memory: StageMemory) -> Iterator[Quantity]:
    """Of the trainer's process, where there is no GPU: what is called a GPU's elsewhere is the host's here."""
    name, kept, parameters = "train.stage.0", local_kept(case), case.parameters.total
    formula = "F4, local: parameters * bytes of"
    yield exact(f"{name}.weights_bytes", memory.weights, "bytes", f"{formula} a weight", parameters=parameters)
    yield exact(f"{name}.gradients_bytes", memory.gradients, "bytes", f"{formula} a gradient", parameters=parameters)
    yield exact(f"{name}.optimizer_bytes", memory.optimizer, "bytes", f"{formula} two moments", parameters=parameters)
    if memory.reference:
        yield exact(f"{name}.reference_bytes", memory.reference, "bytes", f"{formula} a weight", parameters=parameters)
    tokens, predictions, _ = local_tokens(case)
    yield estimate(
        f"{name}.activations_bytes",
        memory.activations,
        "bytes",
        "F5, local: what the layers keep, and a mask in each of them",
        tokens=tokens,
        layers=kept.layers,
        masks=kept.masks,
    )
    yield estimate(
        f"{name}.logits_bytes",
        memory.logits,
        "bytes",
        "F5, local: what is kept of logits, and the gradients beside it",
        predictions=predictions,
        chunk=case.input.train.logprob_chunk_tokens,
        kept=kept.scored,
        gradients=kept.passing,
    )
    yield estimate(
        f"{name}.gpu_bytes",
        memory.total,
        "bytes",
        "F4 + F5, local, with the runtime and what the heap keeps",
        asked=memory.total - memory.overhead,
        overhead=memory.overhead,
    )


def _of_embedded(engine: LocalEngine) -> Iterator[Quantity]:
    """F6 of the local path."""
    yield exact("engine.weights_bytes", engine.weights, "bytes", "F6, local: parameters * 4")
    yield estimate(
        "engine.kv_bytes",
        engine.cache,
        "bytes",
        "F6, local: slots of the requests that run, and pages of beginnings that outlive theirs",
        workspace=engine.workspace,
        store=engine.store,
    )
    yield estimate(
        "engine.host_bytes",
        engine.total,
        "bytes",
        "F6, local: weights + caches + new weights or a growing workspace + runtime",
        weights=engine.weights,
        caches=engine.cache,
        passing=engine.passing,
        runtime=ENGINE_RUNTIME,
    )


def engine_amounts(case: Case) -> Iterator[Quantity]:
    """Of one GPU of an engine that samples, and of what rollouts ask of the engine."""
    engine = case.decoding
    if engine is None:
        return
    yield exact(
        "engine.count", engine.count, "1", "engines that sample: GPUs / gpus of one", gpus=engine.gpus * engine.count
    )
    yield exact("engine.kv_token_bytes", engine.kv_bytes, "bytes", "F2: per token and GPU", tp=engine.attention_tp)
    if engine.slot_bytes:
        yield exact("engine.slot_bytes", engine.slot_bytes, "bytes", "F3: a state, per GPU", tp=engine.attention_tp)
    embedded = local_engine(case) if case.on_cpu else None
    if engine.pool is not None:
        yield from _of_pool(case, engine)
    elif embedded is not None:
        yield from _of_embedded(embedded)
    else:
        weights = case.parameters.total * engine.weight_bytes
        formula = "F6: parameters * bytes of a weight"
        terms = {"parameters": case.parameters.total, "weight": engine.weight_bytes}
        yield exact("engine.weights_bytes", weights, "bytes", formula, **terms)
    held = case.held
    yield estimate(
        "engine.running",
        held.batch,
        "rollouts",
        "rollouts at a time / engines, rounded up",
        rollouts=case.running * engine.count,
        engines=engine.count,
    )
    if case.fit_running is not None:
        yield estimate(
            "engine.fit_running", case.fit_running, "rollouts", "F6, F14: room / what a rollout holds", each=held.each
        )
    terms = {"running": held.batch, "prompt": case.work.prompt, "sampled": case.work.sampled}
    formula = "F14: prompts, once a group where its rollouts meet, and half of what rollouts say and see"
    yield estimate("engine.held_tokens", held.shared, "tokens", formula, **terms, group=case.input.algo.group_size)
    formula = "F14: running * (prompt + half of what a rollout says and sees)"
    yield estimate("engine.held_tokens_unshared", held.unshared, "tokens", formula, **terms)


def _of_pool(case: Case, engine: EngineShape) -> Iterator[Quantity]:
    """F6."""
    pool, memory = engine.pool, case.device.memory_bytes if case.device else 0
    assert pool is not None
    dense, routed = case.parameters.dense, case.parameters.routed
    yield exact(
        "engine.weights_bytes",
        pool.weights,
        "bytes",
        "F6: (dense + routed) / gpus * bytes of a weight; attention once for each of its copies",
        dense=dense,
        routed=routed,
        gpus=engine.gpus,
        weight=engine.weight_bytes,
        copies=engine.replicas,
    )
    room, states = max(0.0, pool.rest), float(pool.state_slots * engine.slot_bytes)
    fraction = mem_fraction(case)
    terms = {"fraction": fraction, "memory": memory, "weights": pool.weights}
    yield exact("engine.pool_bytes", room, "bytes", "F6: fraction * memory - weights", **terms)
    yield exact("engine.kv_bytes", max(0.0, room - states), "bytes", "F6: pool - states", pool=room, states=states)
    yield exact(
        "engine.rest_bytes",
        (1 - fraction) * memory,
        "bytes",
        "(1 - fraction) * memory, for activations and graphs",
        fraction=fraction,
        memory=memory,
    )
    yield exact(
        "engine.kv_tokens",
        engine.kv_tokens,
        "tokens",
        "F6: kv / bytes of a token, times copies of attention",
        kv=max(0.0, room - states),
        token=engine.kv_bytes,
        copies=engine.replicas,
    )
    if engine.slot_bytes:
        ratio = case.input.rollout.state_ratio
        terms = {"slots": pool.state_slots, "slot": engine.slot_bytes, "ratio": ratio}
        yield exact("engine.state_bytes", states, "bytes", "F6: pool * ratio / (1 + ratio), in whole slots", **terms)
        yield exact("engine.state_slots", pool.state_slots, "1", "F6: states / bytes of a slot", **terms)
        if engine.max_running is not None:
            yield exact(
                "engine.max_running",
                engine.max_running,
                "rollouts",
                "F6: slots / slots of a request, times copies of attention",
                slots=pool.state_slots,
                each=engine.slots_per_request,
                copies=engine.replicas,
            )
