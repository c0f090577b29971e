"""`palestra/Search-v0`: questions that have to be answered from documents, found by searching.

The policy gets a question, calls `search(query, k)` and `open(id)`, and answers with `<answer>...</answer>` and the passages that it rests
on, as `[id]`. Questions of two hops name their country by something that has to be looked up first.

Reward, at most 1.0, all parts on the last step:

| component     | weight | value                                                                                             |
| ------------- | ------ | ------------------------------------------------------------------------------------------------- |
| `answer`      | 0.8    | the last answer of the final message against the task's: equal words (match "exact"), or F1 over  |
|               |        | words (match "f1": lists and descriptions)                                                        |
| `citation`    | 0.2    | passages that were cited, seen in this episode and hold the answer, as a share of those cited or  |
|               |        | of those that hold it, whichever are more                                                         |
| `recall_seen` | 0      | the share of the passages that hold the answer which were seen: a figure for people               |

Case, accents, articles and punctuation do not count. An answer that is empty, cut off or longer than 2,000 characters is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

from palestra.envs.search.choose import open_corpus, open_retriever
from palestra.envs.search.corpus import Corpus
from palestra.envs.search.factbook import load_factbook
from palestra.envs.search.questions import search_tasks
from palestra.envs.search.text import MOST_CHARACTERS, exact, one_line, token_f1
from palestra.envs.search.types import Hit, Passage, Retriever, RetrieverError
from palestra.envs.tasks import TaskSource
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import call_message, tool
from palestra.envs.types import EnvError, Message, Reward, Task, ToolError

WEIGHTS = {"answer": 0.8, "citation": 0.2}
SYSTEM = (
    "Answer from the documents alone: search, and open what you find. Then reply with the answer in its documents' own words as "
    "<answer>...</answer>, followed by the id of each passage that it rests on, like [id]."
)
MOST_FOUND = 10
"""Passages that one search shows."""
MOST_REPLY = 20_000
"""Characters of a final message; a longer one holds no answer."""
_SHOWN = re.compile(r"^\[([^\[\]\n]{1,200})\] ", re.MULTILINE)
_CITED = re.compile(r"\[([^\[\]\n]{1,200})\]")


class Search(ToolEnv):
    """Questions over a corpus, answered by searching."""

    deterministic = True
    system: ClassVar[str | None] = SYSTEM

    def __init__(
        self,
        corpus: str = "factbook",
        retriever: str | Retriever = "fts",
        countries: Sequence[str] | None = None,
        hops: Sequence[int] = (1, 2),
        topics: Sequence[str] | None = None,
        split: str = "train",
        seed: int = 0,
        size: int | None = None,
        glossary: bool = True,
        snippet: int = 300,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        """Opens corpus and retriever, once per process for equal arguments.

        Args:
            corpus: "factbook", or a JSONL file of {"id", "title", "text"}; a file needs `tasks`.
            retriever: see `choose.open_retriever`; or one that is made already.
            countries: codes of the Factbook's countries, for a small corpus.
            hops, topics, split, seed, size: see `questions.search_tasks`.
            glossary: passages of the Factbook are found by other words for their fields as well.
            snippet: characters of a passage that `search` shows; `open` shows it whole.

        Raises:
            ValueError: an argument that cannot be used.
            RetrieverError: a package or weights are missing.
        """
        if isinstance(snippet, bool) or not 1 <= snippet <= 20_000:
            raise ValueError(f"snippet is a number of characters from 1 to 20000, got {snippet!r}")
        chosen = None if countries is None else tuple(countries)
        self.corpus: Corpus = open_corpus(corpus, chosen, glossary)
        self.retriever: Retriever = (
            open_retriever(retriever, corpus, chosen, glossary) if isinstance(retriever, str) else retriever
        )
        if tasks is None:
            if corpus != "factbook":
                raise ValueError(f"corpus {corpus!r} has no questions of its own; give a file of tasks")
            tasks = _questions(
                chosen, glossary, tuple(hops), None if topics is None else tuple(topics), split, seed, size
            )
        self._snippet = snippet
        # What another process answers may change, or be of another index after a restart.
        self.deterministic = isinstance(retriever, str) and not retriever.startswith("http")
        self._found: dict[str, Hit] = {}
        super().__init__(render_mode, tasks)

    def setup(self, task: Task) -> None:
        self._found = {}

    @tool
    def search(self, query: str, k: int = 5) -> str:
        """Searches the documents and shows beginnings of the best passages.

        Args:
            query: Words to look for.
            k: How many passages, 1 to 10.
        """
        try:
            hits = self.retriever.search(query, max(1, min(k, MOST_FOUND)))
        except RetrieverError as error:
            raise EnvError(f"search: {error}") from error
        self._found |= {hit.id: hit for hit in hits}
        return "\n\n".join(_show(hit, self._snippet) for hit in hits) or "No passage matches."

    @tool
    def open(self, id: str) -> str:
        """Shows a whole passage.

        Args:
            id: Of the passage, as in the search's result.
        """
        found: Hit | Passage | None = self._found.get(id) or self.corpus.get(id)
        if found is None:
            raise ToolError(f"there is no passage {id[:100]!r}; open ids that a search has shown")
        return _show(found, None)

    def score(self, task: Task, transcript: Sequence[Message]) -> Reward:
        gold = [str(identity) for identity in task.meta.get("gold", ())]
        seen = self.seen()
        answer, cited = read_reply(transcript)
        parts = {
            "answer": max((grade(answer, wanted, task) for wanted in _accepted(task)), default=0.0),
            "citation": _share(cited & seen & set(gold), max(len(cited), len(set(gold)))),
            "recall_seen": _share(seen & set(gold), len(set(gold))),
        }
        # Without known passages there is nothing to cite: the answer is all.
        value = sum(weight * parts[name] for name, weight in WEIGHTS.items()) if gold else parts["answer"]
        return Reward(round(value, 6), parts, f"answered {answer!r}" if answer is not None else "no answer")

    def seen(self) -> set[str]:
        """The ids of the passages that this episode's tools have shown."""
        texts = (call.result for call in self.calls if call.error is None and call.name in self.tools)
        return {identity for text in texts if isinstance(text, str) for identity in _SHOWN.findall(text)}

    def oracle(self, task: Task) -> list[Message]:
        """Opens each passage that holds the answer, then gives it."""
        gold = list(task.meta.get("gold", ()))
        said = f"<answer>{_accepted(task)[0]}</answer> {' '.join(f'[{identity}]' for identity in gold)}"
        opened = [calls("open", call_id=f"call_{place}", id=identity) for place, identity in enumerate(gold)]
        return [*opened, {"role": "assistant", "content": said.strip()}]


def calls(name: str, call_id: str = "call_0", **arguments: Any) -> Message:
    """An assistant message that calls a tool."""
    return call_message(name, json.dumps(arguments, ensure_ascii=False), call_id)


def read_reply(transcript: Sequence[Message]) -> tuple[str | None, set[str]]:
    """The answer and the citations of the final message. The last answer counts: None where it is empty, cut off or too long.
    What stands inside of an answer is no citation.
    """
    final = transcript[-1] if transcript else {}
    content = final.get("content")
    if (
        final.get("role") != "assistant"
        or final.get("tool_calls")
        or not isinstance(content, str)
        or len(content) > MOST_REPLY
    ):
        return None, set()
    start = content.rfind("<answer>")
    end = content.find("</answer>", start)
    if start < 0 or end < 0:
        return None, set(_CITED.findall(content))
    answer = content[start + len("<answer>") : end].strip()
    outside = f"{content[:start]}\n{content[end:]}"
    return answer if 0 < len(answer) <= MOST_CHARACTERS else None, set(_CITED.findall(outside))


def grade(answer: str | None, wanted: str, task: Task) -> float:
    """How right an answer is, 0 to 1, by the task's `match`: "exact" unless it says "f1".

    Raises:
        ValueError: the task names another one.
    """
    match = task.meta.get("match", "exact")
    if match not in ("exact", "f1"):
        raise ValueError(f"task {task.id!r}: match must be 'exact' or 'f1', got {match!r}")
    if answer is None:
        return 0.0
    return exact(answer, wanted) if match == "exact" else token_f1(answer, wanted)


def _accepted(task: Task) -> list[str]:
    """The answers that are right: one text, or a list of them."""
    given = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    if not given or not all(isinstance(answer, str) and answer for answer in given):
        raise ValueError(f"task {task.id!r}: the answer must be a text or a list of texts")
    return list(given)


def _share(part: set[str], whole: int) -> float:
    return len(part) / whole if whole else 0.0


def _show(found: Hit | Passage, most: int | None) -> str:
    text = one_line(found.text)
    text = text if most is None or len(text) <= most else f"{text[:most].rstrip()}..."
    if text.startswith("["):
        text = f" {text}"  # what begins a line in brackets is the id of a passage that was shown
    return f"[{found.id}] {one_line(found.title)}\n{text}"


@cache
def _questions(
    countries: tuple[str, ...] | None,
    glossary: bool,
    hops: tuple[int, ...],
    topics: tuple[str, ...] | None,
    split: str,
    seed: int,
    size: int | None,
) -> tuple[Task, ...]:
    return search_tasks(load_factbook(countries, glossary), hops, topics, split, seed, size)
