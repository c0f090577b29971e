"""What customers come for: one errand per task, with what they know, what has to be done, and what they must be told.

A seed and an index go in, a `Task` comes out whose `meta` is plain JSON. Nothing is waited for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from palestra.envs.dialogue.shop import (
    CITIES,
    OPERATIONS,
    REASONS,
    STREETS,
    Shop,
    address,
    make_shop,
    options_of,
)
from palestra.envs.tasks import GeneratedTasks, TaskSource
from palestra.envs.types import Task

Errand = dict[str, Any]
"""order, opening, knows (what the customer answers with, by topic), actions ([tool, arguments]), amounts, status."""


def errands(seed: int = 0, size: int = 1000) -> TaskSource:
    """A deterministic source of tasks; the kinds take turns."""
    kinds = tuple(_KINDS)

    def make(index: int) -> Task:
        shop_seed = f"{seed}/{index}"
        shop, draw = make_shop(shop_seed), random.Random(f"errand/{shop_seed}")
        kind = kinds[index % len(kinds)]
        errand = _KINDS[kind](shop, draw)
        user = shop["users"][shop["orders"][errand["order"]]["user"]]
        knows = {"email": user["email"], "order": errand["order"], "name": user["name"], **errand["knows"]}
        meta = {"kind": kind, "shop": shop_seed, "knows": knows, "order": errand["order"]}
        answer = {"actions": errand["actions"], "amounts": errand["amounts"], "status": errand["status"]}
        return Task(errand["opening"], answer, f"servicedesk/{seed}/{index}", meta)

    return GeneratedTasks(size, make)


def goal_of(task: Task) -> Shop:
    """The shop as it is when the errand was done, and nothing else."""
    shop = make_shop(task.meta["shop"])
    for tool, arguments in task.answer["actions"]:
        OPERATIONS[tool](shop, **arguments)
    return shop


def _errand(order: str, opening: str, **rest: Any) -> Errand:
    return {"order": order, "opening": opening, "knows": {}, "actions": [], "amounts": [], "status": None, **rest}


def _pick(shop: Shop, draw: random.Random, status: str) -> str:
    found = [order for order, data in shop["orders"].items() if data["status"] == status]
    return draw.choice(found) if found else ""


def _cancel(shop: Shop, draw: random.Random) -> Errand:
    order, reason = _pick(shop, draw, "pending"), draw.choice(REASONS)
    return _errand(
        order,
        "Hello, can I still cancel an order? And what will I get back?",
        knows={"reason": f"It is {reason}." if reason.startswith("no") else f"It was {reason}."},
        actions=[["cancel_order", {"order_id": order, "reason": reason}]],
        amounts=[shop["orders"][order]["total"]],
    )


def _move(shop: Shop, draw: random.Random) -> Errand:
    order = _pick(shop, draw, "pending")
    city, zip_code = draw.choice(CITIES)
    new = address(f"{draw.randint(100, 199)} {draw.choice(STREETS)}", city, zip_code)
    return _errand(
        order,
        "Hi, I am moving house. Can my order go to my new address?",
        knows={"address": f"The new address is {new['street']}, {new['city']}, {new['zip']}."},
        actions=[
            [
                "change_address",
                {"order_id": order, "street": new["street"], "city": new["city"], "zip_code": new["zip"]},
            ]
        ],
        status="pending",
    )


def _return(shop: Shop, draw: random.Random) -> Errand:
    order = _pick(shop, draw, "delivered")
    if not order:
        return _cancel(shop, draw)
    sku = draw.choice(shop["orders"][order]["items"])
    item = shop["products"][sku]
    return _errand(
        order,
        "Good morning, something I ordered does not suit me. Can I send it back, and what is refunded?",
        knows={"item": f"It is the {item['name']} ({item['option']})."},
        actions=[["return_items", {"order_id": order, "skus": [sku]}]],
        amounts=[item["price"]],
    )


def _exchange(shop: Shop, draw: random.Random) -> Errand:
    choices = [
        (order, sku, other)
        for order, data in shop["orders"].items()
        if data["status"] == "pending"
        for sku in data["items"]
        for other, item in options_of(shop, shop["products"][sku]["name"]).items()
        if other != sku and item["in_stock"]
    ]
    if not choices:
        return _cancel(shop, draw)
    order, sku, other = draw.choice(choices)
    old, new = shop["products"][sku], shop["products"][other]
    after = shop["orders"][order]["total"] - old["price"] + new["price"]
    return _errand(
        order,
        "Hello, I chose the wrong option of something. Can it be changed, and what is the total then?",
        knows={"item": f"It is the {old['name']}: I have {old['option']} and want {new['option']}."},
        actions=[["exchange_item", {"order_id": order, "sku": sku, "new_sku": other}]],
        amounts=[round(after, 2)],
    )


def _ask(shop: Shop, draw: random.Random) -> Errand:
    order = draw.choice(sorted(shop["orders"]))
    data = shop["orders"][order]
    return _errand(
        order,
        "Hi, how far is my order, and what did I pay for it?",
        amounts=[data["total"]],
        status=data["status"],
    )


def _refused(shop: Shop, draw: random.Random) -> Errand:
    """What the rules forbid: nothing may change, and the customer has to hear why."""
    found = sorted(order for order, data in shop["orders"].items() if data["status"] != "pending")
    order = draw.choice(found)
    return _errand(
        order,
        "Hello, I have changed my mind. Would you cancel my order?",
        knows={"reason": "I no longer need it."},
        status=shop["orders"][order]["status"],
    )


_KINDS: dict[str, Callable[[Shop, random.Random], Errand]] = {
    "cancel": _cancel,
    "move": _move,
    "return": _return,
    "exchange": _exchange,
    "ask": _ask,
    "refused": _refused,
}
