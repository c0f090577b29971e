"""What each retriever finds: recall on generated questions and on the same ones in other words, and 200 searches at once.

`--setup` builds the indexes, `--quick` measures within two minutes, no option asks every question. The last line printed is one JSON
object. Vectors are measured where the weights are installed (the extra `dense`); without them the line says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from palestra.envs.search.bert import load_minilm
from palestra.envs.search.bm25 import Bm25Retriever
from palestra.envs.search.choose import HYBRID, open_retriever
from palestra.envs.search.factbook import Factbook, load_factbook
from palestra.envs.search.fts import FtsRetriever
from palestra.envs.search.paraphrases import paraphrased_tasks
from palestra.envs.search.questions import search_tasks
from palestra.envs.search.types import Retriever, RetrieverError
from palestra.envs.types import Task

KS = (1, 5, 10)
QUICK = 300
"""Questions of each set with --quick."""
AT_ONCE = 200
"""Searches, each in a thread of its own."""


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--setup", action="store_true", help="build the indexes and stop")
    what.add_argument("--quick", action="store_true", help=f"{QUICK} questions of each set")
    options = parser.parse_args(argv)
    books = {"": load_factbook(), " without glossary": load_factbook(glossary=False)}
    retrievers, missing = made(books)
    if options.setup:
        print(json.dumps({"retrievers": list(retrievers), "missing": missing}))
        return 0
    size = QUICK if options.quick else None
    sets = question_sets(books[""], size)
    figures: dict[str, Any] = {
        "passages": len(books[""].corpus),
        "questions": {name: len(asked) for name, asked in sets.items()},
    }
    figures["recall"] = {}
    for name, retriever in retrievers.items():
        started = time.perf_counter()
        figures["recall"][name] = {kind: recall(retriever, asked) for kind, asked in sets.items()}
        spent = (time.perf_counter() - started) / sum(map(len, sets.values()))
        figures["recall"][name]["ms"] = round(spent * 1000, 2)
        print_row(name, figures["recall"][name])
    figures["at_once"] = {name: at_once(retriever, sets["templated"]) for name, retriever in retrievers.items()}
    figures["missing"] = missing
    print(json.dumps(figures))
    return 0 if not any(lost for lost in figures["at_once"].values()) else 1


def made(books: dict[str, Factbook]) -> tuple[dict[str, Retriever], dict[str, str]]:
    """The retrievers by name, and why others are not there."""
    found: dict[str, Retriever] = {}
    for note, book in books.items():
        found[f"fts{note}"] = FtsRetriever(book.corpus)
        found[f"bm25{note}"] = Bm25Retriever(book.corpus)
    found["fts:1+bm25:1"] = open_retriever("fts:1+bm25:1")
    missing: dict[str, str] = {}
    try:
        load_minilm()
    except RetrieverError as error:
        missing["dense"] = missing["hybrid"] = str(error)
        return found, missing
    print("dense: without an index this encodes every passage (16 minutes were seen on two cores)", file=sys.stderr)
    found["dense"] = open_retriever("dense")
    found[f"hybrid {HYBRID}"] = open_retriever("hybrid")
    return found, missing


def question_sets(book: Factbook, size: int | None) -> dict[str, Sequence[Task]]:
    """What is asked: with the fields' words, without them (as a whole, and by whether the glossary has a word of the question), and two
    hops in one query, which no retriever can answer.
    """
    said = paraphrased_tasks(book, size=None if size is None else 2 * size)
    return {
        "templated": search_tasks(book, hops=(1,), split="all", size=size),
        "paraphrased": said,
        "known": [task for task in said if task.meta["known"]],
        "unknown": [task for task in said if not task.meta["known"]],
        "two_hop": search_tasks(book, hops=(2,), split="all", size=size),
    }


def recall(retriever: Retriever, tasks: Sequence[Task]) -> dict[str, float]:
    """The share of questions whose answer's passage is among the first k."""
    right = dict.fromkeys(KS, 0)
    for task in tasks:
        found = [hit.id for hit in retriever.search(str(task.prompt), max(KS))]
        for k in KS:
            right[k] += task.meta["gold"][-1] in found[:k]
    return {f"@{k}": round(count / len(tasks), 3) for k, count in right.items()}


def at_once(retriever: Retriever, tasks: Sequence[Task]) -> int:
    """How many of AT_ONCE searches in as many threads did not find what they find alone."""
    queries = [str(tasks[index % len(tasks)].prompt) for index in range(AT_ONCE)]
    alone = [retriever.search(query, 5) for query in queries]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = list(pool.map(lambda query: retriever.search(query, 5), queries))
    return sum(one != other for one, other in zip(alone, together, strict=True))


def print_row(name: str, found: dict[str, Any]) -> None:
    """One line for people."""
    cells = "  ".join(
        f"{kind} {'/'.join(f'{value:.3f}' for value in part.values())}" for kind, part in found.items() if kind != "ms"
    )
    print(f"{name:24} {found['ms']:6.1f} ms  {cells}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
