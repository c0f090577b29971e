"""`palestra/Negotiation-v0`: a buyer and a seller agree on a price, each with a limit that the other does not know.

Roles: `buyer` (the first) and `seller`. Reward of each role, on the last step:

| component | what it is                                                                                    |
| --------- | ----------------------------------------------------------------------------------------------- |
| `share`   | the reward: the role's share of what lies between both limits, 0 to 1; a price beyond its own     |
|           | limit is negative, down to -1; no deal is 0                                                     |
| `deal`    | 1 where they agreed; a metric, not part of the reward                                             |

The shares of both roles sum to 1 where they agree between their limits. A scripted partner gives way step by step and
takes any price within its limit at its last word.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import ClassVar

from palestra.envs.dialogue.roles import RolesEnv, Turn
from palestra.envs.games.base import last_line
from palestra.envs.tasks import GeneratedTasks, TaskSource
from palestra.envs.tools import refuse_calls
from palestra.envs.types import Message, Reward, StopReason, Task

BUYER, SELLER = "buyer", "seller"
ROUNDS = 5
"""Messages that each role has."""
MALFORMED = 3
"""Malformed messages after which a role is taken to have walked away."""
LONGEST = 2000
"""Characters of a message that the other side reads."""
GOODS = (
    "a bicycle",
    "an old guitar",
    "a writing desk",
    "a telescope",
    "a record player",
    "a canoe",
    "a sewing machine",
)
_MOVE = re.compile(r"(?:offer\s{1,3}\$?\s?([0-9]{1,6})|(accept)|(walk away))\.?", re.IGNORECASE)
_FORM = "End your message with one line: offer N (whole dollars), accept, or walk away."


def bargains(seed: int = 0, size: int = 1000) -> TaskSource:
    """A deterministic source; the seller's limit is always under the buyer's."""

    def make(index: int) -> Task:
        draw = random.Random(f"bargain/{seed}/{index}")
        low = draw.randint(20, 400)
        high = low + draw.randint(20, 400)
        meta = {"goods": draw.choice(GOODS), SELLER: low, BUYER: high}
        return Task("Agree on a price.", [low, high], f"negotiation/{seed}/{index}", meta)

    return GeneratedTasks(size, make)


class Negotiation(RolesEnv):
    """A bargain between two."""

    roles: ClassVar[tuple[str, ...]] = (BUYER, SELLER)

    def __init__(
        self,
        seed: int = 0,
        size: int = 1000,
        role: str | None = None,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        super().__init__(role, render_mode, bargains(seed, size) if tasks is None else tasks)

    def begin(self, task: Task) -> None:
        self.limits = {BUYER: int(task.meta[BUYER]), SELLER: int(task.meta[SELLER])}
        self.goods = str(task.meta["goods"])
        self.offers: dict[str, int] = {}
        self.said, self.malformed = {BUYER: 0, SELLER: 0}, {BUYER: 0, SELLER: 0}
        self.speaker = BUYER
        self.price: int | None = None

    def briefing(self, role: str) -> list[Message]:
        limit = self.limits[role]
        if role == BUYER:
            part = f"You want to buy {self.goods}. It is worth ${limit} to you: pay less, and what you save is yours."
            first = "You speak first."
        else:
            part = f"You want to sell {self.goods}. It is worth ${limit} to you: get more, and what you gain is yours."
            first = "The buyer speaks first."
        system = f"{part} The other side does not know your figure. Each of you has {ROUNDS} messages; without a deal both get nothing."
        start = f"Negotiate a price for {self.goods}. {first}\n{_FORM}"
        return [{"role": "system", "content": system}, {"role": "user", "content": start}]

    def turn_of(self) -> str:
        return self.speaker

    def say(self, role: str, action: Message) -> Turn:
        refusals = refuse_calls(action)
        other = SELLER if role == BUYER else BUYER
        try:
            kind, price = _read(action) if not refusals else ("", 0)
            if kind == "accept" and other not in self.offers:
                raise ValueError("There is no offer yet that you could accept.")
            if not kind:
                raise ValueError("I found no offer on the last line.")
        except ValueError as error:
            return self._help(role, str(error), refusals)
        if kind == "accept":
            self.price = self.offers[other]
            return Turn(stop=StopReason.ANSWER)
        if kind == "walk away":
            return Turn(stop=StopReason.ENV_DONE)
        self.offers[role], self.speaker = price, other
        self.said[role] += 1
        if role == SELLER and self.said[SELLER] >= ROUNDS:
            return Turn(stop=StopReason.ENV_DONE)
        left = ROUNDS - self.said[other]
        text = f"{str(action['content'])[-LONGEST:]}\n\n({left} of your messages {'is' if left == 1 else 'are'} left.)"
        return Turn({other: [{"role": "user", "content": text}]})

    def partner(self, role: str) -> Message:
        other = SELLER if role == BUYER else BUYER
        wanted, standing = self._plan(role), self.offers.get(other)
        good = standing is not None and (standing <= wanted if role == BUYER else standing >= wanted)
        if good:
            return {"role": "assistant", "content": "That is fair.\naccept"}
        return {"role": "assistant", "content": f"I can do ${wanted}.\noffer {wanted}"}

    def role_score(self, role: str) -> Reward:
        if self.price is None:
            return Reward(0.0, {"share": 0.0, "deal": 0.0})
        between = self.limits[BUYER] - self.limits[SELLER]
        gain = self.limits[BUYER] - self.price if role == BUYER else self.price - self.limits[SELLER]
        share = max(-1.0, min(1.0, gain / between)) if between > 0 else 0.0
        return Reward(share, {"share": round(share, 6), "deal": 1.0}, f"agreed on ${self.price}")

    def oracle(self, task: Task) -> list[Message]:
        """Holds out until just before the partner's last word, then asks for its limit: all there is to get."""
        if self.role == BUYER:
            stall, waits, limit = 1, ROUNDS - 1, int(task.meta[SELLER])
        else:
            limit, waits = int(task.meta[BUYER]), ROUNDS - 2  # the buyer's last word comes before the seller's own
            stall = 10 * limit
        prices = [stall] * waits + [limit]
        return [{"role": "assistant", "content": f"Let us see.\noffer {price}"} for price in prices]

    def _plan(self, role: str) -> int:
        """The price that a scripted partner asks for in its present message: from far off, in equal steps, to its limit."""
        limit = self.limits[role]
        start = limit // 2 if role == BUYER else 2 * limit
        return round(start + (limit - start) * self.said[role] / (ROUNDS - 1))

    def _help(self, role: str, why: str, refusals: list[Message]) -> Turn:
        self.malformed[role] += 1
        if self.malformed[role] >= MALFORMED:
            return Turn(stop=StopReason.ENV_DONE)
        return Turn({role: [*refusals, {"role": "user", "content": f"{why} {_FORM}"}]})


def _read(action: Message) -> tuple[str, int]:
    """The move on a message's last line: "offer" and its price, "accept", "walk away", or nothing."""
    found = _MOVE.fullmatch(last_line(action))
    if found is None:
        return "", 0
    return ("offer", int(found[1])) if found[1] else (found[0].lower().rstrip("."), 0)
