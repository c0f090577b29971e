"""P211 to P217, P224 to P228: what megatron-core refuses or gets wrong, by version, and options that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.planner.case import Case
from palestra.cli.planner.fitting import Changes
from palestra.cli.planner.rules.collect import ERROR, WARNING, Rules
from palestra.cli.planner.rules.mending import mended
from palestra.envs.findings import Hit, Severity
from palestra.trainer.layout import rules
from palestra.trainer.layout.numbers import divisors

RULES = Rules()
GIB = 2**30
ROOM = 0.85
"""Share of a GPU up to which training without recomputation is worth trying: what is beyond is for lengths that differ."""


@RULES.rule(
    "P211",
    ERROR,
    "train.sp",
    title="sequence parallelism without tensor parallelism, or experts and tensor parallelism without it",
    why="megatron-core's MoE layer raises in training with TP > 1 and sequence parallelism off; with TP = 1 there are no ranks to share a "
    "sequence.",
    recipe="qwen3-30b",
    fails={"train.sp": False},
)
def sequence_parallel(case: Case) -> Iterator[Hit]:
    """Suggests the other value."""
    for hit in rules.sequence_parallel(case.model, case.layout):
        yield mended(case, sequence_parallel, hit, [{"train.sp": not case.sp}])


@RULES.rule(
    "P212",
    ERROR,
    "train.etp",
    title="EP = 1 and another tensor parallel size for experts",
    why="Before 0.20 megatron-core reduces expert gradients over the wrong group: with TP > ETP each rank gets a part of them and "
    "copies of an "
    "expert drift apart, silently. Seen on 0.16.1 with gloo; Megatron-LM #5916.",
    recipe="qwen3-30b",
    fails={"model.layers": 4, "model.override": True, "train.ep": 1},
    passes={"model.layers": 4, "model.override": True, "train.ep": 1, "train.etp": 4},
)
def expert_gradients(case: Case) -> Iterator[Hit]:
    """Suggests ETP = TP, or expert parallelism."""
    for hit in rules.expert_gradients(case.model, case.layout, case.input.train.mcore_version):
        tries: list[Changes] = [{"train.etp": case.layout.tp}]
        tries += [{"train.ep": size} for size in divisors(case.model.experts)[1:8]]
        yield mended(case, expert_gradients, hit, tries)


@RULES.rule(
    "P213",
    WARNING,
    "train.etp",
    title="the gradient's norm leaves experts out",
    why="Before 0.20 megatron-core counts experts by the dense tensor parallel rank: clipping is weaker than set, and the reported "
    "norm is too "
    "small (11.51 for 12.28 in radixark/Megatron-LM #80; Megatron-LM #5916). Without grouped multiplication our own runs agreed to 2e-6.",
    recipe="qwen3-30b",
    fails={},
    passes={"train.mcore_version": "0.20.0"},
    after=("P212",),
)
def expert_norm(case: Case) -> Iterator[Hit]:
    """Nothing to suggest: the layout is a good one."""
    yield from rules.expert_norm(case.model, case.layout, case.input.train.mcore_version, case.grouped_gemm)


@RULES.rule(
    "P214",
    ERROR,
    "train.aux_loss_coef",
    title="a loss of the router beside a loss per token, with TP or CP",
    why="Before 0.20 megatron-core scales the router's losses by the tokens of one rank while the loss per token divides by all: "
    "their weight "
    "depends on TP and CP. Seen on 0.16.1; Megatron-LM #5047, #1652.",
    recipe="qwen3-30b",
    fails={"train.aux_loss_coef": 0.001},
)
def auxiliary_losses(case: Case) -> Iterator[Hit]:
    """Suggests to leave them out."""
    train = case.input.train
    given = {"train.aux_loss_coef": train.aux_loss_coef, "train.z_loss_coef": train.z_loss_coef}
    both = (train.aux_loss_coef, train.z_loss_coef)
    for hit in rules.auxiliary_losses(case.model, case.layout, train.mcore_version, both, train.per_token_loss):
        yield mended(case, auxiliary_losses, hit, [{path: 0.0 for path, value in given.items() if value}])


@RULES.rule(
    "P215",
    WARNING,
    "train.mtp_loss",
    title="the loss of draft layers beside a loss per token, over several copies",
    why="megatron-core divides the loss of multi-token prediction by each rank's own count of tokens (Megatron-LM #2417, #7452): "
    "copies with few "
    "tokens weigh more.",
    recipe="qwen3-next",
    fails={"model.mtp_layers": 1, "model.override": True, "train.mtp_loss": True},
)
def draft_losses(case: Case) -> Iterator[Hit]:
    """Suggests to leave it out."""
    train = case.input.train
    if train.mtp_loss and train.per_token_loss and case.layout.dp > 1:
        yield Hit(
            f"the draft layers' loss is divided by local counts on each of DP = {case.layout.dp} copies",
            "set train.mtp_loss = false",
            {"train.mtp_loss": False},
        )


@RULES.rule(
    "P216",
    ERROR,
    "train.cp",
    title="heads of linear attention that TP*CP does not divide",
    why="megatron-core's TransformerConfig asserts it for a gated delta net: both kinds of heads are spread over TP, and over CP "
    "where it is "
    "supported. 0.16.1 asserts CP = 1; 0.19.0 checks TP*CP; versions between count as the older one.",
    recipe="qwen3-next",
    fails={"train.cp": 2},
    after=("P105",),
)
def linear_heads(case: Case) -> Iterator[Hit]:
    """Suggests no context parallelism, or a TP that divides the heads."""
    for hit in rules.linear_heads(case.model, case.layout, case.input.train.mcore_version):
        layout = case.layout
        tries: list[Changes] = [{"train.cp": 1}] if layout.cp > 1 else []
        tries += [{"train.cp": size} for size in reversed(divisors(layout.cp)[1:-1])]
        tries += [{"train.tp": size} for size in reversed(divisors(layout.tp)[:-1])]
        tries += [{"train.tp": size, "train.cp": 1} for size in reversed(divisors(layout.tp)[:-1])]
        yield mended(case, linear_heads, hit, tries)


@RULES.rule(
    "P217",
    ERROR,
    "train.cp",
    title="context parallelism without GPUs",
    why="On a CPU attention is megatron-core's own local one, which asserts context_parallel_size == 1 and refuses packed rows; the "
    "fused kernels "
    "that split a sequence need a GPU.",
    recipe="laptop",
    fails={"train.cp": 2},
)
def local_context(case: Case) -> Iterator[Hit]:
    """Suggests none."""
    if case.on_cpu and case.layout.cp > 1:
        hit = Hit(f"CP = {case.layout.cp} on a CPU: local attention refuses it", "set train.cp = 1")
        yield mended(case, local_context, hit, [{"train.cp": 1}])


@RULES.rule(
    "P224",
    ERROR,
    "train.load_optimizer",
    title="going on with the optimizer of a checkpoint of another EP",
    why="With EP > 1 megatron-core chains two optimizers and its checkpoint's keys gain `chained_0.`: loading fails between EP = 1 "
    "and EP > 1 "
    "(seen on 0.16.1). Weights alone are read across every layout. Two sizes above 1 were not tried, and are a warning.",
    recipe="qwen3-30b",
    fails={"train.resume_ep": 1},
    passes={"train.resume_ep": 8},
)
def resharded_optimizer(case: Case) -> Iterator[Hit]:
    """Suggests to leave the optimizer's state behind."""
    train = case.input.train
    if not case.model.experts or train.resume_ep in (None, train.ep) or not train.load_optimizer:
        return
    one = 1 in (train.resume_ep, train.ep)
    yield Hit(
        f"the checkpoint's optimizer has EP = {train.resume_ep}, this run EP = {train.ep}: "
        + ("its keys do not fit" if one else "nobody tried whether it loads"),
        f"set train.load_optimizer = false, or train.ep = {train.resume_ep}",
        {"train.load_optimizer": False},
        severity=None if one else Severity.WARNING,
    )


@RULES.rule(
    "P225",
    WARNING,
    "train.dtype",
    title="fp8 training with the optimizer on the host",
    why="slime's low-precision notes: fp8 weights gathered as fp8 do not go with an optimizer that steps on the CPU.",
    recipe="qwen3-30b",
    fails={"train.dtype": "fp8"},
)
def offloaded_fp8(case: Case) -> Iterator[Hit]:
    """Suggests to keep the optimizer on the GPU where it fits, else bf16."""
    train = case.input.train
    if train.dtype == "fp8" and train.optimizer_offload > 0:
        hit = Hit(
            f"fp8 training with {train.optimizer_offload:.0%} of the optimizer on the host: weights cannot be gathered in fp8",
            'set train.optimizer_offload = 0, or train.dtype = "bf16"',
        )
        tries: list[Changes] = [{"train.optimizer_offload": 0.0}, {"train.dtype": "bf16"}]
        yield mended(case, offloaded_fp8, hit, tries)


@RULES.rule(
    "P226",
    ERROR,
    "train.critic",
    title="a critic that the estimator does not use, or PPO without one",
    why="PPO's advantages come from a value function; the other estimators take their baseline from the group, and a critic would "
    "only take "
    "memory.",
    recipe="qwen3-4b",
    fails={"train.critic": True},
)
def critic(case: Case) -> Iterator[Hit]:
    """Suggests the other value."""
    wanted, estimator = case.input.algo.estimator == "ppo", case.input.algo.estimator
    if wanted != case.input.train.critic:
        hit = Hit(
            f"algo.estimator = {estimator!r} " + ("needs a critic" if wanted else "uses no critic"),
            f"set train.critic = {str(wanted).lower()}",
        )
        yield mended(case, critic, hit, [{"train.critic": wanted}])


@RULES.rule(
    "P227",
    ERROR,
    "train.router_replay",
    title="replay of routing in a model without experts",
    why="There is no router whose choices could be recorded or replayed; megatron-core refuses the option for a dense model.",
    recipe="qwen3-4b",
    fails={"train.router_replay": "training"},
)
def replay_without_experts(case: Case) -> Iterator[Hit]:
    """Suggests none."""
    kind = case.input.train.router_replay
    if kind != "off" and not case.model.experts:
        yield Hit(
            f"train.router_replay = {kind!r} needs a model with experts",
            'set train.router_replay = "off"',
            {"train.router_replay": "off"},
        )


@RULES.rule(
    "P228",
    WARNING,
    "train.recompute",
    title="activations are computed again although they would fit",
    why="Full recomputation repeats the forward pass, a quarter of a step's arithmetic (8 in place of 6 operations a parameter and "
    "token, F8).",
    recipe="two-nodes",
    fails={},
    passes={"train.recompute": "none"},
    after=("P201", "P202", "P203", "P204", "P205", "P207", "P209"),
)
def needless_recompute(case: Case) -> Iterator[Hit]:
    """Suggests none where it leaves room."""
    if case.on_cpu or case.device is None or case.recompute != "full" or not case.state:
        return
    needed, there = max(case.train_bytes("none")), case.device.memory_bytes
    if needed <= ROOM * there:
        hit = Hit(
            f"full recomputation costs about a quarter of the step; without it the fullest GPU needs {needed / GIB:.1f} of "
            f"{there / GIB:.1f} GiB",
            'set train.recompute = "none", or "selective"',
        )
        yield mended(case, needless_recompute, hit, [{"train.recompute": "none"}])
