"""A client of any `/retrieve` server in search-r1's form, and that form's words, which our own server speaks too.

A request is {"queries": [text], "topk": number or null, "return_scores": bool}; its reply {"result": [[...]]} holds a list per query, of
{"document": {"id", "contents"}, "score"} or, without scores, of bare documents. `contents` is the title in quotation marks, a line end,
and the text. (Read in PeterGriffinJin/Search-R1, search_r1/search/retrieval_server.py.)
"""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from palestra.envs.search.corpus import citable
from palestra.envs.search.fts import bounded
from palestra.envs.search.text import MOST_CHARACTERS, one_line
from palestra.envs.search.types import Hit, RetrieverError

MOST_REPLY = 32 << 20
"""Bytes of a reply that are read."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class HttpRetriever:
    """Asks a server. It waits for the reply, at most `timeout_s` seconds."""

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        """`url`: of the server, with or without its `/retrieve`.

        Raises:
            ValueError: it is no http or https URL.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"a retriever's URL begins with http:// or https://, got {url!r}")
        url = url.rstrip("/")
        self._url = url if url.endswith("/retrieve") else f"{url}/retrieve"
        self._timeout_s = timeout_s

    def search(self, query: str, k: int = 5) -> list[Hit]:
        """See `Retriever`; the order is the server's."""
        asked = query[:MOST_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
        body = json.dumps({"queries": [asked], "topk": bounded(k), "return_scores": True}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with _DIRECT.open(request, timeout=self._timeout_s) as reply:
                said = json.loads(reply.read(MOST_REPLY))
        except urllib.error.HTTPError as error:
            raise RetrieverError(f"{self._url}: HTTP {error.code}: {error.read(500)!r}") from error
        except (OSError, ValueError) as error:
            raise RetrieverError(f"{self._url}: {type(error).__name__}: {error}") from error
        try:
            (found,) = said["result"]
            return [read_hit(item) for item in found[: bounded(k)]]
        except (ValueError, LookupError, TypeError) as error:
            raise RetrieverError(f"{self._url}: the reply is not in search-r1's form: {str(said)[:200]}") from error


def read_hit(item: Mapping[str, Any]) -> Hit:
    """A hit from a reply, with its score or as a bare document. One without an id that can be cited gets one made from its text.

    Raises:
        TypeError, LookupError: it is neither.
    """
    document, score = (item["document"], item["score"]) if "document" in item else (item, None)
    contents = document["contents"]
    title, _, text = contents.partition("\n")
    title = title.strip()
    if len(title) >= 2 and title.startswith('"') and title.endswith('"'):
        title = title[1:-1]
    identity = str(document.get("id", ""))
    if not citable(identity):
        identity = hashlib.blake2b(contents.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return Hit(identity, one_line(title), text, None if score is None else float(score))


def hit_to_json(hit: Hit, scored: bool) -> dict[str, Any]:
    """A hit as `read_hit` reads it."""
    document = {"id": hit.id, "contents": f'"{hit.title}"\n{hit.text}'}
    return {"document": document, "score": hit.score} if scored else document
