"""The `/retrieve` listener: search-r1's form, refusals, many clients at once, and its verb as a process."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.retriever import main
from palestra.envs.search.env import Search, calls
from palestra.envs.search.factbook import load_factbook
from palestra.envs.search.fts import FtsRetriever
from palestra.envs.search.http import HttpRetriever
from palestra.envs.search.types import Hit, Retriever, RetrieverError
from palestra.envs.types import EnvError
from palestra.server.listen import bind, url_of
from palestra.server.ready import ReadyServer, config_of
from palestra.server.retriever.app import MOST_QUERIES, build_app

SLICE = ("ke", "fr", "ja")


class Served:
    """The listener in a thread, on a loop of its own."""

    def __init__(self, retriever: Retriever) -> None:
        self.sock, ready = bind("127.0.0.1", 0), threading.Event()
        self.url = url_of(self.sock)
        self.server = ReadyServer(config_of(build_app(retriever, {"corpus": "test"}, 4), grace_s=2), ready.set)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self.sock])), daemon=True)
        self.thread.start()
        assert ready.wait(30)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        self.sock.close()
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> FtsRetriever:
    return FtsRetriever(load_factbook(SLICE).corpus, folder=tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def url(local: FtsRetriever) -> Iterator[str]:
    served = Served(local)
    yield served.url
    served.close()


def post(url: str, body: bytes) -> tuple[int, Any]:
    request = urllib.request.Request(f"{url}/retrieve", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def ask(url: str, **said: Any) -> tuple[int, Any]:
    return post(url, json.dumps(said).encode())


class TestForm:
    def test_scores_are_given_where_they_are_asked_for(self, url: str) -> None:
        status, said = ask(url, queries=["capital of Kenya", "?!"], topk=2, return_scores=True)
        assert status == 200
        first, nothing = said["result"]
        assert [sorted(item) for item in first] == [["document", "score"]] * 2
        assert first[0]["document"]["id"] == "ke/government/capital"
        assert first[0]["document"]["contents"].startswith('"Kenya | Government | Capital"\nname: Nairobi')
        assert first[0]["score"] > first[1]["score"]
        assert nothing == []

    def test_bare_documents_otherwise_and_three_of_them(self, url: str) -> None:
        status, said = ask(url, queries=["capital of Kenya"])
        assert status == 200
        assert [sorted(item) for item in said["result"][0]] == [["contents", "id"]] * 3
        assert ask(url, queries=["capital of Kenya"], topk=None, return_scores=False)[1] == said
        assert ask(url, queries=[])[1] == {"result": []}

    @pytest.mark.parametrize(
        ("said", "told"),
        [
            ({"queries": "abc"}, "list of texts"),
            ({"queries": ["a", 7]}, "list of texts"),
            ({"queries": None}, "list of texts"),
            ({}, "list of texts"),
            ({"queries": ["a"] * (MOST_QUERIES + 1)}, "at most"),
            ({"queries": ["a"], "topk": 0}, "topk"),
            ({"queries": ["a"], "topk": 101}, "topk"),
            ({"queries": ["a"], "topk": "3"}, "topk"),
            ({"queries": ["a"], "topk": True}, "topk"),
            ({"queries": ["a"], "return_scores": "no"}, "return_scores"),
        ],
    )
    def test_wrong_requests_are_refused_with_the_key(self, url: str, said: dict[str, Any], told: str) -> None:
        status, reply = ask(url, **said)
        assert status == 422
        assert told in reply["detail"]

    @pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"abc"', b"\xff", b"[" * 100_000])
    def test_what_is_no_object_is_refused(self, url: str, body: bytes) -> None:
        assert post(url, body)[0] == 422

    def test_a_long_body_is_refused(self, url: str) -> None:
        assert post(url, b" " * (4 << 20) + b"{}")[0] == 413

    def test_health(self, url: str) -> None:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as reply:
            assert json.loads(reply.read()) == {"status": "ok", "corpus": "test"}


class TestClient:
    def test_it_finds_what_the_local_one_does(self, url: str, local: FtsRetriever) -> None:
        for address in (url, f"{url}/", f"{url}/retrieve"):
            assert HttpRetriever(address).search("capital of Kenya", 7) == local.search("capital of Kenya", 7)

    @pytest.mark.parametrize("query", ["", "\ud800", "\x00", 'AND "', "x" * 10_000])
    def test_awkward_queries_are_answered(self, url: str, query: str) -> None:
        assert isinstance(HttpRetriever(url).search(query, 1000), list)

    def test_many_clients_at_once_get_the_answers_of_one(self, url: str, local: FtsRetriever) -> None:
        queries = [
            f"{topic} of {country}"
            for topic in ("capital", "climate", "exports", "religions")
            for country in ("Kenya", "France")
        ]
        alone = {query: local.search(query, 5) for query in queries}
        gate = threading.Barrier(100)

        def one(index: int) -> bool:
            gate.wait(60)
            query = queries[index % len(queries)]
            return [HttpRetriever(url).search(query, 5) for _ in range(2)] == [alone[query]] * 2

        with ThreadPoolExecutor(100) as pool:
            assert all(pool.map(one, range(100)))

    def test_an_environment_searches_through_it(self, url: str) -> None:
        env = Search(countries=SLICE, hops=(1,), retriever=url)
        env.reset(seed=0)
        (answer,), *_ = env.step(calls("search", query="capital of Kenya", k=1))
        assert answer["content"].startswith("[ke/government/capital]")

    def test_a_server_s_faults_are_retriever_errors_and_faults_of_the_environment(self) -> None:
        class Broken:
            def search(self, query: str, k: int = 5) -> list[Hit]:
                raise RetrieverError("the index is gone")

        served = Served(Broken())
        try:
            with pytest.raises(RetrieverError, match=r"HTTP 503.*the index is gone"):
                HttpRetriever(served.url).search("x")
        finally:
            served.close()
        with pytest.raises(RetrieverError, match="refused"):
            HttpRetriever(served.url).search("x")
        env = Search(countries=SLICE, hops=(1,), retriever=served.url)
        env.reset(seed=0)
        with pytest.raises(EnvError, match="refused"):
            env.step(calls("search", query="x"))

    def test_other_servers_replies(self) -> None:
        replies: list[Any] = [
            {"result": [[{"id": 7, "contents": '"T"\nx'}, {"contents": "no id"}]]},
            {"result": [[{"document": {"id": "a", "contents": "t\nx\ny"}, "score": 0.5}]]},
            {"result": []},
            {"result": [[{"document": {}}]]},
            [],
        ]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                body = json.dumps(replies.pop(0)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            client = HttpRetriever(f"http://127.0.0.1:{server.server_port}")
            bare = client.search("q")
            assert (bare[0], bare[1].title, bare[1].score) == (Hit("7", "T", "x"), "no id", None)
            assert client.search("q") == [Hit("a", "t", "x\ny", 0.5)]
            for _ in range(3):
                with pytest.raises(RetrieverError, match="form"):
                    client.search("q")
        finally:
            server.shutdown()
            server.server_close()
            thread.join(10)

    def test_a_url_of_another_kind_is_refused(self) -> None:
        with pytest.raises(ValueError, match="http"):
            HttpRetriever("file:///x")


class TestVerb:
    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["serve", "--port", "70000"], "port"),
            (["serve", "--threads", "0"], "threads"),
            (["serve", "--retriever", "http://127.0.0.1:1"], "URL"),
            ([], "VERB"),
        ],
    )
    def test_wrong_arguments_are_told(
        self, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--corpus", "/no/such.jsonl"], "cannot be read"),
            (["--countries", "zz"], "zz"),
            (["--countries", "ke", "--retriever", "elastic"], "elastic"),
            (["--countries", "ke", "--host", "192.0.2.1"], "cannot listen"),
        ],
    )
    def test_what_cannot_be_had_is_told(
        self,
        arguments: list[str],
        told: str,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert main(["serve", *arguments]) == 2
        assert told in capsys.readouterr().err

    @pytest.mark.walk
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_it_serves_until_it_is_told_to_stop(self, number: int, tmp_path: Path) -> None:
        corpus = tmp_path / "c.jsonl"
        corpus.write_text('{"id": "1", "title": "Cats", "text": "Cats sleep."}\n')
        code = "import sys; from palestra.cli.retriever import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-P", "-c", code, "serve", "--corpus", str(corpus), "--port", "0"]
        environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            assert [hit.id for hit in HttpRetriever(url).search("cats")] == ["1"]
            process.send_signal(number)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
