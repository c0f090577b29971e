"""Whether engines have the weights that they should: by digests and by logprobs. Pure.

In: what engines answered, and the trainer's own figures. Out: engine -> what is wrong with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.server.engine_wire import version_of
from palestra.server.publishing.types import Digests
from palestra.server.types import EngineError
from palestra.server.workers.types import EngineKind

SHOWN = 3
FULL_PRECISION = 1e-3
REDUCED_PRECISION = 0.2
"""Largest difference of one token's logprob between trainer and engine, in fp32 and in anything less."""


def wrong_versions(infos: Mapping[str, Mapping[str, Any]], version: int) -> dict[str, str]:
    """Engines whose /model_info names another version."""
    wrong = {}
    for url, info in infos.items():
        try:
            found = version_of(info.get("weight_version", ""))
        except EngineError as error:
            wrong[url] = f"{url}: {error}"
            continue
        if found != version:
            wrong[url] = f"{url} serves version {found} after the publish of {version}"
    return wrong


def comparable(kind: EngineKind, infos: Mapping[str, Mapping[str, Any]], dtype: str) -> bool:
    """Whether engines hash the same bytes as the trainer: in the trainer's own dtype, and those of SGLang unquantised and on a CPU. A GPU
    engine of SGLang has another hash, and one in another dtype has other bytes."""
    return bool(infos) and all(
        info.get("dtype") == dtype
        and (kind == "embedded" or (info.get("device") == "cpu" and not info.get("quantization")))
        for info in infos.values()
    )


def wrong_digests(answers: Mapping[str, Mapping[str, Any]], wanted: Digests) -> dict[str, str]:
    """Engines whose /weights_checker shows other content than `wanted`, or than most engines where the trainer has no digest of a name.

    An engine of several ranks keeps parts of tensors: it is compared with other engines alone.
    """
    wrong: dict[str, str] = {}
    seen = {url: _ranks(answer) for url, answer in answers.items()}
    for url, ranks in seen.items():
        if not ranks:
            wrong[url] = f"{url}: its checksums are not understood"
        elif len(ranks) == 1 and (bad := _differing(ranks[0], _shapes(answers[url]), wanted)):
            wrong[url] = f"{url} has other weights than the trainer: {_some(bad)}"
    whole = {url: tuple(tuple(sorted(r.items())) for r in ranks) for url, ranks in seen.items() if url not in wrong}
    if len(set(whole.values())) > 1:
        common, _ = Counter(whole.values()).most_common(1)[0]
        for url, what in whole.items():
            if what != common:
                wrong[url] = f"{url} has other weights than most engines: {_some(_apart(what, common))}"
    return wrong


def _ranks(answer: Mapping[str, Any]) -> list[Mapping[str, str]]:
    if isinstance(ranks := answer.get("ranks"), list):
        return [
            rank["checksums"] for rank in ranks if isinstance(rank, dict) and isinstance(rank.get("checksums"), dict)
        ]
    return [found] if isinstance(found := answer.get("checksums"), dict) else []


def _shapes(answer: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    holder = (answer.get("ranks") or [answer])[0]
    found = holder.get("shapes", answer.get("shapes"))
    return found if isinstance(found, dict) else {}


def _differing(found: Mapping[str, str], shapes: Mapping[str, Sequence[int]], wanted: Digests) -> list[str]:
    bad = []
    for name, (digest, shape) in wanted.items():
        if name not in found:
            # A tied output layer has no tensor of its own in some engines; the tensor that it is tied to is compared.
            if name != "lm_head.weight":
                bad.append(f"{name} is missing")
        elif found[name] != digest:
            bad.append(name)
        elif shape and name in shapes and tuple(shapes[name]) != tuple(shape):
            bad.append(f"{name} has shape {list(shapes[name])}, not {list(shape)}")
    return bad


def _apart(one: tuple[tuple[tuple[str, str], ...], ...], other: tuple[tuple[tuple[str, str], ...], ...]) -> list[str]:
    mine = {(i, *pair) for i, rank in enumerate(one) for pair in rank}
    theirs = {(i, *pair) for i, rank in enumerate(other) for pair in rank}
    return sorted({name for _, name, _ in mine ^ theirs})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def tolerance(infos: Mapping[str, Mapping[str, Any]]) -> float:
    """How far logprobs may be apart, by what the engines say of themselves."""
    full = all(info.get("dtype") == "float32" and not info.get("quantization") for info in infos.values())
    return FULL_PRECISION if full and infos else REDUCED_PRECISION


def canary_gap(answer: Mapping[str, Any], logprobs: Sequence[float]) -> float:
    """Largest difference between an engine's input logprobs and the trainer's; infinite where they cannot be compared."""
    try:
        given = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][1:]
        if len(given) != len(logprobs):
            return math.inf
        gaps = [abs(float(mine) - theirs) for mine, theirs in zip(given, logprobs, strict=True)]
    except (KeyError, TypeError, ValueError, IndexError):
        return math.inf
    # max() would lose a NaN that is not in the first place.
    return math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps)
