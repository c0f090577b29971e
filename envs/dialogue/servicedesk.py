"""`palestra/ServiceDesk-v0`: a customer writes to a shop; the agent asks, looks things up, acts by the rules and says what
came of it.

Reward, on the last step:

| component  | given when                                                                                      |
| ---------- | ----------------------------------------------------------------------------------------------- |
| `database` | the shop is exactly as the errand leaves it: what was asked for was done, and nothing else        |
| `told`     | the last message names exactly the amounts and the order status that the customer has to hear     |

Both: 1.0. The database alone: 0.5 where the errand changes something, else 0, since doing nothing is no work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from palestra.envs.core import Response
from palestra.envs.dialogue import shop as shops
from palestra.envs.dialogue.errands import errands, goal_of
from palestra.envs.dialogue.user import ModelUser, ScriptedUser, User, read_user
from palestra.envs.tasks import TaskSource
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import tool
from palestra.envs.types import Message, Reward, StopReason, Task, ToolError

SYSTEM = f"""You are the service desk of a small shop. Help the customer by these rules:
- First ask for the customer's email and order number, and find the customer by email. Change only that customer's orders.
- Only pending orders can be cancelled, get another address, or have items exchanged for another option of the same product.
- Only delivered orders can be returned, and only once.
- An order is cancelled for one of these reasons: {"; ".join(shops.REASONS)}.
- Do nothing that was not asked for. If the rules forbid a wish, do nothing and say so.
- A message with a question mark is a question to the customer. Close with one message without a question mark that names
  the amount the customer asked for, if any (in dollars, like $12.50, and no other amount), and the status of the order if
  you changed its address, were asked for it, or cannot do what was asked."""
_AMOUNT = re.compile(r"\$ ?([0-9]{1,6}(?:\.[0-9]{2})?)(?![0-9])")


class ServiceDesk(ToolEnv):
    """A shop's service desk with a simulated customer."""

    system: ClassVar[str | None] = SYSTEM

    def __init__(
        self,
        seed: int = 0,
        size: int = 1000,
        user: Any = "scripted",
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        """`user`: "scripted", or a model that plays the customer: {"base_url", "model", "api_key_env", ...}.

        Raises:
            ValueError: `user` is neither.
        """
        self._spec = read_user(user)
        self.deterministic = self._spec is None
        self.user: User | None = None
        super().__init__(render_mode, errands(seed, size) if tasks is None else tasks)

    def setup(self, task: Task) -> None:
        self.shop = shops.make_shop(task.meta["shop"])
        self.customer: str | None = None
        knows = task.meta["knows"]
        if self._spec is None:
            self.user = ScriptedUser(knows)
        else:
            self.user = ModelUser(self._spec, _part(knows), str(task.prompt))

    def respond(self, action: Message) -> Response:
        if action.get("tool_calls"):
            return super().respond(action)
        assert self.user is not None, "an episode has its customer"
        content = action.get("content")
        answer = self.user.reply(content if isinstance(content, str) else "")
        if answer is None:
            return Response(stop=StopReason.ANSWER)
        return Response([{"role": "user", "content": answer}])

    def replay(self, transcript: Sequence[Message]) -> None:
        """An agent that played by itself: its calls are run on the shop again."""
        assert self.task is not None, "an episode has its task"
        self.setup(self.task)
        for message in transcript:
            for call in message.get("tool_calls") or ():
                self.run_tool(call)
        super().replay(transcript)

    def score(self, task: Task, transcript: Sequence[Message]) -> Reward:
        done = self.shop == goal_of(task)
        last = transcript[-1] if transcript else {}
        final = last if last.get("role") == "assistant" and not last.get("tool_calls") else {}
        told = _told(final.get("content"), task.answer)
        value = 1.0 if done and told else 0.5 if done and task.answer["actions"] else 0.0
        return Reward(value, {"database": float(done), "told": float(told)})

    def oracle(self, task: Task) -> list[Message]:
        knows, answer = task.meta["knows"], task.answer
        look = [_call("find_user", {"email": knows["email"]}), _call("get_order", {"order_id": task.meta["order"]})]
        acts = [_call(tool, arguments) for tool, arguments in answer["actions"]]
        parts = [f"the amount is ${amount:.2f}" for amount in answer["amounts"]]
        parts += [f"your order is {answer['status']}"] if answer["status"] else []
        said = "May I have your email and the order number, and what else you can tell me about it?"
        messages = [said, look, *([acts] if acts else []), f"All settled: {' and '.join(parts)}."]
        return [_assistant(item) for item in messages]

    @tool
    def find_user(self, email: str) -> dict[str, Any]:
        """Finds the customer with an email address, and the customer's orders."""
        user = shops.find_user(self.shop, email)
        if user is None:
            raise ToolError("there is no customer with this email")
        self.customer = user
        orders = {order: data["status"] for order, data in self.shop["orders"].items() if data["user"] == user}
        return {**self.shop["users"][user], "orders": orders}

    @tool
    def get_order(self, order_id: str) -> dict[str, Any]:
        """One order of the customer: status, items with their skus and prices, total, address."""
        order = self._own(order_id)
        items = [{"sku": sku, **self.shop["products"][sku]} for sku in order["items"]]
        return {**{key: value for key, value in order.items() if key != "user"}, "items": items}

    @tool
    def get_product(self, name: str) -> dict[str, Any]:
        """A product's options: sku, price, and whether it is in stock."""
        options = shops.options_of(self.shop, name)
        if not options:
            raise ToolError(f"there is no such product; products: {', '.join(shops.GOODS)}")
        return options

    @tool
    def cancel_order(self, order_id: str, reason: str) -> str:
        """Cancels a pending order and refunds it."""
        return self._change("cancel_order", order_id, reason=reason)

    @tool
    def change_address(self, order_id: str, street: str, city: str, zip_code: str) -> str:
        """Gives a pending order another address."""
        return self._change("change_address", order_id, street=street, city=city, zip_code=zip_code)

    @tool
    def return_items(self, order_id: str, skus: list[str]) -> str:
        """Takes items of a delivered order back and refunds them."""
        return self._change("return_items", order_id, skus=skus)

    @tool
    def exchange_item(self, order_id: str, sku: str, new_sku: str) -> str:
        """Exchanges an item of a pending order for another option of the same product."""
        return self._change("exchange_item", order_id, sku=sku, new_sku=new_sku)

    def _own(self, order_id: str) -> Mapping[str, Any]:
        """An order of the customer that was found by email."""
        if self.customer is None:
            raise ToolError("find the customer by email first")
        order: Mapping[str, Any] | None = self.shop["orders"].get(order_id)
        if order is None or order["user"] != self.customer:
            raise ToolError("the customer has no such order")
        return order

    def _change(self, operation: str, order_id: str, **arguments: Any) -> str:
        self._own(order_id)
        try:
            shops.OPERATIONS[operation](self.shop, order_id, **arguments)
        except ValueError as error:
            raise ToolError(str(error)) from None
        order = self.shop["orders"][order_id]
        return (
            f"done: order {order_id} is {order['status']}, total ${order['total']:.2f}, refund ${order['refund']:.2f}"
        )


def _told(content: Any, answer: Mapping[str, Any]) -> bool:
    """Whether a message names exactly the amounts that it should, and of the three statuses the right one. That only
    pending orders can be changed may be said of any order.
    """
    if not isinstance(content, str) or len(content) > 2000 or "?" in content:
        return False
    amounts = sorted({round(float(found), 2) for found in _AMOUNT.findall(content)})
    if amounts != sorted(round(amount, 2) for amount in answer["amounts"]):
        return False
    if (status := answer["status"]) is None:
        return True
    named = {word for word in shops.STATUSES if re.search(rf"\b{word}\b", content.lower())}
    return named - ({"pending"} if status != "pending" else set()) == {status}


def _part(knows: Mapping[str, str]) -> str:
    facts = "\n".join(f"- {topic}: {fact}" for topic, fact in knows.items())
    return f"This is what you know:\n{facts}"


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _assistant(item: Any) -> Message:
    if isinstance(item, str):
        return {"role": "assistant", "content": item}
    calls = [{"id": f"call_{position}_{call['function']['name']}", **call} for position, call in enumerate(item)]
    return {"role": "assistant", "content": "", "tool_calls": calls}
