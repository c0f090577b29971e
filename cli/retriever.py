"""`palestra retriever serve` puts a corpus behind a `/retrieve` URL in search-r1's form, for environments here and trainers elsewhere.

In: the names of a corpus and of a retriever. Out: a listener until SIGTERM or SIGINT. Exit status: 0; 1 it could not go on; 2 what was
asked for is wrong or cannot be had here. Waits while an index is built.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs a verb; its exit status."""
    parser = argparse.ArgumentParser(prog="palestra retriever", description="Searching over HTTP.", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    about = "serve a corpus at /retrieve, in search-r1's form; whoever reaches the port can search it"
    serving = verbs.add_parser("serve", help=about, description=about, allow_abbrev=False)
    serving.add_argument("--corpus", default="factbook", help="factbook, or a JSONL file of {id, title, text}")
    serving.add_argument("--countries", metavar="CODE,CODE", help="some of the Factbook's countries instead of all")
    serving.add_argument("--retriever", default="fts", help="fts, bm25, dense, hybrid, or a sum such as fts:1+dense:3")
    serving.add_argument("--host", default="127.0.0.1")
    serving.add_argument("--port", type=int, default=8071, help="8071 unless given; 0: a free one")
    serving.add_argument("--threads", type=int, help="searches at a time; two per core unless given")
    options = parser.parse_args(argv)
    if not 0 <= options.port <= 65535:
        parser.error(f"--port {options.port} is no port")
    if options.threads is not None and options.threads < 1:
        parser.error("--threads must be at least 1")
    if options.retriever.startswith(("http://", "https://")):
        parser.error("--retriever is searched here; a URL is for those who ask")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    return serve(options)


def serve(options: argparse.Namespace) -> int:
    """Serves until told to stop."""
    from palestra.envs.search.choose import open_corpus, open_retriever
    from palestra.envs.search.types import RetrieverError
    from palestra.server.listen import bind, url_of
    from palestra.server.retriever.app import build_app
    from palestra.server.retriever.app import serve as listen

    countries = None if options.countries is None else tuple(code for code in options.countries.split(",") if code)
    try:
        corpus = open_corpus(options.corpus, countries)
        retriever = open_retriever(options.retriever, options.corpus, countries)
        sock = bind(options.host, options.port)
    except (ValueError, RetrieverError) as error:
        print(f"palestra retriever serve: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{options.host}:{options.port}"
        print(f"palestra retriever serve: cannot listen on {where}: {error.strerror or error}", file=sys.stderr)
        return 2
    about = {"retriever": options.retriever, "corpus": corpus.name, "passages": len(corpus)}
    banner = f"retriever     {url_of(sock)}/retrieve\nsearches      {corpus.name}, {len(corpus)} passages, by {options.retriever}"
    with sock:
        started = asyncio.run(
            listen(build_app(retriever, about, options.threads), sock, lambda: print(banner, flush=True))
        )
    return 0 if started else 1
