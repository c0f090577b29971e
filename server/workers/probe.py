"""What an engine must prove before it has requests: that it serves the run's model, and that its ids and logprobs can be trained on.

In: what is known of the model, and an engine's answers. Out: nothing, or an `EngineError` of one line that says which worker, what is wrong
and what to do. Two short requests per worker; each wait is bounded.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from palestra.server.engine_wire import EngineSampling, Joined, Meta, Prompt, read_answer, request_body, version_of
from palestra.server.types import EngineError
from palestra.server.workers.calls import Calls

ANSWER_S = 120.0
"""An engine may compile its kernels at the first request."""
TOKENS = 4
TOP = 10
ALIKE = 1e-5
"""Likeliest tokens that differ by less, everywhere, come from a layer without weights."""
CLEAR = 0.2
"""Two logprobs that differ by so much tell at which temperature they were taken, in any precision."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the run's model; None or empty: nothing, and nothing is compared."""

    prompt: tuple[int, ...]
    """Some ids that any model of this tokenizer can go on from."""
    stop_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    """Rows of its output layer."""
    architectures: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    """Ids to text, by the run's own tokenizer."""
    experts: tuple[int, int] | None = None
    """Layers, and experts per token."""

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        stop_ids: Sequence[int],
        model: Path | None,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> ModelFacts:
        """With what the `config.json` of the folder `model` says."""
        config: dict[str, Any] = {} if model is None else json.loads((model / "config.json").read_text())
        text = config.get("text_config") or config
        experts = (text["num_hidden_layers"], text["num_experts_per_tok"]) if "num_experts_per_tok" in text else None
        names = tuple(config.get("architectures") or ())
        return cls(tuple(prompt), tuple(stop_ids), text.get("vocab_size"), names, decode, experts)


async def probe_worker(url: str, calls: Calls, facts: ModelFacts) -> Mapping[str, Any]:
    """Asks one engine what it is, and for two short completions where it answers such requests by itself. Returns its /model_info.

    Raises:
        EngineError: it does not answer, or it is unfit; the message says what to do.
    """
    info = await calls.get(f"{url}/model_info", ANSWER_S)
    check_info(url, info, facts)
    if answers_alone(info):
        await probe_samples(url, calls, facts, int(info.get("vocab_size") or facts.vocab_size or 0))
    return info


async def probe_samples(url: str, calls: Calls, facts: ModelFacts, vocab_size: int) -> None:
    """Asks whatever answers /generate at `url` for two short completions; `vocab_size` 0: not known.

    Raises:
        EngineError: as for `probe_worker`.
    """
    warm, text = await _sample(url, calls, facts, 1.0)
    check_logprobs(url, warm, vocab_size)
    check_text(url, text, [entry[1] for entry in warm.output_token_logprobs], facts)
    cold, _ = await _sample(url, calls, facts, 0.5)
    check_temperature(url, _tops(warm), _tops(cold))


def answers_alone(info: Mapping[str, Any]) -> bool:
    """Whether the engine can be asked directly: a prefill or decode engine answers only through its router."""
    return info.get("disaggregation_mode") in (None, "null")


async def _sample(url: str, calls: Calls, facts: ModelFacts, temperature: float) -> tuple[Meta, str]:
    sampling = EngineSampling(temperature, TOKENS, facts.stop_ids, top_logprobs=TOP)
    rid = uuid.uuid4().hex
    body = request_body(Prompt.of(facts.prompt).json, sampling, rid, TOKENS, 0)
    raw = await calls.post_raw(f"{url}/generate", body, ANSWER_S)
    try:
        meta = read_answer(raw)
        Joined().add(meta, rid)
    except EngineError as error:
        raise EngineError(f"{url}: {error}; use an engine that returns ids, logprobs and weight_version") from None
    return meta, str(orjson.loads(raw).get("text") or "")


def check_info(url: str, info: Mapping[str, Any], facts: ModelFacts) -> int:
    """The version that /model_info names.

    Raises:
        EngineError: it is none of ours, or the engine has another kind of model.
    """
    try:
        version = version_of(info.get("weight_version", "default"))
    except EngineError as error:
        raise EngineError(f"{url}: {error}; start it without --weight-version, or with a number") from None
    served = tuple(info.get("architectures") or ())
    if served and facts.architectures and set(served).isdisjoint(facts.architectures):
        raise EngineError(
            f"{url} serves a {served[0]} ({info.get('model_path')}), but the run's model is a {facts.architectures[0]}: start the engine "
            "with the run's model"
        )
    return version


def check_logprobs(url: str, meta: Meta, vocab_size: int) -> None:
    """Refuses logprobs that carry no information.

    Raises:
        EngineError: there are none, or all tokens are equally likely.
    """
    if not meta.output_token_logprobs:
        raise EngineError(f"{url} answered with no token at all: it cannot be probed; look into its log")
    uniform = -math.log(vocab_size) if vocab_size else None
    flat = uniform is not None and all(abs(entry[0] - uniform) < 1e-4 for entry in meta.output_token_logprobs)
    tops = [place for place in meta.output_top_logprobs or () if place and len(place) > 1]
    if flat or (tops and all(place[0][0] - place[-1][0] < ALIKE for place in tops)):
        raise EngineError(
            f"{url}: the engine's logprobs are uniform, its output layer was not loaded; a model with tied embeddings has to be saved with "
            "its own lm_head (tie_word_embeddings false)"
        )


def check_text(url: str, text: str, ids: Sequence[int], facts: ModelFacts) -> None:
    """Compares the engine's text with what our tokenizer makes of its ids. White space and cut characters are nobody's fault.

    Raises:
        EngineError: they are texts of different tokenizers.
    """
    if not text or facts.decode is None:
        return
    ours = facts.decode(ids)
    if _bare(ours) != _bare(text):
        raise EngineError(
            f"{url}: the engine reads the ids {list(ids)} as {text!r} and the run's tokenizer as {ours!r}: it serves another model or "
            "another tokenizer; start it with the run's model"
        )


def _bare(text: str) -> str:
    return "".join(char for char in text if not char.isspace() and char != "\ufffd")


Top = Mapping[int, float]
"""Id -> logprob of the likeliest tokens at one place, likeliest first."""


def _tops(meta: Meta) -> Top:
    places = meta.output_top_logprobs or ()
    return {token: logprob for logprob, token, _ in places[0] or ()} if places else {}


def check_temperature(url: str, at_one: Top, at_half: Top) -> None:
    """Logprobs must be those of the sampling temperature: at T = 0.5 two tokens lie twice as far apart as at T = 1. Likeliest tokens that
    cannot be compared (none given, another first one, all about equally likely) prove nothing.

    Raises:
        EngineError: they are those of another temperature.
    """
    if not at_one or not at_half or next(iter(at_one)) != (best := next(iter(at_half))):
        return
    far = min((token for token in at_one if token in at_half), key=lambda token: at_one[token])
    gap, wider = at_one[best] - at_one[far], at_half[best] - at_half[far]
    if gap >= CLEAR and not 1.5 <= wider / gap <= 2.5:
        raise EngineError(
            f"{url}: the engine's logprobs do not follow the temperature (a distance of {gap:.2f} at T=1 is {wider:.2f} at T=0.5, not "
            f"{2 * gap:.2f}): start it without SGLANG_RETURN_ORIGINAL_LOGPROB, so that they are of the distribution that was sampled"
        )
