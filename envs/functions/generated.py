"""A small set of function-calling tasks in the leaderboard's own form, for training and for tests without its package.

A seed and an index go in, a `Task` comes out. Nothing is waited for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palestra.envs.functions.bfcl import CATEGORIES
from palestra.envs.tasks import GeneratedTasks, TaskSource
from palestra.envs.types import Task

CITIES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Kyoto", "Quebec", "Adelaide", "Tallinn")
PEOPLE = ("Ines", "Tomas", "Aiko", "Samir", "Lena", "Pablo")
Made = tuple[str, dict[str, Any]]
"""A request in words, and what the arguments may be."""


def _function(name: str, description: str, required: Sequence[str], **properties: tuple[str, str]) -> dict[str, Any]:
    shapes = {key: {"type": kind, "description": about} for key, (kind, about) in properties.items()}
    parameters = {"type": "dict", "properties": shapes, "required": list(required)}
    return {"name": name, "description": description, "parameters": parameters}


def _weather(draw: random.Random) -> Made:
    city, unit = draw.choice(CITIES), draw.choice(("celsius", "fahrenheit"))
    return f"tell me what the weather is in {city}, in degrees {unit}", {"city": [city], "unit": [unit]}


def _area(draw: random.Random) -> Made:
    base, height = draw.randint(2, 40), draw.randint(2, 40)
    return f"work out the area of a triangle with base {base} and height {height}", {
        "base": [base],
        "height": [height],
        "unit": ["", "units"],
    }


def _table(draw: random.Random) -> Made:
    guests, hour, city = draw.randint(2, 8), draw.randint(17, 21), draw.choice(CITIES)
    return f"book a table for {guests} in {city} at {hour}:00", {
        "city": [city],
        "guests": [guests],
        "time": [f"{hour}:00"],
        "outdoor": ["", False],
    }


def _message(draw: random.Random) -> Made:
    to = draw.sample(PEOPLE, 2)
    place = draw.choice(CITIES)
    text = f"See you in {place}"
    return f'send {to[0]} and {to[1]} the message "{text}"', {"to": [to, to[::-1]], "text": [text, f"{text}."]}


def _convert(draw: random.Random) -> Made:
    amount, source, target = draw.randint(5, 500), *draw.sample(("EUR", "USD", "JPY", "CHF"), 2)
    return f"tell me how much {amount} {source} are in {target}", {
        "amount": [amount],
        "source": [source],
        "target": [target],
    }


def _timer(draw: random.Random) -> Made:
    minutes, label = draw.randint(1, 59), draw.choice(("tea", "bread", "laundry"))
    return f"start a timer of {minutes} minutes for the {label}", {
        "minutes": [minutes],
        "options": [{"label": [label], "sound": ["", "bell"]}],
    }


_TIMER = _function(
    "clock.set_timer",
    "Starts a timer.",
    ("minutes",),
    minutes=("integer", "How long."),
    options=("dict", "How it is announced."),
)
_TIMER["parameters"]["properties"]["options"]["properties"] = {
    "label": {"type": "string", "description": "What it is for."},
    "sound": {"type": "string", "description": "What is played.", "default": "bell"},
}
_MESSAGE = _function(
    "send_message",
    "Sends a message to people.",
    ("to", "text"),
    to=("array", "First names."),
    text=("string", "The message."),
)
_MESSAGE["parameters"]["properties"]["to"]["items"] = {"type": "string"}
LIBRARY: Mapping[str, tuple[dict[str, Any], Callable[[random.Random], Made]]] = {
    function["name"]: (function, make)
    for function, make in (
        (
            _function(
                "get_weather",
                "The weather in a city.",
                ("city", "unit"),
                city=("string", "The city."),
                unit=("string", "celsius or fahrenheit."),
            ),
            _weather,
        ),
        (
            _function(
                "geometry.triangle_area",
                "The area of a triangle.",
                ("base", "height"),
                base=("float", "Its base."),
                height=("float", "Its height."),
                unit=("string", "The unit of both; units where nothing is said."),
            ),
            _area,
        ),
        (
            _function(
                "book_table",
                "Books a table in a restaurant.",
                ("city", "guests", "time"),
                city=("string", "The city."),
                guests=("integer", "How many people."),
                time=("string", "HH:MM."),
                outdoor=("boolean", "Outside or not; false where nothing is said."),
            ),
            _table,
        ),
        (_MESSAGE, _message),
        (
            _function(
                "convert_currency",
                "Converts an amount of money.",
                ("amount", "source", "target"),
                amount=("float", "How much."),
                source=("string", "Code of its currency."),
                target=("string", "Code of the other currency."),
            ),
            _convert,
        ),
        (_TIMER, _timer),
    )
}
"""The functions, and what makes a request for each."""


def generated_tasks(seed: int = 0, size: int = 1000, categories: Sequence[str] = CATEGORIES) -> TaskSource:
    """A deterministic source; the categories take turns.

    Raises:
        ValueError: unknown categories.
    """
    chosen = tuple(categories)
    if not chosen or (unknown := sorted(set(chosen) - set(CATEGORIES))):
        raise ValueError(f"categories must be some of {CATEGORIES}, got {unknown if chosen else chosen}")

    def make(index: int) -> Task:
        category = chosen[index % len(chosen)]
        draw = random.Random(f"functions/{seed}/{index}")
        names = draw.sample(sorted(LIBRARY), 4)
        wanted = _wanted(category, names, draw)
        made = [LIBRARY[name][1](draw) for name in wanted]
        offered = names[1:] if category == "irrelevance" else names if "multiple" in category else [names[0]]
        functions = [LIBRARY[name][0] for name in sorted(offered)]
        text = f"Please {'; and '.join(words for words, _ in made)}."
        answer = [{name: allowed} for name, (_, allowed) in zip(wanted, made, strict=True)]
        meta = {"category": category, "functions": functions}
        prompt = ({"role": "user", "content": text},)
        return Task(prompt, None if category == "irrelevance" else answer, f"functions/{seed}/{index}", meta)

    return GeneratedTasks(size, make)


def _wanted(category: str, names: Sequence[str], draw: random.Random) -> list[str]:
    """Which functions a request is for, one for each call."""
    if category == "parallel":
        return [names[0]] * draw.randint(2, 3)
    return list(names[: draw.randint(2, 3)]) if category == "parallel_multiple" else [names[0]]
