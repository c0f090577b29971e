"""P301 to P305, P308, P310 to P312: which GPUs there are, who has them, and whether they lie well on the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from palestra.cli.engines.rules import divisors, nearest, whole_nodes
from palestra.cli.planner.case import Case
from palestra.cli.planner.rules.collect import ERROR, WARNING, Rules
from palestra.cli.planner.rules.engine_words import sizes, workable
from palestra.envs.findings import Hit

RULES = Rules()


def gpus_needed(case: Case) -> int:
    """GPUs that training, rollout and reference take together."""
    own = case.train_gpus if case.mode == "external" else case.train_gpus + case.rollout_gpus
    return (max(case.train_gpus, case.rollout_gpus) if case.colocated else own) + case.reference_gpus


@RULES.rule(
    "P301",
    ERROR,
    "hardware.nodes",
    title="more GPUs are needed than there are",
    why="A Ray job that asks for more than the cluster has waits for ever, and what was started first holds what the rest waits for.",
    recipe="two-nodes",
    fails={"hardware.nodes": 1},
)
def too_few_gpus(case: Case) -> Iterator[Hit]:
    """Both pools and the reference, or the larger of the two where they are shared."""
    need, have = gpus_needed(case), case.gpus_there
    if not case.on_cpu and need > have:
        nodes = ceil(need / case.input.hardware.gpus_per_node)
        yield Hit(
            f"{need} GPUs are needed, {have} are there", f"set hardware.nodes = {nodes}", {"hardware.nodes": nodes}
        )


@RULES.rule(
    "P302",
    WARNING,
    "placement",
    title="GPUs are left idle",
    why="They are paid for. Counted from the fields: no process of the run would be placed on them.",
    recipe="qwen3-4b",
    fails={"hardware.nodes": 2},
    after=("P301", "P401", "P408"),
)
def idle_gpus(case: Case) -> Iterator[Hit]:
    """GPUs that no process has."""
    need, per_node = gpus_needed(case), case.input.hardware.gpus_per_node
    idle = case.gpus_there - need
    if not case.on_cpu and idle > 0:
        whole = need > 0 and need % per_node == 0
        yield Hit(
            f"{idle} of {case.gpus_there} GPUs are idle: training has {case.train_gpus}, the rollout {case.rollout_gpus}, "
            f"the reference {case.reference_gpus}" + (", shared in turns" if case.colocated else ""),
            f"set hardware.nodes = {need // per_node}" if whole else "give them to the rollout or to training",
            {"hardware.nodes": need // per_node} if whole else {},
        )
    taken = sum(engine.count * engine.gpus for engine in case.engines)
    if case.mode == "separate" and case.engines and taken < case.rollout_gpus:
        yield Hit(
            f"{case.rollout_gpus - taken} of the rollout's {case.rollout_gpus} GPUs are idle: its engines take {taken}",
            "start as many engines as there are GPUs for",
            {"rollout.engines": None},
            "rollout.engines",
        )


@RULES.rule(
    "P303",
    ERROR,
    "placement.rollout_gpus",
    title="a shared pool of which the rollout has another part than training",
    why="Whoever shares in turns hands over all GPUs; those that only one side has would idle in the other's turn, which is meant seldom.",
    recipe="qwen3-4b",
    fails={"placement.rollout_gpus": 4},
    passes={"placement.rollout_gpus": 4, "placement.allow_partial": True},
)
def partial_sharing(case: Case) -> Iterator[Hit]:
    """Colocated, with two numbers of GPUs."""
    if case.colocated and case.rollout_gpus != case.train_gpus and not case.input.placement.allow_partial:
        all_of_them = {"placement.rollout_gpus": case.train_gpus}
        fits = workable(case, "placement.rollout_gpus", [case.train_gpus]) and case.train_gpus >= case.rollout_gpus
        yield Hit(
            f"training has {case.train_gpus} GPUs and the rollout {case.rollout_gpus}, and they are shared",
            "give both the same number, or set placement.allow_partial",
            all_of_them if fits else {"placement.allow_partial": True},
        )


@RULES.rule(
    "P304",
    ERROR,
    "placement.mode",
    title="engines that run elsewhere, and fields that say which to start",
    why="An external deployment owns its topology: none of these fields would reach it.",
    recipe="two-nodes",
    fails={
        "placement.mode": "external",
        "placement.external_urls": ["http://10.0.0.1:30000"],
        "weights.transport": "disk",
    },
    passes={
        "placement.mode": "external",
        "placement.external_urls": ["http://10.0.0.1:30000"],
        "placement.rollout_gpus": None,
        "rollout.pd": None,
        "weights.transport": "disk",
    },
)
def external_topology(case: Case) -> Iterator[Hit]:
    """`[rollout.pd]`, a number of engines or GPUs of the rollout beside an external mode."""
    given = {
        "rollout.pd": case.input.rollout.pd is not None,
        "rollout.engines": case.input.rollout.engines is not None,
        "placement.rollout_gpus": bool(case.input.placement.rollout_gpus),
    }
    if case.mode == "external" and (named := [path for path, there in given.items() if there]):
        yield Hit(
            f"engines run elsewhere (placement.mode = external); of engines that are started here are: {', '.join(named)}",
            f"leave {', '.join(named)} out",
            dict.fromkeys(named),
        )


@RULES.rule(
    "P305",
    ERROR,
    "placement.mode",
    title="engines that run elsewhere, and nobody knows where",
    why="Without URLs there is nobody to send a request to.",
    recipe="qwen3-4b",
    fails={"placement.mode": "external", "weights.shared_dir": "/shared"},
    passes={
        "placement.mode": "external",
        "placement.external_urls": ["http://10.0.0.1:30000"],
        "weights.shared_dir": "/shared",
    },
)
def external_without_urls(case: Case) -> Iterator[Hit]:
    """External without a URL."""
    if case.mode == "external" and not case.external_urls:
        yield Hit("engines run elsewhere (placement.mode = external), and no URL of one is given", "give rollout.urls")


@RULES.rule(
    "P308",
    WARNING,
    "placement",
    title="an engine lies across nodes that could lie on one",
    why="Tensor parallel ranks exchange activations in every layer: between nodes over the network card. Our launcher never lets an engine "
    "straddle.",
    recipe="qwen3-4b",
    fails={
        "placement.mode": "separate",
        "placement.train_gpus": 6,
        "placement.rollout_gpus": 8,
        "rollout.gpus_per_engine": 4,
        "hardware.nodes": 2,
    },
    passes={
        "placement.mode": "separate",
        "placement.train_gpus": 8,
        "placement.rollout_gpus": 8,
        "rollout.gpus_per_engine": 4,
        "hardware.nodes": 2,
    },
    after=("P301", "P312", "P401", "P408"),
)
def straddling(case: Case) -> Iterator[Hit]:
    """Engines in a row behind the GPUs of training, on nodes of one size."""
    node = case.input.hardware.gpus_per_node
    if case.on_cpu or not sizes(case):
        return
    at, across = (0 if case.colocated else case.train_gpus), 0
    for engine in case.engines:
        for _ in range(engine.count):
            first, last = at // node, (at + engine.gpus - 1) // node
            across += last - first + 1 > ceil(engine.gpus / node)
            at += engine.gpus
    if across:
        apart = not case.colocated and case.train_gpus % node
        fix = f"give training whole nodes of {node} GPUs" if apart else f"take sizes that divide a node's {node} GPUs"
        total = sum(engine.count for engine in case.engines)
        yield Hit(f"{across} of {total} engines would lie across nodes of {node} GPUs", fix)


@RULES.rule(
    "P312",
    ERROR,
    "rollout.gpus_per_engine",
    title="an engine is larger than a node and no whole number of nodes",
    why="SGLang spreads an engine over nodes in equal parts, and our launcher gives such an engine whole nodes: it refuses others.",
    recipe="qwen3-4b",
    fails={"hardware.gpus_per_node": 6, "hardware.nodes": 2, "rollout.gpus_per_engine": 8},
    passes={"rollout.gpus_per_engine": 8},
    after=("P401", "P408"),
)
def broken_nodes(case: Case) -> Iterator[Hit]:
    """Suggests a size that divides a node, or whole nodes."""
    node = case.input.hardware.gpus_per_node
    for path, size in sizes(case):
        for finding in whole_nodes(size, node):
            below = [each for each in divisors(node) if each < size]
            best = nearest(size, workable(case, path, [*below, ceil(size / node) * node]))
            yield Hit(finding.message, finding.fix, {path: best} if best else {}, path)
            return


@RULES.rule(
    "P310",
    ERROR,
    "rollout.engine",
    title="training on what a foreign API answers",
    why="No ids and no logprobs of the sampled tokens come back: text that is encoded again is not what was sampled.",
    recipe="qwen3-4b",
    fails={"rollout.engine": "openai"},
)
def foreign_engine(case: Case) -> Iterator[Hit]:
    """An engine that answers in text."""
    if case.input.rollout.engine == "openai":
        yield Hit(
            "an OpenAI-compatible API gives text back, no ids: it serves evaluation only", "use rollout.engine = sglang"
        )


@RULES.rule(
    "P311",
    ERROR,
    "placement.mode",
    title="GPUs, or what needs them, of a machine that has none",
    why="There is nothing to place on, and NCCL and CUDA's shared memory exist between GPUs only.",
    recipe="laptop",
    fails={"placement.train_gpus": 4},
    passes={"weights.transport": "disk"},
)
def gpus_of_a_cpu(case: Case) -> Iterator[Hit]:
    """Without GPUs: a placement of them, a number of them, or a transport between them."""
    given = case.input.placement
    if case.input.hardware.gpu == "cpu" and given.mode not in (None, "cpu"):
        yield Hit(
            f"placement.mode is {given.mode}, and hardware.gpu is cpu: there are no GPUs to place on",
            "leave placement.mode out, or say which GPUs there are in hardware.gpu",
            {"placement.mode": None},
        )
    if not case.on_cpu:
        return
    for name in ("train_gpus", "rollout_gpus", "reference_gpus"):
        if (count := getattr(given, name) or 0) > 0:
            yield Hit(
                f"placement.{name} is {count}, and there are no GPUs",
                "say which in hardware.gpu",
                {},
                f"placement.{name}",
            )
    if (transport := case.input.weights.transport) in ("nccl", "ipc"):
        yield Hit(
            f"weights.transport is {transport}, which is between GPUs, and there are none",
            "use disk or gloo",
            {"weights.transport": "disk"},
            "weights.transport",
        )
