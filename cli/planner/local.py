"""Memory of the path without GPUs: our trainer on megatron-core in float32 and our embedded engine, each a process of this machine. Pure.

The other formulas (F4, F5, F6) are of GPUs: 16 bits, a flash kernel, SGLang's pools. These read what our own code keeps, tensor by tensor,
and are held to it by tests/test_planner_local.py, which counts the saved tensors of real steps. All of it is bytes; nothing is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.cli.planner.model import kv_token_bytes, parameters
from palestra.cli.planner.workload import transport

if TYPE_CHECKING:
    from palestra.cli.planner.case import Case
    from palestra.trainer.layout.types import ModelDims

FLOAT = 4
"""Bytes of a number: the path knows float32 alone."""
TRAINER_RUNTIME = 340 * 2**20
"""Of the trainer before it has a model: Python, torch, megatron-core and what their first step compiles. Measured as 322 MiB after the
imports with torch 2.13; a guess elsewhere."""
ENGINE_RUNTIME = 375 * 2**20
"""The same of an embedded engine, with transformers. Measured as 364 MiB; a guess elsewhere."""
HEAP = 1.4
"""What glibc's heap takes for the tensors that live during a step: blocks that were given back in another order than taken stay with the
process. Measured between 1.1 and 1.4 with SmolLM2-135M; a guess elsewhere."""
FIRST_CAPACITY = 256
"""Tokens that a slot of the engine's workspace has room for at first (server/embedded/workspace.py); then it doubles."""
RUNNING, CACHED_TOKENS = 64, 32_768
"""Slots and pooled tokens of an engine whose file names none (cli/roles/engine.py)."""


@dataclass(frozen=True, slots=True)
class LocalState:
    """What the trainer keeps between micro-batches."""

    weights: int
    gradients: int
    """megatron-core's buffer of main gradients, of the weights' own type here: one number a parameter."""
    moments: int
    """Both of AdamW."""
    reference: int
    """Weights that a KL penalty is against; 0 without one."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.moments + self.reference


def local_state(model: ModelDims, *, reference: bool = False) -> LocalState:
    """F4 of the local path: exact for the families that the trainer knows. A tied output projection counts once; nothing is padded."""
    weights = FLOAT * parameters(model).total
    return LocalState(weights, weights, 2 * weights, weights if reference else 0)


def local_layer(model: ModelDims, *, moe: bool = False) -> int:
    """Bytes a token that one layer keeps for its backward pass. `moe`: a layer with experts.

    Numbers of float32, by where they are kept:
      a norm (torch's RMSNorm, two a layer): its input, its input over the root mean square, its output (kept by the projection after it),
        and one root;
      attention: queries, keys and values as they were projected; queries and keys after the rotary embedding; sine and cosine, for queries
        and keys apart; the output, and one logarithm a head. With norms of queries and keys their inputs over the root mean square, a
        root a head, and the queries once more, which megatron-core has to copy out of the projection;
      an MLP of width f: gate and up together (2f), silu (f), the up half again (f: megatron-core adds an offset of zero to it), their
        product (f), so 5f;
      experts: of each of the k copies of a token its input (h), the 5f, and the product times the router's probability (f); beside them
        indices and probabilities of the router.
    No score matrix is kept: torch's attention recomputes it.
    """
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norms = 2 * (3 * model.hidden + 1)
    attention = (queries + 2 * keys) + (queries + keys) + 4 * model.head_dim + queries + model.heads
    if model.qk_norm:
        attention += 2 * queries + keys + model.heads + model.kv_heads
    if not moe:
        return FLOAT * (norms + attention + 5 * model.ffn)
    experts = model.topk * (model.hidden + 6 * model.moe_ffn) + 5 * model.shared_ffn
    routing = 24 * model.topk + 5 * model.experts
    return FLOAT * (norms + attention + experts) + routing


@dataclass(frozen=True, slots=True)
class LocalActivations:
    """What one micro-batch takes, beyond the state, at the moment when it takes most: as its backward pass begins."""

    layers: int
    """Kept by the layers and the final norm."""
    masks: int
    """Who sees whom among rows that share beginnings: one float32 matrix of all nodes, which the layers share."""
    scored: int
    """Kept for log p of the predictions: their hidden states, and without pieces their log softmax."""
    passing: int
    """Gradients that live beside all that: of the logits and of the output projection, or of the last layer where that is more."""

    @property
    def saved(self) -> int:
        """What autograd holds when the forward pass is done."""
        return self.layers + self.masks + self.scored

    @property
    def total(self) -> int:
        """All of it."""
        return self.saved + self.passing


def local_activations(
    model: ModelDims, *, tokens: int, predictions: int, chunk: int = 0, masked: bool = True
) -> LocalActivations:
    """F5 of the local path.

    `tokens`: nodes of a micro-batch, a beginning that rows share counted once; `predictions`: trained tokens among them, the only ones with
    logits; `chunk`: predictions whose logits exist at a time, 0: all (train.logprob_chunk_tokens); `masked`: false for a single row, which
    is plainly causal.
    """
    moe = model.moe_layers
    each = (model.layers - moe) * local_layer(model) + (moe * local_layer(model, moe=True) if moe else 0)
    layers = tokens * (each + FLOAT * (2 * model.hidden + 1))
    masks = FLOAT * tokens * tokens if masked else 0
    states, table = predictions * FLOAT * model.hidden, FLOAT * model.vocab * model.hidden
    if chunk and predictions > chunk:
        piece = chunk * FLOAT * model.vocab
        # Pieces are computed again one by one: log softmax and two gradients of it beside what the projection's gradient has summed up to
        # so far, or one gradient beside that sum and what is added to it.
        scored, passing = states, max(3 * piece + table, piece + 2 * table)
    else:
        logits = predictions * FLOAT * model.vocab
        # Two gradients beside the log softmax; then one in its place, and with it those of projection and states.
        scored, passing = states + logits, max(2 * logits, table + states)
    inner = model.ffn or model.moe_ffn * model.topk
    return LocalActivations(layers, masks, scored, max(passing, FLOAT * tokens * (model.hidden + inner)))


def local_overhead(kept: LocalActivations, publishing: float = 0.0) -> float:
    """What the trainer's process takes beside its tensors: the runtime, what the heap does not give back, and what a transport of weights
    keeps (`publishing`). A guess."""
    return TRAINER_RUNTIME + (HEAP - 1) * kept.total + publishing


def local_total(state: LocalState, kept: LocalActivations, publishing: float = 0.0) -> float:
    """Resident memory of the trainer's process at its peak. An estimate."""
    return state.total + kept.total + local_overhead(kept, publishing)


def publishing_bytes(weights: float, transport: str, mode: str, bucket_bytes: int) -> float:
    """What a transport keeps from one publish to the next: two buckets where weights travel through memory, a copy of all of them where
    changes are looked for, nothing where a whole folder is written."""
    if mode == "delta":
        return weights
    return 0.0 if transport == "disk" else 2.0 * min(bucket_bytes, weights)


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """What an embedded engine takes."""

    weights: float
    workspace: float
    """A slot for each running request, all as long as the longest has needed: written as they are made, so resident at once."""
    store: float
    """Pages of beginnings that outlive their request, at most: the system gives them memory as they fill."""
    passing: float
    """New weights beside those in force, or the old workspace beside one of twice its size, whichever is more."""

    @property
    def cache(self) -> float:
        """Keys, values and routed experts."""
        return self.workspace + self.store

    @property
    def total(self) -> float:
        """Resident memory of the process at its peak, an estimate."""
        return self.weights + self.cache + self.passing + ENGINE_RUNTIME


def slot_tokens(longest: int, context: int) -> int:
    """Tokens that a slot has room for once a request of `longest` tokens has run."""
    room = FIRST_CAPACITY
    while room < longest:
        room *= 2
    return min(room, context)


def _cached(model: ModelDims) -> int:
    """Bytes of keys and values of a token: of latent attention each head's, as wide as the wider of the two."""
    if not model.mla:
        return kv_token_bytes(model, bits=32)
    return FLOAT * model.layers * 2 * model.heads * max(model.nope_dim + model.rope_dim, model.v_dim)


def engine_memory(model: ModelDims, *, slots: int, pooled_tokens: int, longest: int, context: int) -> LocalEngine:
    """F6 of the local path. `slots`: requests that may run (rollout.max_running); `pooled_tokens`: rollout.max_total_tokens; `longest`:
    tokens of the longest request; `context`: rollout.context_len."""
    weights = FLOAT * parameters(model).total
    # Routed experts are kept as 16-bit numbers beside keys and values, in every layer.
    token = _cached(model) + (2 * model.layers * model.topk if model.experts else 0)
    room = slot_tokens(longest, context)
    workspace = slots * room * token
    grown = workspace / 2 if room > FIRST_CAPACITY else 0.0
    return LocalEngine(weights, workspace, pooled_tokens * token, max(weights, grown))


def local_tokens(case: Case) -> tuple[int, int, bool]:
    """Nodes and predictions of the largest micro-batch of a case, and whether it holds more than one row. A row that is longer than
    train.max_tokens_per_gpu is a micro-batch of its own."""
    tokens = max(case.max_tokens_per_gpu, case.longest_row)
    work, group = case.work, max(1, case.input.algo.group_size)
    distinct = work.prompt / group + work.turns * (work.response + work.observation)
    share = min(1.0, work.sampled / distinct) if distinct > 0 else 1.0
    return tokens, round(tokens * share), case.rollouts > 1 and tokens > work.row_tokens


def local_kept(case: Case) -> LocalActivations:
    """F5 of the local path, of a case's largest micro-batch."""
    tokens, predictions, masked = local_tokens(case)
    chunk = case.input.train.logprob_chunk_tokens
    return local_activations(case.model, tokens=tokens, predictions=predictions, chunk=chunk, masked=masked)


def local_held(case: Case) -> LocalState:
    """F4 of the local path, of a case: with a reference where a KL penalty is asked for."""
    reference = case.input.algo.kl_coef > 0 or case.input.placement.reference == "shared"
    return local_state(case.model, reference=reference)


def local_publishing(case: Case) -> float:
    """What a case's transport of weights keeps in the trainer."""
    given = case.input.weights
    return publishing_bytes(FLOAT * case.parameters.total, transport(case), given.mode, given.bucket_bytes)


def local_engine(case: Case) -> LocalEngine | None:
    """F6 of the local path, of one of a case's engines; None where they are not embedded."""
    rollout = case.input.rollout
    if rollout.engine != "embedded" or not case.engines:
        return None
    return engine_memory(
        case.model,
        slots=rollout.max_running or RUNNING,
        pooled_tokens=rollout.max_total_tokens or CACHED_TOKENS,
        longest=case.longest_row,
        context=rollout.context_len,
    )
