"""Words of texts: of queries, and of answers that are compared. Text in, words out; nothing is waited for."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

MOST_CHARACTERS = 2_000
"""Of a query or an answer that are looked at."""
MOST_WORDS = 64
"""Of a query that are searched for."""
STOP = frozenset(
    re.findall(
        r"[a-z]+",
        "a an and are as at be by can did do does for from had has have how i in is it its like many me much my of on or some tell that"
        " the their them there these they this to was were what when where which who whom whose why will with would you",
    )
)
"""English words that say nothing about a passage. Generic: it knows no question's wording."""

_WORD = re.compile(r"[^\W_]+")
_ARTICLES = frozenset(("a", "an", "the"))


def words(text: str) -> list[str]:
    """All words of a text, in lower case."""
    return _WORD.findall(text.lower())


def query_words(query: str) -> list[str]:
    """The words that a query is searched by: once each, without those of STOP, unless there are no others."""
    found = list(dict.fromkeys(words(query[:MOST_CHARACTERS])))
    return ([word for word in found if word not in STOP] or found)[:MOST_WORDS]


def one_line(text: str) -> str:
    """The text with every run of white space as one blank."""
    return " ".join(text.split())


def normalised(text: str) -> list[str]:
    """The words of an answer as they are compared: without case, accents, punctuation and articles; 1,000 is 1000."""
    plain = unicodedata.normalize("NFKD", text[:MOST_CHARACTERS])
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    plain = re.sub(r"(?<=[0-9]),(?=[0-9])", "", plain)
    return [word for word in words(plain) if word not in _ARTICLES]


def exact(answer: str, wanted: str) -> float:
    """1.0 where both have the same words in the same order, and any."""
    said = normalised(answer)
    return float(bool(said) and said == normalised(wanted))


def token_f1(answer: str, wanted: str) -> float:
    """The harmonic mean of precision and recall over words, in whatever order; 0.0 where either has none."""
    said, right = Counter(normalised(answer)), Counter(normalised(wanted))
    common = sum((said & right).values())
    return 2 * common / (said.total() + right.total()) if common else 0.0
