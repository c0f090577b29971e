"""P1xx: what a model's dimensions say of themselves, of its context, and of the engine that is to sample from it.

Dimensions are facts about a checkpoint, so that few of these findings can suggest a value.
"""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.planner.case import Case
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.envs.findings import Hit
from palestra.trainer.layout import shapes

RULES = Rules()
NEAR = 0.9
"""Share of the trained positions from which a context counts as long."""


@RULES.rule(
    "P101",
    ERROR,
    "model.heads",
    title="query heads are not a multiple of key heads",
    why="Grouped attention gives each key head the same number of query heads; no kernel has another form, so that the dimensions cannot "
    "be those of a model.",
    recipe="qwen3-4b",
    fails={"model.heads": 36, "model.override": True},
)
def grouped_heads(case: Case) -> Iterator[Hit]:
    """Of attention that is not latent."""
    yield from shapes.grouped_heads(case.model)


@RULES.rule(
    "P102",
    ERROR,
    "model.topk",
    title="a token goes to more experts than there are, or to none",
    why="The router's top-k fails on the first token; with none, no token would go through an expert.",
    recipe="qwen3-30b",
    fails={"model.topk": 0, "model.override": True},
)
def routed_experts(case: Case) -> Iterator[Hit]:
    """Of a model with experts."""
    yield from shapes.routed_experts(case.model)


@RULES.rule(
    "P103",
    ERROR,
    "model.moe_ffn",
    title="experts without a width, or a width without experts",
    why="Parameters and memory of the experts follow from both; one of them alone counts a model that does not exist.",
    recipe="qwen3-30b",
    fails={"model.moe_ffn": 0, "model.override": True},
)
def expert_width(case: Case) -> Iterator[Hit]:
    """One of the two is missing."""
    yield from shapes.expert_width(case.model)


@RULES.rule(
    "P104",
    ERROR,
    "model.dense_layers",
    title="more layers of a kind than the model has",
    why="Leading dense layers and layers of linear attention are counted within model.layers; counts beyond it make every formula wrong.",
    recipe="deepseek-v3",
    fails={"model.dense_layers": 62, "model.override": True},
)
def layer_counts(case: Case) -> Iterator[Hit]:
    """Dense layers, or those of linear attention."""
    yield from shapes.layer_counts(case.model)


@RULES.rule(
    "P105",
    ERROR,
    "model.lin_v_heads",
    title="value heads of linear attention are not a multiple of its key heads",
    why="megatron-core's TransformerConfig asserts it for a gated delta net (read in 0.16.1).",
    recipe="qwen3-next",
    fails={"model.lin_v_heads": 24, "model.override": True},
)
def shared_linear_heads(case: Case) -> Iterator[Hit]:
    """Of a model with linear attention."""
    yield from shapes.shared_linear_heads(case.model)


@RULES.rule(
    "P106",
    WARNING,
    "model.tied",
    title="a mixture of experts with tied embeddings, sampled by SGLang",
    why="SGLang 0.5.23's qwen3_moe never loads a tied output projection: every logprob comes back as -ln(vocabulary). Seen on a "
    "tiny model; "
    "other architectures were not tried.",
    recipe="qwen3-30b",
    fails={"model.tied": True, "model.override": True},
)
def tied_experts(case: Case) -> Iterator[Hit]:
    """The engine's logprobs would be those of a uniform distribution."""
    if case.model.tied and case.model.experts and case.input.rollout.engine == "sglang":
        yield Hit(
            f"embeddings are tied in a model of {case.model.experts} experts: SGLang may answer every token with one logprob",
            "save the checkpoint with an output projection of its own, or compare an engine's logprobs with the trainer's before the run",
        )


@RULES.rule(
    "P107",
    NOTE,
    "model.max_position",
    title="rollouts come near the longest position that the model was trained for",
    why="Beyond it positions are extrapolated, and near it few training texts were as long: quality falls before anything fails.",
    recipe="qwen3-4b",
    fails={
        "model.max_position": 10240,
        "model.override": True,
        "algo.max_prompt": 1536,
        "train.max_tokens_per_gpu": 10240,
    },
)
def long_context(case: Case) -> Iterator[Hit]:
    """The longest rollout takes more than nine tenths of the positions."""
    most, longest = case.model.max_position, case.longest_row
    if most and longest > NEAR * most:
        yield Hit(
            f"the longest rollout has {longest:,} tokens, {longest / most:.0%} of the {most:,} positions of the model",
            "shorten algo.max_prompt, max_response or max_turns, or take a model with a longer context",
        )


@RULES.rule(
    "P108",
    WARNING,
    "train.expert_bias_rate",
    title="the router's bias moves while routing is not replayed",
    why="The bias decides which experts a token goes to and no gradient sees it: engine and trainer route the same token "
    "differently between "
    "two publishes. slime's recipes for mixtures of experts set the rate to 0.",
    recipe="deepseek-v3",
    fails={"train.expert_bias_rate": 0.001},
)
def moving_bias(case: Case) -> Iterator[Hit]:
    """Training updates the bias, and does not replay the engine's routing."""
    train = case.input.train
    if case.model.expert_bias and train.expert_bias_rate > 0 and train.router_replay != "rollout":
        yield Hit(
            f"the router's bias moves by {train.expert_bias_rate:g} a step: engine and trainer route differently",
            'set train.expert_bias_rate = 0, or replay the engine\'s routing (train.router_replay = "rollout")',
            {"train.expert_bias_rate": 0.0},
        )


@RULES.rule(
    "P109",
    WARNING,
    "rollout.draft_tokens",
    title="an engine drafts with a head that is not trained",
    why="The policy moves away from the draft head with every step: fewer drafts are accepted, and each refused one was computed "
    "for nothing.",
    recipe="deepseek-v3",
    fails={"model.mtp_layers": 1, "model.override": True, "rollout.draft_tokens": 1},
    passes={"model.mtp_layers": 1, "model.override": True},
)
def stale_draft(case: Case) -> Iterator[Hit]:
    """Drafts come from layers that no loss trains."""
    drafts = case.input.rollout.draft_tokens
    if case.model.mtp_layers and drafts and not case.input.train.mtp_loss:
        yield Hit(
            f"the engine drafts {drafts} tokens with a head that is not trained: acceptance falls as the policy moves",
            "train it (train.mtp_loss = true), or set rollout.draft_tokens = 0",
            {"rollout.draft_tokens": 0},
        )
