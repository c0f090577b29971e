"""Questions about countries, made from the Factbook's own values: of one hop, and of two.

A `Factbook` goes in, `Task`s come out, each with the passages that hold its answer. A question of one hop names its country; one of two
hops names it by something that no other country has ("the country whose capital is Nairobi"), so it takes two searches.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from palestra.envs.search.factbook import Country, Factbook, load_factbook, passage_id, value_of
from palestra.envs.search.text import normalised
from palestra.envs.types import Task

SPLITS = ("train", "eval", "all")
EVAL_PERCENT = 20
"""Of all facts (a country and a topic): their questions, of one hop and of two, are for evaluation only."""
MOST_ANSWER = 300
"""Characters of an answer; a country whose value is longer is not asked about that topic."""


@dataclass(frozen=True, slots=True)
class Topic:
    """Something that countries are asked about."""

    name: str
    question: str
    """With `{c}` where the country is named."""
    path: tuple[str, ...]
    """Section, field and sub-field of the value."""
    match: str
    """How an answer is compared: exact or f1 (lists and descriptions)."""
    read: Callable[[str], str]
    """The answer in a field's value; empty where there is none."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One value of one country."""

    country: Country
    topic: Topic
    answer: str
    gold: str
    """The passage that holds it."""


def _plain(value: str) -> str:
    """Without remarks and the year."""
    value = re.split(r";|\bnote\b", re.sub(r"\([^()]*\)", "", value))[0]
    return value.strip(" ,.-")


def _list(value: str) -> str:
    """A list, without the year that it is of."""
    return re.sub(r"\s*\(\d{4}(?: est\.)?\)", "", re.split(r"\bnote\b", value)[0]).strip(" ,;.")


def _named_point(value: str) -> str:
    """The name before a height: `Mount Kenya 5,199 m`."""
    found = re.match(r"([^\d;]{2,60}?) -?[\d,.]+ m\b", value)
    return _plain(found[1]) if found else ""


def _neighbours(value: str) -> str:
    """The countries of `Argentina 541 km; Brazil 1,050 km`."""
    named = (re.match(r"([^\d]{2,40}?)\s[\d,.]+ km", part.strip()) for part in _plain_semicolons(value))
    return ", ".join(_plain(found[1]) for found in named if found)


def _plain_semicolons(value: str) -> list[str]:
    return re.sub(r"\([^()]*\)", "", value).split(";")


def _date(value: str) -> str:
    """`12 December 1963`."""
    found = re.match(r"\d{1,2} [A-Z][a-z]+ \d{4}\b", value)
    return found[0] if found else ""


def _money(value: str) -> str:
    """The currency of `Kenyan shillings (KES) per US dollar -`."""
    return _plain(value.partition(" per ")[0])


_PEOPLE, _LAND, _STATE = "People and Society", "Geography", "Government"
_BORDERS = "Land boundaries"
TOPICS: Mapping[str, Topic] = {
    topic.name: topic
    for topic in (
        Topic("capital", "What is the capital of {c}?", (_STATE, "Capital", "name"), "exact", _plain),
        Topic("government", "What type of government does {c} have?", (_STATE, "Government type"), "exact", _plain),
        Topic("independence", "On which date did {c} gain independence?", (_STATE, "Independence"), "exact", _date),
        Topic("symbols", "What are the national symbols of {c}?", (_STATE, "National symbol(s)"), "f1", _list),
        Topic("colours", "What are the national colors of {c}?", (_STATE, "National color(s)"), "f1", _list),
        Topic("domain", "What is the internet country code of {c}?", ("Communications", "Internet country code"), "exact", _plain),
        Topic("currency", "In which currency are exchange rates of {c} given?", ("Economy", "Exchange rates", "Currency"), "exact", _money),
        Topic("highest", "What is the highest point of {c} by elevation?", (_LAND, "Elevation", "highest point"), "exact", _named_point),
        Topic("coastline", "How long is the coastline of {c}?", (_LAND, "Coastline"), "exact", _plain),
        Topic("area", "What is the total area of {c}?", (_LAND, "Area", "total"), "exact", _plain),
        Topic("neighbours", "Which countries have land boundaries with {c}?", (_LAND, _BORDERS, "border countries"), "f1", _neighbours),
        Topic("climate", "What is the climate of {c} like?", (_LAND, "Climate"), "f1", _list),
        Topic("terrain", "What is the terrain of {c} like?", (_LAND, "Terrain"), "f1", _list),
        Topic("resources", "Which natural resources does {c} have?", (_LAND, "Natural resources"), "f1", _list),
        Topic("languages", "Which languages do people speak in {c}?", (_PEOPLE, "Languages", "Languages"), "f1", _list),
        Topic("religions", "Which religions do people in {c} follow?", (_PEOPLE, "Religions"), "f1", _list),
        Topic("groups", "Which ethnic groups live in {c}?", (_PEOPLE, "Ethnic groups"), "f1", _list),
        Topic("age", "What is the median age in {c}?", (_PEOPLE, "Median age", "total"), "exact", _plain),
        Topic("industries", "Which industries does {c} have?", ("Economy", "Industries"), "f1", _list),
        Topic("farming", "What are the main agricultural products of {c}?", ("Economy", "Agricultural products"), "f1", _list),
        Topic("exports", "Which commodities does {c} export?", ("Economy", "Exports - commodities"), "f1", _list),
        Topic("imports", "Which commodities does {c} import?", ("Economy", "Imports - commodities"), "f1", _list),
    )
}  # fmt: skip
"""By name. The questions hold the fields' own words; `paraphrases` asks the same in other ones."""
BRIDGES: Mapping[str, str] = {
    "capital": "the country whose capital is {v}",
    "highest": "the country whose highest point is {v}",
    "domain": "the country with the internet country code .{v}",
}
"""Ways to name a country without its name."""


def search_tasks(
    factbook: Factbook,
    hops: Sequence[int] = (1, 2),
    topics: Sequence[str] | None = None,
    split: str = "train",
    seed: int = 0,
    size: int | None = None,
) -> tuple[Task, ...]:
    """Questions in an order that `seed` shuffles; the first `size` of them, or all.

    No question of "train" asks for a fact of "eval", or names a country by one; "all" has both.

    Raises:
        ValueError: unknown hops, topics or split, or there is no such question.
    """
    chosen = tuple(TOPICS) if topics is None else tuple(topics)
    if unknown := [name for name in chosen if name not in TOPICS]:
        raise ValueError(f"unknown topic {unknown[0]!r}; topics: {', '.join(TOPICS)}")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    if not hops or any(hop not in (1, 2) for hop in hops):
        raise ValueError(f"hops are 1, 2 or both, got {tuple(hops)}")
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    wanted = [fact for fact in facts(factbook) if fact.topic.name in chosen and split in ("all", split_of(fact))]
    tasks = [*(_one_hop(fact) for fact in wanted if 1 in hops)]
    if 2 in hops:
        tasks += _two_hops(factbook, wanted, split)
    if not tasks:
        raise ValueError(
            f"no question of {tuple(hops)} hops about {chosen} of {factbook.corpus.name} is in split {split!r}"
        )
    random.Random(f"search/{seed}").shuffle(tasks)
    return tuple(tasks[:size])


def facts(factbook: Factbook) -> Iterator[Fact]:
    """Every value of every country that can be asked for: short enough, and whole in the first passage of its field."""
    for country in factbook.countries:
        for topic in TOPICS.values():
            value = value_of(country, topic.path)
            answer = topic.read(value) if value is not None and value.lower() not in ("none", "na") else ""
            gold = passage_id(country.code, topic.path[0], topic.path[1])
            passage = factbook.corpus.get(gold)
            if passage is None or not normalised(answer) or len(answer) > MOST_ANSWER or normalised(answer) == ["none"]:
                continue
            if set(normalised(answer)) <= set(normalised(passage.text)):
                yield Fact(country, topic, answer, gold)


def split_of(fact: Fact) -> str:
    """train or eval: by what is asked of whom, whatever else is in the set."""
    digest = hashlib.blake2b(f"{fact.country.code}/{fact.topic.name}".encode(), digest_size=4).digest()
    return "eval" if int.from_bytes(digest, "big") % 100 < EVAL_PERCENT else "train"


def _one_hop(fact: Fact) -> Task:
    meta = {"gold": [fact.gold], "match": fact.topic.match, "hops": 1, "topic": fact.topic.name}
    question = fact.topic.question.format(c=fact.country.name)
    return Task(question, fact.answer, f"search/1/{fact.country.code}/{fact.topic.name}", meta)


def _two_hops(factbook: Factbook, wanted: Sequence[Fact], split: str) -> Iterator[Task]:
    bridges = bridges_of(factbook)
    for fact in wanted:
        for bridge in bridges.get(fact.country.code, ()):
            if bridge.topic.name == fact.topic.name or _shared(bridge.answer, fact.answer):
                continue
            if split == "train" and split_of(bridge) == "eval":
                continue
            named = BRIDGES[bridge.topic.name].format(v=bridge.answer)
            meta = {"gold": [bridge.gold, fact.gold], "match": fact.topic.match, "hops": 2, "topic": fact.topic.name}
            meta["bridge"] = fact.country.name
            identity = f"search/2/{fact.country.code}/{bridge.topic.name}/{fact.topic.name}"
            yield Task(fact.topic.question.format(c=named), fact.answer, identity, meta)


def bridges_of(factbook: Factbook) -> dict[str, list[Fact]]:
    """By a country's code, what names it and no other: neither its name nor the name of its people is in it.

    What is unique is looked for among all countries, also where the corpus has a few of them.
    """
    owners: dict[tuple[str, str], set[str]] = defaultdict(set)
    for fact in _all_bridges():
        owners[_bridge_key(fact)].add(fact.country.code)
    codes = {country.code for country in factbook.countries}
    found: dict[str, list[Fact]] = defaultdict(list)
    for fact in _all_bridges():
        told = (fact.country.name, *fact.country.names)
        if (
            fact.country.code in codes
            and len(owners[_bridge_key(fact)]) == 1
            and not any(_shared(fact.answer, name) for name in told)
        ):
            found[fact.country.code].append(fact)
    return found


@cache
def _all_bridges() -> tuple[Fact, ...]:
    return tuple(fact for fact in facts(load_factbook()) if fact.topic.name in BRIDGES)


def _bridge_key(fact: Fact) -> tuple[str, str]:
    return fact.topic.name, " ".join(normalised(fact.answer))


def _shared(value: str, name: str) -> bool:
    """Whether one gives the other away: a word in common, or a beginning of five letters (Algiers, Algeria)."""
    said, named = normalised(value), normalised(name)
    heads = {word[:5] for word in named if len(word) >= 5}
    return bool(set(said) & set(named)) or any(word[:5] in heads for word in said if len(word) >= 5)
