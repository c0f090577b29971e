"""Retrievers: every kind over one small corpus, whatever is asked, from many threads; and what each kind adds."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palestra.envs.search import bert, choose, dense, fts
from palestra.envs.search.bm25 import Bm25Retriever
from palestra.envs.search.corpus import Corpus, cached_file, read_corpus
from palestra.envs.search.dense import DenseRetriever
from palestra.envs.search.factbook import clean, load_factbook, passage_id
from palestra.envs.search.fts import FtsRetriever
from palestra.envs.search.glossary import GLOSSARY, other_words
from palestra.envs.search.http import hit_to_json, read_hit
from palestra.envs.search.hybrid import HybridRetriever
from palestra.envs.search.paraphrases import PARAPHRASES, paraphrased_tasks
from palestra.envs.search.questions import TOPICS, search_tasks
from palestra.envs.search.text import STOP, exact, query_words, token_f1, words
from palestra.envs.search.types import MOST_HITS, CorpusError, Floats, Hit, Passage, Retriever, RetrieverError
from tests.tiny import train_tokenizer

SMALL = Corpus(
    [
        Passage("ke/capital", "Kenya | Capital", "name: Nairobi", "seat of government"),
        Passage("fr/capital", "France | Capital", "name: Paris", "seat of government"),
        Passage("ke/languages", "Kenya | Languages", "English, Kiswahili", "tongues Kenyan"),
        Passage("fr/languages", "France | Languages", "French", "tongues"),
        Passage("notes", "Notes", 'AND NOT near( "quoted" multi-agent don\'t 38.101 C++ été'),
    ],
    "small",
)


class Hashed:
    """An encoder of bags of words: quick, and right where words are shared."""

    name = "hashed-1"

    def encode(self, texts: list[str]) -> Floats:
        rows = numpy.zeros((len(texts), 256), numpy.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in words(text):
                row[sum(word.encode()) * 31 % 256] += 1
        return rows / numpy.maximum(numpy.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def make(kind: str, corpus: Corpus, folder: Path) -> Retriever:
    match kind:
        case "fts":
            return FtsRetriever(corpus, folder=folder)
        case "bm25":
            return Bm25Retriever(corpus)
        case "dense":
            return DenseRetriever(corpus, Hashed(), folder)
        case _:
            return HybridRetriever([(make("fts", corpus, folder), 1.0), (make("dense", corpus, folder), 2.0)])


@pytest.fixture(scope="module", params=["fts", "bm25", "dense", "hybrid"])
def retriever(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    return make(request.param, SMALL, tmp_path_factory.mktemp("indexes"))


class TestEveryKind:
    @pytest.mark.parametrize(
        ("query", "best"),
        [
            ("What is the capital of Kenya?", "ke/capital"),
            ("languages of France", "fr/languages"),
            ("NAIROBI", "ke/capital"),
            ("38.101", "notes"),
            ("multi-agent", "notes"),
        ],
    )
    def test_it_finds(self, retriever: Retriever, query: str, best: str) -> None:
        hits = retriever.search(query, 3)
        assert hits[0].id == best
        passage = SMALL.get(best)
        assert passage is not None
        assert (hits[0].title, hits[0].text) == (passage.title, passage.text)
        scores = [hit.score for hit in hits if hit.score is not None]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) == len(hits) == len({hit.id for hit in hits})

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(query=st.text(max_size=80), k=st.integers(-3, 300))
    def test_no_query_raises_and_k_is_kept_to(self, retriever: Retriever, query: str, k: int) -> None:
        hits = retriever.search(query, k)
        assert len(hits) <= max(1, min(k, MOST_HITS))
        assert all(SMALL.get(hit.id) is not None for hit in hits)

    @pytest.mark.parametrize(
        "query", ["", " ", "?!", "_", 'AND "', "near(", "title: x", "* OR *", "\x00", "\ud800", "a" * 100_000, "-1 NOT"]
    )
    def test_awkward_queries_are_answered(self, retriever: Retriever, query: str) -> None:
        assert isinstance(retriever.search(query, 2), list)

    def test_more_hits_than_passages_are_those_there_are(self, retriever: Retriever) -> None:
        assert 1 <= len(retriever.search("capital languages Kenya France", 100)) <= len(SMALL)

    def test_two_hundred_searches_at_once_lose_none(self, retriever: Retriever) -> None:
        queries = [f"{word} of {country}" for word in ("capital", "languages") for country in ("Kenya", "France")] * 50
        alone = [retriever.search(query, 3) for query in queries]
        with ThreadPoolExecutor(32) as pool:
            assert list(pool.map(lambda query: retriever.search(query, 3), queries)) == alone


class TestFts:
    def test_titles_and_keywords_weigh_what_they_are_told(self, tmp_path: Path) -> None:
        corpus = Corpus(
            [Passage("t", "ruby", "x y"), Passage("b", "x", "ruby y"), Passage("w", "x", "y z", "ruby")], "c"
        )
        order = {
            weights: [hit.id for hit in FtsRetriever(corpus, weights, tmp_path).search("ruby")]
            for weights in ((9.0, 1.0, 0.1), (0.1, 9.0, 1.0), (0.1, 1.0, 9.0))
        }
        assert [found[0] for found in order.values()] == ["t", "b", "w"]

    @pytest.mark.parametrize("weights", [(1, 2), (1, 2, -3), (1, 2, float("nan"))])
    def test_wrong_weights_are_refused(self, weights: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="weights"):
            FtsRetriever(SMALL, weights)

    def test_the_index_is_built_once_for_equal_corpora(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        FtsRetriever(SMALL, folder=tmp_path)
        monkeypatch.setattr(fts, "_build", lambda *_: pytest.fail("built again"))
        assert FtsRetriever(Corpus(SMALL.passages, "again"), folder=tmp_path).search("Nairobi")
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_broken_file_names_itself(self, tmp_path: Path) -> None:
        FtsRetriever(SMALL, folder=tmp_path)
        (path,) = tmp_path.iterdir()
        path.write_bytes(b"no database at all" * 100)
        with pytest.raises(RetrieverError, match=path.name):
            FtsRetriever(SMALL, folder=tmp_path).search("Nairobi")

    def test_the_file_is_only_read(self, tmp_path: Path) -> None:
        found = FtsRetriever(SMALL, folder=tmp_path)
        (path,) = tmp_path.iterdir()
        before = (path.read_bytes(), path.stat().st_mtime_ns)
        found.search("Kenya")
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_forked_child_searches_too(self, tmp_path: Path) -> None:
        found = FtsRetriever(SMALL, folder=tmp_path)
        wanted = found.search("Nairobi")
        child = os.fork()
        if child == 0:
            os._exit(0 if found.search("Nairobi") == wanted else 1)
        assert os.waitpid(child, 0)[1] == 0


class TestHybrid:
    class Fixed:
        def __init__(self, *ids: str) -> None:
            self.hits = [Hit(identity, "", "", 1.0) for identity in ids]

        def search(self, query: str, k: int = 5) -> list[Hit]:
            return self.hits[:k]

    def test_weights_decide(self) -> None:
        first, second = self.Fixed("a", "b"), self.Fixed("b", "c")
        assert [hit.id for hit in HybridRetriever([(first, 1), (second, 1)]).search("q")] == ["b", "a", "c"]
        assert HybridRetriever([(first, 9), (second, 1)], constant=1).search("q")[0].id == "a"
        (best,) = HybridRetriever([(first, 1), (second, 3)]).search("q", 1)
        assert best.score == pytest.approx(1 / 62 + 3 / 61)

    @pytest.mark.parametrize("parts", [[], [(Fixed("a"), 0.0)], [(Fixed("a"), float("nan"))]])
    def test_nothing_to_fuse_is_refused(self, parts: Any) -> None:
        with pytest.raises(ValueError, match="hybrid"):
            HybridRetriever(parts)


class TestDense:
    def test_vectors_are_kept_as_float16_and_computed_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        DenseRetriever(SMALL, Hashed(), tmp_path)
        (path,) = tmp_path.iterdir()
        kept = numpy.load(path)
        assert (kept.dtype, kept.shape) == (numpy.dtype("float16"), (len(SMALL), 256))
        monkeypatch.setattr(dense, "_build", lambda *_: pytest.fail("built again"))
        assert DenseRetriever(SMALL, Hashed(), tmp_path).search("Nairobi", 1)[0].id == "ke/capital"

    def test_another_encoder_has_another_index(self, tmp_path: Path) -> None:
        DenseRetriever(SMALL, Hashed(), tmp_path)
        other = Hashed()
        other.name = "hashed-2"
        DenseRetriever(SMALL, other, tmp_path)
        assert len(list(tmp_path.iterdir())) == 2

    def test_a_broken_file_names_itself(self, tmp_path: Path) -> None:
        DenseRetriever(SMALL, Hashed(), tmp_path)
        (path,) = tmp_path.iterdir()
        path.write_bytes(b"x")
        with pytest.raises(RetrieverError, match=path.name):
            DenseRetriever(SMALL, Hashed(), tmp_path)


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT in Hugging Face form."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(3)
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    model = BertModel(BertConfig(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=64, **sizes))
    for parameter in model.parameters():  # far from the small ones of an untrained model, so that every term counts
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.walk
class TestBert:
    """Marked, since importing torch and transformers takes as long as all other tests here."""

    TEXTS = ("Kenya", "What is the capital of Kenya? " * 9, "", "été \U0001f600 line\nline")

    def test_it_equals_transformers(self, small_bert: Path) -> None:
        import torch
        from transformers import BertModel

        encoder = bert.BertEncoder(small_bert)
        batch = encoder._tokenizer.encode_batch(list(self.TEXTS))
        ids = torch.tensor([item.ids for item in batch])
        mask = torch.tensor([item.attention_mask for item in batch])
        with torch.no_grad():
            model = BertModel.from_pretrained(small_bert).eval()
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        ours = encoder._forward(ids.numpy(), mask.numpy().astype(numpy.float32))
        for place, kept in enumerate(mask.sum(1).tolist()):
            assert numpy.abs(ours[place, :kept] - states[place, :kept].numpy()).max(initial=0.0) < 1e-5
        wanted = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        wanted = torch.nn.functional.normalize(wanted, dim=1).numpy()
        assert numpy.abs(encoder.encode(list(self.TEXTS)) - wanted).max() < 1e-5

    def test_a_text_s_vector_does_not_depend_on_its_batch(self, small_bert: Path) -> None:
        encoder = bert.BertEncoder(small_bert)
        together = encoder.encode(list(self.TEXTS))
        for row, text in zip(together, self.TEXTS, strict=True):
            assert numpy.abs(encoder.encode([text])[0] - row).max() < 1e-5

    def test_it_makes_an_index_where_a_passage_is_nearest_to_itself(self, small_bert: Path, tmp_path: Path) -> None:
        retriever = DenseRetriever(SMALL, bert.BertEncoder(small_bert), tmp_path)
        for passage in SMALL:
            scores = {hit.id: hit.score for hit in retriever.search(f"{passage.title}\n{passage.text}", 100)}
            assert scores[passage.id] == pytest.approx(
                1.0, abs=2e-3
            )  # random weights put all texts close: float16 may swap them
            assert max(score for score in scores.values() if score is not None) < 1.002

    def test_names_follow_weights_and_lengths(self, small_bert: Path) -> None:
        assert bert.BertEncoder(small_bert).name == bert.BertEncoder(small_bert).name
        assert bert.BertEncoder(small_bert).name != bert.BertEncoder(small_bert, 16).name

    def test_the_error_function(self) -> None:
        import torch

        values = numpy.linspace(-8, 8, 4001, dtype=numpy.float32)
        assert numpy.abs(bert.gelu(values) - torch.nn.functional.gelu(torch.from_numpy(values)).numpy()).max() < 2e-6

    def test_half_floats_are_widened_and_rubbish_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        header = json.dumps(
            {
                "a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]},
                "b": {"dtype": "I64", "shape": [0], "data_offsets": [4, 4]},
            }
        )
        path.write_bytes(
            len(header).to_bytes(8, "little") + header.encode() + numpy.array([1.5, -2], numpy.float16).tobytes()
        )
        assert {name: found.tolist() for name, found in bert.read_tensors(path).items()} == {"a": [1.5, -2.0]}
        for rubbish in (b"", b"short", (1 << 40).to_bytes(8, "little") + b"{}", path.read_bytes()[:-2]):
            path.write_bytes(rubbish)
            with pytest.raises(RetrieverError, match="safetensors"):
                bert.read_tensors(path)

    def test_another_model_is_refused(self, small_bert: Path, tmp_path: Path) -> None:
        with pytest.raises(RetrieverError, match="missing"):
            bert.BertEncoder(tmp_path)
        for name in bert.FILES:
            (tmp_path / name).write_bytes((small_bert / name).read_bytes())
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        with pytest.raises(RetrieverError, match="gpt2"):
            bert.BertEncoder(tmp_path)


class TestCorpora:
    def test_a_file_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "c.jsonl"
        path.write_text(
            '{"id": "a", "title": "T", "text": "one\\u2028two"}\n\n{"id": "b", "title": "", "text": "x", "keywords": "y"}\n'
        )
        corpus = read_corpus(path)
        assert [passage.id for passage in corpus] == ["a", "b"]
        assert corpus.get("a") == Passage("a", "T", "one\u2028two")
        assert corpus.digest == Corpus(corpus.passages, "other").digest != SMALL.digest

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ("{", r":2: not JSON"),
            ("[]", r":2: .* object"),
            ('{"id": "a", "title": "", "text": "", "extra": 1}', r":2: unknown key 'extra'"),
            ('{"id": 7, "title": "", "text": ""}', r":2: 'id'"),
            ('{"id": "a", "title": ""}', r":2: 'text'"),
            ('{"id": "ok", "title": "", "text": ""}', "twice"),
            ('{"id": "a]b", "title": "", "text": ""}', "cited"),
            ('{"id": "", "title": "", "text": ""}', "cited"),
            ('{"id": "a", "title": "\\ud800", "text": ""}', "surrogate"),
        ],
    )
    def test_a_broken_line_is_named(self, tmp_path: Path, line: str, told: str) -> None:
        path = tmp_path / "c.jsonl"
        path.write_text('{"id": "ok", "title": "", "text": ""}\n' + line)
        with pytest.raises(CorpusError, match=told):
            read_corpus(path)

    def test_missing_and_empty_files_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(CorpusError, match="cannot be read"):
            read_corpus(tmp_path / "none")
        (tmp_path / "empty").write_text("\n")
        with pytest.raises(CorpusError, match="no passages"):
            read_corpus(tmp_path / "empty")

    def test_a_build_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        def build(path: Path) -> None:
            path.write_text("half")
            raise OSError("full")

        with pytest.raises(OSError, match="full"):
            cached_file("x", build, tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert cached_file("x", lambda path: path.write_bytes(b"whole") and None, tmp_path).read_text() == "whole"


class TestChoosing:
    @pytest.mark.parametrize("spec", ["", "elastic", "fts:0", "fts:x", "fts+", "fts:nan", "hybrid+fts", "ftp://x"])
    def test_unknown_names_are_refused_with_the_known_ones(self, spec: str) -> None:
        with pytest.raises(ValueError, match="hybrid"):
            choose.open_retriever(spec, "factbook", ("ke",))

    def test_equal_arguments_give_one_retriever(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert choose.open_retriever("fts", "factbook", ("ke",)) is choose.open_retriever("fts", "factbook", ("ke",))
        assert isinstance(choose.open_retriever("fts:1+bm25:2", "factbook", ("ke",)), HybridRetriever)

    @pytest.mark.parametrize("spec", ["dense", "hybrid"])
    def test_missing_weights_name_the_extra(self, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bert, "PACKAGE", "no_such_package_of_weights")
        bert.load_minilm.cache_clear()
        with pytest.raises(RetrieverError, match=r"palestra\[dense\]"):
            choose.open_retriever(spec, "factbook", ("ke",))

    def test_a_missing_package_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "bm25s", None)
        with pytest.raises(RetrieverError, match=r"palestra\[search\]"):
            Bm25Retriever(SMALL)


class TestWireForm:
    HIT = Hit("ke/capital", 'Kenya | "Capital"', "name:\nNairobi", 1.5)

    def test_scored_and_bare_hits_come_back(self) -> None:
        assert read_hit(hit_to_json(self.HIT, True)) == self.HIT
        assert read_hit(hit_to_json(self.HIT, False)) == Hit(self.HIT.id, self.HIT.title, self.HIT.text)

    def test_other_servers_documents_are_read(self) -> None:
        assert read_hit({"document": {"id": "7", "contents": '"A title"\nA text.\nMore.'}, "score": 3}) == Hit(
            "7", "A title", "A text.\nMore.", 3.0
        )
        nameless = read_hit({"contents": "only a title"})
        assert (nameless.title, nameless.text) == ("only a title", "")
        assert read_hit({"id": "a]b", "contents": "x"}).id == read_hit({"contents": "x"}).id != nameless.id


class TestWords:
    def test_queries(self) -> None:
        assert query_words("What is the capital of the Kenya?") == ["capital", "kenya"]
        assert query_words("the of") == ["the", "of"]
        assert query_words("x " * 500 + "late") == ["x", "late"]
        assert len(query_words(" ".join(f"w{n}" for n in range(500)))) == 64

    @pytest.mark.parametrize(
        ("said", "right", "exactly", "share"),
        [
            ("Nairobi", "nairobi.", 1.0, 1.0),
            ("The São Tomé", "sao tome", 1.0, 1.0),
            ("580367 sq km", "580,367 sq km", 1.0, 1.0),
            ("Nairobi, Kenya", "Nairobi", 0.0, 2 / 3),
            ("gold tea", "tea, gold", 0.0, 1.0),
            ("", "", 0.0, 0.0),
            ("the", "a", 0.0, 0.0),
            ("tea tea tea", "tea", 0.0, 0.5),
        ],
    )
    def test_answers(self, said: str, right: str, exactly: float, share: float) -> None:
        assert exact(said, right) == exactly
        assert token_f1(said, right) == pytest.approx(share)


class TestFactbook:
    def test_passages_are_cut_per_field_and_titled(self) -> None:
        corpus = load_factbook(("ke", "fr")).corpus
        capital = corpus.get("ke/government/capital")
        assert capital is not None
        assert capital.title == "Kenya | Government | Capital"
        assert "Nairobi" in capital.text
        assert max(len(passage.text) for passage in corpus) <= 1200
        assert all(passage.text and passage.title.count(" | ") == 2 for passage in corpus)
        assert {passage.id[:3] for passage in corpus} == {"ke/", "fr/"}

    def test_markup_is_taken_out(self) -> None:
        assert clean("<p>a&nbsp;<b>b</b><br>\nc &lt; d</p>") == "a b c < d"
        assert (
            passage_id("ke", "People and Society", "Major-language sample(s)", 2)
            == "ke/people-and-society/major-language-sample-s.3"
        )

    @pytest.mark.parametrize("codes", [("zz",), ()])
    def test_unknown_countries_are_refused(self, codes: tuple[str, ...]) -> None:
        with pytest.raises(CorpusError, match="countr"):
            load_factbook(codes)

    def test_other_words_are_found_but_never_shown(self) -> None:
        plain, rich = (load_factbook(("ke",), glossary).corpus for glossary in (False, True))
        assert [passage.text for passage in plain] == [passage.text for passage in rich]
        assert not any(passage.keywords for passage in plain)
        assert "Kenyan" in rich.passages[0].keywords

    def test_the_glossary_keys_are_words_of_fields(self) -> None:
        assert all(words(key) == key.split() for key in GLOSSARY)
        assert "shipped" in other_words("Exports - commodities")
        assert other_words("No such field") == ""


class TestQuestionSets:
    def test_paraphrases_avoid_the_words_of_their_fields(self) -> None:
        assert PARAPHRASES.keys() == TOPICS.keys()
        for name, wordings in PARAPHRASES.items():
            named = {word[:5] for word in words(" ".join(TOPICS[name].path[1:])) if word not in STOP}
            for wording in wordings:
                assert wording.count("{c}") == 1
                assert not named & {word[:5] for word in words(wording.format(c=""))}, (name, wording)

    def test_recall_on_templates_has_a_floor_and_other_words_gain_by_the_glossary(self, tmp_path: Path) -> None:
        countries = ("ke", "fr", "ja", "br", "eg", "it", "pe", "no")
        found: dict[bool, float] = {}
        for glossary in (False, True):
            book = load_factbook(countries, glossary)
            retriever = FtsRetriever(book.corpus, folder=tmp_path)
            asked = search_tasks(book, hops=(1,), split="all", size=60)
            assert recall(retriever, asked) >= 0.97
            found[glossary] = recall(retriever, paraphrased_tasks(book, size=80))
        assert found[True] > found[False] + 0.2


def recall(retriever: Retriever, tasks: Any, k: int = 5) -> float:
    right = [task.meta["gold"][-1] in {hit.id for hit in retriever.search(task.prompt, k)} for task in tasks]
    return sum(right) / len(right)
