"""P201 to P206, P218, P220, P221, P223, P229: how ranks, heads and experts are divided, and what nodes and copies make of it."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.planner.case import Case
from palestra.cli.planner.fitting import Changes
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.cli.planner.rules.mending import mended, ranks
from palestra.envs.findings import Hit, Severity
from palestra.trainer.layout import rules
from palestra.trainer.layout.numbers import divisors, mesh_step, nearest, row_multiple

RULES = Rules()
MOST = 12
"""How many values of one field are tried."""


def _tensor_sizes(case: Case, most: int | None = None) -> Iterator[Changes]:
    """Tensor parallel sizes that divide the query heads, the closest first; experts that followed go on following."""
    wanted, follows = case.layout.tp, case.layout.etp == case.layout.tp > 1
    for size in nearest(divisors(case.model.heads), wanted)[:MOST]:
        if size == wanted or (most is not None and size > most):
            continue
        change: dict[str, object] = {"train.tp": size}
        if case.input.train.sp is not None and case.sp != (size > 1):
            change["train.sp"] = size > 1
        yield change
        if follows:
            yield {**change, "train.etp": size}


def _expert_sizes(case: Case) -> Iterator[Changes]:
    """Expert parallel sizes that divide the experts, the closest first."""
    for size in nearest(divisors(max(1, case.model.experts)), case.layout.ep)[:MOST]:
        yield {"train.ep": size}


def _counts(case: Case) -> Iterator[Changes]:
    """Numbers of training GPUs that both meshes divide, the closest first and of two the larger one; none without GPUs."""
    step = mesh_step(case.layout)
    below = case.train_gpus // step * step
    for count in (below + step, below, below + 2 * step, below - step):
        if count > 0 and not case.on_cpu:
            yield {"placement.train_gpus": count}
            if case.colocated and case.input.placement.rollout_gpus is not None:
                yield {"placement.train_gpus": count, "placement.rollout_gpus": count}


@RULES.rule(
    "P201",
    ERROR,
    "train.tp",
    title="training's ranks are not a multiple of TP*PP*CP",
    why="megatron-core's initialize_model_parallel raises: each copy of the model takes TP*PP*CP ranks, and none may be left over.",
    recipe="qwen3-4b",
    fails={"train.tp": 4, "placement.train_gpus": 6},
    after=("P204", "P205", "P217"),
)
def dense_mesh(case: Case) -> Iterator[Hit]:
    """Suggests a number of GPUs, or else another TP, or no context parallelism."""
    for hit in rules.dense_mesh(case.model, ranks(case)):
        tries = [*_counts(case), *_tensor_sizes(case), {"train.cp": 1}, {"train.pp": 1, "train.vpp": 1}]
        yield mended(case, dense_mesh, hit, tries)


@RULES.rule(
    "P202",
    ERROR,
    "train.ep",
    title="training's ranks are not a multiple of ETP*EP*PP",
    why="Experts have a mesh of their own over the same ranks; megatron-core's initialize_model_parallel raises where it leaves some over.",
    recipe="qwen3-30b",
    fails={"train.ep": 16},
    after=("P203",),
)
def expert_mesh(case: Case) -> Iterator[Hit]:
    """Suggests another EP, or no ETP, or a number of GPUs."""
    for hit in rules.expert_mesh(case.model, ranks(case)):
        tries = [*_expert_sizes(case), {"train.etp": 1}, {"train.etp": case.layout.tp}, *_counts(case)]
        yield mended(case, expert_mesh, hit, tries)


@RULES.rule(
    "P203",
    ERROR,
    "train.ep",
    title="EP does not divide the experts",
    why="Each expert parallel rank holds the same number of experts; megatron-core asserts it, and refuses EP for a dense model.",
    recipe="qwen3-30b",
    fails={"train.ep": 3},
    after=("P102",),
)
def expert_split(case: Case) -> Iterator[Hit]:
    """Suggests a divisor that the mesh takes too."""
    for hit in rules.expert_split(case.model, case.layout):
        yield mended(case, expert_split, hit, _expert_sizes(case))


@RULES.rule(
    "P204",
    ERROR,
    "train.tp",
    title="TP does not divide the query heads",
    why="megatron-core's TransformerConfig raises: num_attention_heads must be a multiple of the tensor parallel size.",
    recipe="qwen3-4b",
    fails={"train.tp": 3, "placement.train_gpus": 6},
)
def query_heads(case: Case) -> Iterator[Hit]:
    """Suggests a divisor."""
    for hit in rules.query_heads(case.model, case.layout):
        yield mended(case, query_heads, hit, _tensor_sizes(case))


@RULES.rule(
    "P205",
    ERROR,
    "train.tp",
    title="key heads are neither a multiple nor a divisor of TP",
    why="megatron-core's TransformerConfig raises: a rank has whole key heads, or ranks share one; nothing lies between.",
    recipe="qwen3-4b",
    fails={
        "model.preset": "qwen2.5-0.5b",
        "train.tp": 7,
        "placement.train_gpus": 7,
        "rollout.gpus_per_engine": 1,
    },
    passes={"model.preset": "qwen2.5-0.5b"},
    after=("P101", "P204"),
)
def key_heads(case: Case) -> Iterator[Hit]:
    """Suggests a TP that fits both kinds of heads."""
    for hit in rules.key_heads(case.model, case.layout):
        yield mended(case, key_heads, hit, _tensor_sizes(case))


@RULES.rule(
    "P206",
    WARNING,
    "train.tp",
    title="more tensor parallel ranks than key heads",
    why="Ranks that share a key head each compute and hold its projection, and their gradients are reduced among them.",
    recipe="qwen3-30b",
    fails={"train.tp": 8},
    after=("P204", "P205"),
)
def replicated_keys(case: Case) -> Iterator[Hit]:
    """Suggests at most as many ranks as there are key heads."""
    for hit in rules.replicated_keys(case.model, case.layout):
        yield mended(case, replicated_keys, hit, _tensor_sizes(case, case.model.kv_heads))


@RULES.rule(
    "P218",
    NOTE,
    "train.cp",
    title="context parallelism pads each row",
    why="A row is cut into two parts for each context rank, so that causal attention costs each the same, and each part into equal pieces "
    "for sequence parallel ranks: its length becomes a multiple of lcm(2*CP, TP).",
    recipe="qwen3-235b",
    fails={},
    passes={"train.cp": 1, "train.max_tokens_per_gpu": 10240},
)
def padded_rows(case: Case) -> Iterator[Hit]:
    """The waste for rows of the mean length, any remainder being as likely."""
    if case.layout.cp > 1:
        multiple, row = row_multiple(case.layout), case.work.row_tokens
        mean = (multiple - 1) / 2
        yield Hit(
            f"each packed row is padded to a multiple of {multiple} tokens: {mean:g} on average, {mean / row:.2%} of a mean row of "
            f"{row:,.0f}"
        )


@RULES.rule(
    "P220",
    WARNING,
    "train.tp",
    title="tensor parallel groups cross nodes",
    why="Tensor parallel ranks exchange activations several times in each layer; between nodes that takes many times as long as "
    "within one.",
    recipe="qwen3-4b",
    fails={"hardware.gpus_per_node": 4, "hardware.nodes": 4, "placement.train_gpus": 16, "train.tp": 8},
    after=("P204",),
)
def tensor_nodes(case: Case) -> Iterator[Hit]:
    """Suggests a TP that a node holds."""
    node, size = case.input.hardware.gpus_per_node, case.layout.tp
    if not case.on_cpu and size > node:
        hit = Hit(f"TP = {size} crosses nodes of {node} GPUs", f"set train.tp = {node} or less, and use train.pp")
        yield mended(case, tensor_nodes, hit, _tensor_sizes(case, node))


@RULES.rule(
    "P221",
    WARNING,
    "train.ep",
    title="groups of experts cross nodes",
    why="Tokens travel to their experts and back in every layer. Public recipes for large models do it for EP all the same (so it "
    "is a note); "
    "with ETP every token also goes to several ranks at once.",
    recipe="qwen3-235b",
    fails={"train.ep": 4, "train.etp": 4},
    passes={"train.ep": 8},
)
def expert_nodes(case: Case) -> Iterator[Hit]:
    """A note where only EP crosses nodes."""
    node, layout = case.input.hardware.gpus_per_node, case.layout
    if case.on_cpu or layout.ep * layout.etp <= node:
        return
    hit = Hit(
        f"EP*ETP = {layout.ep}*{layout.etp} crosses nodes of {node} GPUs",
        "use a network between GPU memories (hardware.rdma)" if layout.etp == 1 else "set train.etp = 1",
        severity=Severity.NOTE if layout.etp == 1 else None,
    )
    if layout.etp > 1:
        sizes = [size for size in reversed(divisors(max(1, case.model.experts))) if size <= node]
        tries = [{"train.etp": 1}, *({"train.etp": 1, "train.ep": size} for size in sizes)]
        yield mended(case, expert_nodes, hit, tries)
    else:
        yield hit


@RULES.rule(
    "P223",
    NOTE,
    "placement.train_gpus",
    title="one copy of the model, or of each expert",
    why="The distributed optimizer shards its state over the copies of a parameter (DP*CP, and EDP for experts): a single one keeps "
    "all of it.",
    recipe="two-nodes",
    fails={},
    passes={"placement.train_gpus": 16, "hardware.nodes": 3},
    after=("P201", "P202"),
)
def single_copies(case: Case) -> Iterator[Hit]:
    """Two hits: of what is not an expert, and of experts."""
    if case.on_cpu:
        return
    layout, held = case.layout, case.state_bytes.optimizer
    if layout.dp * layout.cp == 1:
        yield Hit(
            f"DP*CP = 1: optimizer state is not sharded, {held} bytes a parameter in full",
            "train on more GPUs, or offload the optimizer (train.optimizer_offload)",
        )
    if case.model.experts and layout.edp == 1:
        yield Hit(
            f"EDP = 1: the optimizer state of experts is not sharded, {held} bytes a parameter in full",
            "train on more GPUs, or offload the optimizer (train.optimizer_offload)",
            path="train.ep",
        )


@RULES.rule(
    "P229",
    NOTE,
    "train.etp",
    title="experts are split by tensor parallelism",
    why="An expert's matrices are small: cut further they use a GPU badly, and every token goes to ETP ranks. More expert parallel "
    "ranks do "
    "the same for memory without either.",
    recipe="qwen3-30b",
    fails={"train.etp": 2, "train.ep": 4},
)
def expert_tensors(case: Case) -> Iterator[Hit]:
    """Suggests as many expert parallel ranks more."""
    size = case.layout.etp
    if size > 1 and case.model.experts:
        hit = Hit(f"ETP = {size} is rarely the right dimension", "scale train.ep first, with train.etp = 1")
        tries = [{"train.etp": 1, "train.ep": case.layout.ep * size}]
        yield mended(case, expert_tensors, hit, tries)
