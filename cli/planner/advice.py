"""Where to put rollout and training, and why: both placements computed for the same GPUs. Pure.

In turns (colocated), each phase has all GPUs, and weights and training state move in and out between phases. Apart (separate), two pools
work at once, so the slower one sets the pace and what is trained is a step old. Training is taken to be as fast as it has GPUs; more
engines have fewer rollouts each, which makes decoding less efficient (F7). Seconds are guesses like those that they are made of.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import lcm

from palestra.cli.planner.case import Case
from palestra.cli.planner.flow import publish_seconds
from palestra.cli.planner.memory import FRAGMENTATION, GIB, training_state
from palestra.cli.planner.workload import Times, sampling_seconds

WORTH = 1.1
"""Times faster from which two pools are worth an older policy and a second place for the model."""


@dataclass(frozen=True, slots=True)
class Turns:
    """A step on shared GPUs, seconds."""

    gpus: int
    rollout_s: float
    train_s: float
    publish_s: float
    swap_s: float

    @property
    def step_s(self) -> float:
        """One phase after the other."""
        return self.rollout_s + self.train_s + self.publish_s + self.swap_s


@dataclass(frozen=True, slots=True)
class Apart:
    """A step on two pools at once, seconds."""

    rollout_gpus: int
    train_gpus: int
    rollout_s: float
    train_s: float
    publish_s: float

    @property
    def step_s(self) -> float:
        """As long as the slower pool takes."""
        return max(self.rollout_s, self.train_s) + self.publish_s


def advise(case: Case) -> tuple[str, ...]:
    """Sentences, the most important first; empty where nothing is known of times."""
    times = case.times
    if times is None:
        return ()
    if case.on_cpu or case.decoding is None:
        return (_limit(times, elsewhere=not case.on_cpu),)
    turns, apart = in_turns(case, times), apart_of(case, times)
    return (_verdict(case, turns, apart), *_reasons(case, times, turns, apart))


def in_turns(case: Case, times: Times) -> Turns:
    """Colocated on all GPUs that this case uses."""
    gpus = _gpus(case)
    publish = times.publish_s
    if not case.colocated:
        publish = publish_seconds(case.sent_bytes, case.input.hardware.nvlink_bw, case.input.weights.t0_s)
    swap = 2 * (_state(case) * case.train_gpus / gpus + _weights(case)) / case.input.hardware.pcie_bw
    return Turns(gpus, _sampling(case, gpus), times.train_s * case.train_gpus / gpus, publish, swap)


def apart_of(case: Case, times: Times) -> Apart | None:
    """Separate, split so that both pools take about as long; None: the rest has no room for training, or none for an engine."""
    gpus, layout = _gpus(case), case.layout
    unit = lcm(layout.tp * layout.pp * layout.cp, layout.etp * layout.ep * layout.pp)
    publish = times.publish_s
    if case.colocated:
        publish = publish_seconds(case.sent_bytes, case.input.hardware.nic_bw, case.input.weights.t0_s)

    def split(units: int) -> Apart:
        train = units * unit
        seconds = times.train_s * case.train_gpus / train
        return Apart(gpus - train, train, _sampling(case, gpus - train), seconds, publish)

    counts = range(1, int(gpus - _engine_gpus(case)) // unit + 1)
    counts = counts[bisect_left(counts, True, key=lambda units: _fits(case, units * unit)) :]
    if not counts:
        return None
    # More training GPUs make training faster and rollouts slower: the best split is where the two cross.
    cross = bisect_left(counts, True, key=lambda units: split(units).train_s <= split(units).rollout_s)
    near = counts[max(0, cross - 1) : cross + 1]
    return min((split(units) for units in near), key=lambda each: each.step_s)


def _gpus(case: Case) -> int:
    return max(case.train_gpus, case.rollout_gpus) if case.colocated else case.train_gpus + case.rollout_gpus


def _engine_gpus(case: Case) -> float:
    """GPUs of an engine that samples, with its share of those that only prefill."""
    assert case.decoding is not None
    return sum(each.gpus * each.count for each in case.engines) / case.decoding.count


def _sampling(case: Case, gpus: int) -> float:
    """Seconds of a batch on so many GPUs."""
    return sampling_seconds(case, max(1, int(gpus / _engine_gpus(case))))


def _state(case: Case) -> float:
    """Bytes that stay on the fullest GPU of training."""
    return case.stage_memories()[case.worst_stage].state if case.state else 0.0


def _weights(case: Case) -> float:
    return case.pool.weights if case.pool else 0.0


def _fits(case: Case, gpus: int) -> bool:
    """Whether training has room on so many GPUs: with fewer, each keeps more of the optimizer."""
    limit = case.device.memory_bytes if case.device else 0
    if not case.state or not limit:
        return True
    copies = 2 if case.input.train.critic else 1
    offload = case.input.train.optimizer_offload
    fewer = training_state(case.model, replace(case.layout, gpus=gpus), case.state_bytes, offload, copies)
    more = max(stage.gpu_bytes for stage in fewer) - max(stage.gpu_bytes for stage in case.state)
    return case.worst_train_bytes + more * FRAGMENTATION <= limit


def _limit(times: Times, elsewhere: bool) -> str:
    """What sets the pace where there is nothing to place."""
    slow, fast = ("sampling", "training") if times.rollout_s >= times.train_s else ("training", "sampling")
    most, least = max(times.rollout_s, times.train_s), min(times.rollout_s, times.train_s)
    where = "Engines run elsewhere" if elsewhere else "Engine and trainer share this machine's cores"
    return (
        f"{where}: {slow} sets the pace, {most:.3g} s of a step against {least:.3g} s of {fast}; "
        f"making {fast} faster saves {least / times.step.sync:.0%} of a step at most."
    )


def _verdict(case: Case, turns: Turns, apart: Apart | None) -> str:
    shared = (
        f"in turns on {turns.gpus} GPUs a step takes {turns.step_s:.3g} s (rollout {turns.rollout_s:.3g}, train "
        f"{turns.train_s:.3g}, publish {turns.publish_s:.2g}, moving in and out {turns.swap_s:.2g})"
    )
    if apart is None:
        return f"Colocated: {shared}; training with this layout has no room on fewer GPUs that would leave some for an engine."
    two = (
        f"apart on {apart.rollout_gpus} + {apart.train_gpus} (rollout + training) {apart.step_s:.3g} s at best (rollout "
        f"{apart.rollout_s:.3g}, train {apart.train_s:.3g}, publish {apart.publish_s:.2g})"
    )
    gain = turns.step_s / apart.step_s
    if gain >= WORTH:
        return f"Separate: {shared}; {two}, which is {gain:.2f} times as fast, for tokens that are a step old."
    slower = f"{1 / gain:.2f} times as long" if gain < 1 else f"only {gain:.2f} times as fast"
    return f"Colocated: {shared}; {two}, {slower}, and tokens are a step old there."


def _reasons(case: Case, times: Times, turns: Turns, apart: Apart | None) -> tuple[str, ...]:
    reasons = []
    if times.tail_s > 0.5 * turns.rollout_s:
        reasons.append(
            f"The longest replies take {times.tail_s:.3g} s however many GPUs sample, of {turns.rollout_s:.3g} s for all: in turns all "
            f"{turns.gpus} GPUs wait for them, apart only those of the rollout."
        )
    if apart is not None and not case.colocated and apart.rollout_gpus != case.rollout_gpus:
        reasons.append(
            f"As it is split ({case.rollout_gpus} + {case.train_gpus}) a step takes {times.step.overlapped:.3g} s at best; the split "
            f"above evens out both pools."
        )
    if case.state:
        held, weights = _state(case), _weights(case)
        reasons.append(
            f"In turns a GPU holds {held / GIB:.3g} GiB of training state and {weights / GIB:.3g} GiB of engine weights by turns: "
            f"{(held + weights) / GIB:.3g} GiB travel over PCIe each way and wait in the host's memory, apart each stays where it is."
        )
    if apart is not None:
        reasons.append(
            f"A publish takes {turns.publish_s:.2g} s in turns (handles of the same GPU's memory) and {apart.publish_s:.2g} s apart."
        )
    return tuple(reasons)
