"""The same questions in other words: none of them holds a word of its field's name.

A `Factbook` goes in, `Task`s of one hop come out. They measure retrievers; nothing is trained on them. They were written after the
glossary, without looking at it; `known` says which of them it happens to help.
"""

from __future__ import annotations

import random

from palestra.envs.search.factbook import Factbook
from palestra.envs.search.glossary import other_words
from palestra.envs.search.questions import TOPICS, facts
from palestra.envs.search.text import STOP, words
from palestra.envs.types import Task

PARAPHRASES: dict[str, tuple[str, ...]] = {
    "capital": (
        "From which city is {c} ruled?",
        "Where does the leadership of {c} sit?",
        "Which town hosts the ministries of {c}?",
    ),
    "government": (
        "How is power organised in {c}?",
        "Is {c} a kingdom, a dictatorship or something else?",
        "Under what political order do the people of {c} live?",
    ),
    "independence": (
        "When did {c} stop being ruled by others?",
        "Since which day has {c} stood on its own feet?",
        "When did {c} become a sovereign state?",
    ),
    "symbols": (
        "Which animals or plants stand for {c}?",
        "What emblem do people associate with {c}?",
        "What does {c} use to represent itself?",
    ),
    "colours": (
        "Which shades represent {c}?",
        "In what hues do sports fans of {c} dress?",
        "Which tints stand for {c}?",
    ),
    "domain": (
        "What do websites from {c} end in?",
        "Which suffix do online addresses in {c} have?",
        "Which TLD belongs to {c}?",
    ),
    "currency": (
        "What money do people in {c} pay with?",
        "What is legal tender in {c}?",
        "Which banknotes are used in {c}?",
    ),
    "highest": (
        "What is the tallest mountain in {c}?",
        "Which peak towers over all of {c}?",
        "Where would a climber stand on top of {c}?",
    ),
    "coastline": (
        "How many kilometers of seashore does {c} have?",
        "How much of {c} lies along the ocean?",
        "How long would a walk along all beaches of {c} be?",
    ),
    "area": (
        "How big is {c}?",
        "How many square kilometers does {c} cover?",
        "How much ground does {c} take up?",
    ),
    "neighbours": (
        "Who are the neighbors of {c}?",
        "Which nations lie next to {c}?",
        "Where can you drive to directly from {c}?",
    ),
    "climate": (
        "What is the weather like in {c}?",
        "How warm and wet does it get in {c}?",
        "Should a traveller to {c} pack for heat, frost or storms?",
    ),
    "terrain": (
        "What does the landscape of {c} look like?",
        "Is {c} flat or mountainous?",
        "What kind of ground would a hiker cross in {c}?",
    ),
    "resources": (
        "What can be mined in {c}?",
        "Which riches lie under the soil of {c}?",
        "Which raw materials are found in {c}?",
    ),
    "languages": (
        "What tongues are spoken in {c}?",
        "How do people in {c} talk to each other?",
        "What would I have to learn to chat with locals in {c}?",
    ),
    "religions": (
        "What do people in {c} believe in?",
        "Which churches, mosques or temples do people in {c} attend?",
        "To whom do people in {c} pray?",
    ),
    "groups": (
        "Which peoples make up {c}?",
        "What are the origins of those who live in {c}?",
        "Of which descent are the inhabitants of {c}?",
    ),
    "age": (
        "How old is the typical person in {c}?",
        "Half of the people in {c} are younger than how many years?",
        "Are people in {c} young or old on average?",
    ),
    "industries": (
        "What do factories in {c} make?",
        "Which businesses keep {c} going?",
        "What is manufactured in {c}?",
    ),
    "farming": (
        "What do farmers in {c} grow?",
        "Which crops and livestock does {c} raise?",
        "What comes from the fields of {c}?",
    ),
    "exports": (
        "What does {c} sell to other countries?",
        "Which goods leave {c} for foreign markets?",
        "What do ships carry out of {c}?",
    ),
    "imports": (
        "What does {c} buy abroad?",
        "Which goods does {c} bring in from elsewhere?",
        "What do foreigners sell to {c}?",
    ),
}
"""By topic."""


def paraphrased_tasks(factbook: Factbook, seed: int = 0, size: int | None = None) -> tuple[Task, ...]:
    """One question per fact and wording, in an order that `seed` shuffles; the first `size` of them, or all. `meta["known"]`: whether the
    glossary has a word of it.
    """
    tasks = [
        Task(
            wording.format(c=fact.country.name),
            fact.answer,
            f"search/said/{fact.country.code}/{fact.topic.name}/{place}",
            {"gold": [fact.gold], "match": fact.topic.match, "hops": 1, "topic": fact.topic.name, "known": known(fact.topic.name, wording)},
        )
        for fact in facts(factbook)
        for place, wording in enumerate(PARAPHRASES[fact.topic.name])
    ]  # fmt: skip
    random.Random(f"paraphrases/{seed}").shuffle(tasks)
    return tuple(tasks[:size])


def known(topic: str, wording: str) -> bool:
    """Whether the glossary has a word of that wording for the topic's field."""
    asked = {word[:5] for word in words(wording.format(c="")) if word not in STOP}
    return bool(asked & {word[:5] for word in words(other_words(TOPICS[topic].path[1])) if word not in STOP})
