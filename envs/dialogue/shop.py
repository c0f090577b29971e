"""A small shop: customers, orders and products as plain data, and what can be done with them.

A seed gives a shop; operations change it in place, by the shop's rules. Nothing is waited for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Shop: TypeAlias = dict[str, Any]
"""{"users": {id: ...}, "orders": {id: ...}, "products": {sku: ...}}, plain JSON."""

REASONS = ("no longer needed", "ordered by mistake")
"""The reasons for which an order can be cancelled."""
NAMES = (
    "Ada Novak",
    "Ben Okoro",
    "Carla Diaz",
    "Deniz Kaya",
    "Emil Larsen",
    "Fatima Nasser",
    "Grace Lin",
    "Hugo Petit",
)
STREETS = ("Mill Lane", "High Street", "Park Road", "Church Row", "Station Road", "Garden Walk")
CITIES = (
    ("Bristol", "BS1 4DJ"),
    ("Leeds", "LS1 3AA"),
    ("York", "YO1 7HH"),
    ("Oxford", "OX1 1BX"),
    ("Derby", "DE1 2QL"),
)
GOODS: Mapping[str, tuple[str, ...]] = {
    "backpack": ("grey", "green", "black"),
    "desk lamp": ("white", "black", "brass"),
    "kettle": ("steel", "red", "cream"),
    "rain jacket": ("size S", "size M", "size L"),
    "running shoes": ("size 40", "size 42", "size 44"),
    "water bottle": ("0.5 litre", "0.7 litre", "1 litre"),
}
STATUSES = ("pending", "shipped", "delivered")


def make_shop(seed: str) -> Shop:
    """The shop of a seed: 5 customers with two orders each, one of them pending."""
    draw = random.Random(f"shop/{seed}")
    products = {}
    for number, (name, options) in enumerate(GOODS.items()):
        base = draw.randrange(900, 9000)
        for position, option in enumerate(options):
            sku = f"P{number + 1}{position + 1}"
            price = (base + 150 * position) / 100
            products[sku] = {"name": name, "option": option, "price": price, "in_stock": draw.random() < 0.8}
    users: dict[str, Any] = {}
    orders: dict[str, Any] = {}
    numbers = draw.sample(range(1000, 9999), 10)
    for position, name in enumerate(draw.sample(NAMES, 5)):
        user = f"U{position + 1}"
        users[user] = {
            "name": name,
            "email": f"{name.lower().replace(' ', '.')}@example.com",
            "address": _address(draw),
        }
        for status in ("pending", draw.choice(STATUSES[1:])):
            skus = [draw.choice(_skus_of(products, kind)) for kind in draw.sample(sorted(GOODS), draw.randint(1, 3))]
            order = {"user": user, "status": status, "items": skus, "address": dict(users[user]["address"])}
            orders[f"W{numbers.pop()}"] = {**order, "total": total(products, skus), "refund": 0.0}
    return {"users": users, "orders": orders, "products": products}


def total(products: Mapping[str, Any], skus: Sequence[str]) -> float:
    """What the items cost together, in dollars."""
    return round(math.fsum(products[sku]["price"] for sku in skus), 2)


def address(street: str, city: str, zip_code: str) -> dict[str, str]:
    """An address as orders keep it."""
    return {
        "street": " ".join(street.split()),
        "city": " ".join(city.split()),
        "zip": " ".join(zip_code.split()).upper(),
    }


def cancel(shop: Shop, order_id: str, reason: str) -> None:
    """Cancels a pending order; all of it is refunded.

    Raises:
        ValueError: the rules do not allow it; the text is for the agent. So with all operations.
    """
    order = _order(shop, order_id, "pending")
    if reason not in REASONS:
        raise ValueError(f"the reason must be one of: {'; '.join(REASONS)}")
    order.update(status="cancelled", reason=reason, refund=order["total"])


def change_address(shop: Shop, order_id: str, street: str, city: str, zip_code: str) -> None:
    """Gives a pending order another address."""
    _order(shop, order_id, "pending")["address"] = address(street, city, zip_code)


def return_items(shop: Shop, order_id: str, skus: Sequence[str]) -> None:
    """Takes items of a delivered order back; they are refunded. An order can be returned once."""
    order = _order(shop, order_id, "delivered")
    if not skus or any(list(skus).count(sku) > order["items"].count(sku) for sku in skus):
        raise ValueError(f"these are not items of the order: {', '.join(skus)}")
    order.update(status="return requested", returned=sorted(skus), refund=total(shop["products"], skus))


def exchange(shop: Shop, order_id: str, sku: str, new_sku: str) -> None:
    """Exchanges an item of a pending order for another option of the same product that is in stock."""
    order = _order(shop, order_id, "pending")
    product, wanted = shop["products"].get(sku), shop["products"].get(new_sku)
    if sku not in order["items"] or product is None:
        raise ValueError(f"{sku} is no item of the order")
    if wanted is None or wanted["name"] != product["name"] or sku == new_sku:
        raise ValueError(f"{new_sku} is not another option of the same product")
    if not wanted["in_stock"]:
        raise ValueError(f"{new_sku} is not in stock")
    order["items"][order["items"].index(sku)] = new_sku
    order["total"] = total(shop["products"], order["items"])


OPERATIONS: Mapping[str, Callable[..., None]] = {
    "cancel_order": cancel,
    "change_address": change_address,
    "return_items": return_items,
    "exchange_item": exchange,
}
"""What changes a shop, by the name of the tool."""


def options_of(shop: Shop, name: str) -> dict[str, Any]:
    """A product's options by sku; empty where there is no such product."""
    wanted = " ".join(name.lower().split())
    return {sku: dict(item) for sku, item in shop["products"].items() if item["name"] == wanted}


def find_user(shop: Shop, email: str) -> str | None:
    """Whose address it is."""
    wanted = email.strip().lower()
    return next((user for user, data in shop["users"].items() if data["email"] == wanted), None)


def _order(shop: Shop, order_id: str, status: str) -> dict[str, Any]:
    order: dict[str, Any] | None = shop["orders"].get(order_id)
    if order is None:
        raise ValueError(f"there is no order {order_id[:20]}")
    if order["status"] != status:
        raise ValueError(f"order {order_id} is {order['status']}; this is for {status} orders only")
    return order


def _skus_of(products: Mapping[str, Any], name: str) -> list[str]:
    return [sku for sku, item in products.items() if item["name"] == name]


def _address(draw: random.Random) -> dict[str, str]:
    city, zip_code = draw.choice(CITIES)
    return address(f"{draw.randint(1, 99)} {draw.choice(STREETS)}", city, zip_code)
