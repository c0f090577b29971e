"""What a session makes of a caller's wishes: the engine's sampling, and instructions that go into the prompt.

In: a session's limits and a `ModelCall`. Out: `EngineSampling`, or a refusal that says why and how to allow it. A training session draws
every token from the whole distribution at its own temperature: what would change that is refused, or overridden where the session says so.
Pure; nothing waits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from palestra.server.engine_wire import EngineSampling
from palestra.server.gateway.session import Session
from palestra.server.gateway.types import Message, ModelCall
from palestra.server.renderer.text import text_of
from palestra.server.types import SessionError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, -1, 0),
    "min_p": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "presence_penalty": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "logit_bias": (None, {}),
}
"""Values that leave the distribution as it is."""
HOW = (
    'open the session with limits.sampling = "free" to allow it (evaluation: the session is not trained on), '
    'or "override" to have such wishes replaced by the session\'s own'
)


def engine_sampling(
    session: Session, call: ModelCall, max_new_tokens: int, stop_ids: tuple[int, ...], *, choice: int, experts: bool
) -> EngineSampling:
    """The sampling of reply `choice` of a call.

    Raises:
        SessionError: 400 `sampling_refused`, a wish that this session cannot grant.
    """
    ask, limits = call.sampling, session.limits
    temperature, cut = limits.temperature, dict[str, Any]()
    if limits.sampling == "free":
        temperature = limits.temperature if ask.temperature is None else ask.temperature
        cut = {name: value for name in NEUTRAL if (value := getattr(ask, name)) not in NEUTRAL[name]}
        cut["logit_bias"] = tuple(sorted((ask.logit_bias or {}).items()))
    elif limits.sampling == "strict":
        _refuse_changes(session, call)
    return EngineSampling(
        temperature,
        max_new_tokens,
        stop_ids,
        seed=_seed(session, ask.seed, choice),
        stop=call.stop,
        top_logprobs=call.top_logprobs,
        routed_experts=experts,
        forced_ids=call.forced_ids,
        **cut,
    )


def _refuse_changes(session: Session, call: ModelCall) -> None:
    ask = call.sampling
    changed = [f"{name} = {getattr(ask, name)!r}" for name in NEUTRAL if getattr(ask, name) not in NEUTRAL[name]]
    if ask.temperature is not None and abs(ask.temperature - session.limits.temperature) > 1e-6:
        changed.append(f"temperature = {ask.temperature} (the session's is {session.limits.temperature})")
    if changed:
        raise SessionError(
            f"{', '.join(changed)}: this is a training session, whose tokens are drawn from the whole distribution at its own temperature, "
            f"so that their logprobs are those that are trained on; {HOW}",
            400,
            "sampling_refused",
        )


def _seed(session: Session, seed: int | None, choice: int) -> int | None:
    """Each reply has a stream of its own: the siblings of a group, the n replies of a call and the turns of a session that name one seed
    must not draw the same numbers. In an evaluation the same call gives the same reply again."""
    if seed is None:
        return None
    free = session.limits.sampling == "free"
    where = f"{choice}" if free else f"{session.record.rollout_id}/{session.record.attempt}/{session.turns}/{choice}"
    return int.from_bytes(hashlib.blake2b(f"{seed}:{where}".encode(), digest_size=4).digest(), "little") >> 1


def instructed(new: Sequence[Message], call: ModelCall) -> Sequence[Message]:
    """The messages to render: with what the caller demands of the reply's form said at the end of the last one. The stored conversation
    keeps them as they came, so the demand changes no later prompt."""
    said = []
    if call.response_schema is not None:
        schema = json.dumps(call.response_schema, ensure_ascii=False) if call.response_schema else ""
        said.append(
            "Reply with one JSON object and nothing else"
            + (f", valid under this JSON schema: {schema}" if schema else ".")
        )
    if call.tool_choice == "none" and call.tools:
        said.append("Do not call a tool now; reply in text.")
    if not said or not new or new[-1].get("role") not in ("user", "tool", "system", "developer"):
        return new
    last = dict(new[-1])
    last["content"] = "\n\n".join(part for part in (text_of(last), *said) if part)
    return [*new[:-1], last]
