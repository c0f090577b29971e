"""What the engines' suite is made of: an engine under test, its answers held to the contract, and judges of what it computed."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import httpx2
import numpy as np
from numpy.typing import NDArray

from palestra.server.renderer.tokens import TokenCodec

DEADLINE_S = 60.0
LONG = 400
"""Tokens of a completion that is caught in the middle: some tenths of a second on the quickest engine."""
NEAR = 1e-3
"""Numbers so near to each other may change places between two implementations."""
Rows = NDArray[np.float64]


class Judge(Protocol):
    """An implementation of the served model that shares nothing with the engine."""

    def logits(self, folder: Path, ids: list[int]) -> Rows:
        """[len(ids), vocabulary] of one full forward through the weights in `folder`: row n is what follows the first n + 1 ids."""


class TransformersJudge:
    """transformers' own model, with its own attention."""

    def logits(self, folder: Path, ids: list[int]) -> Rows:
        import torch

        with torch.no_grad():
            rows: Rows = reference(folder)(torch.tensor([ids])).logits[0].double().numpy()
        return rows


Payload = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Named torch tensors to the part of /update_weights_from_tensor's body that holds them."""


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """A served engine, and in what its kind may differ from others."""

    url: str
    folder: Path
    other: Path
    """Other weights of the same architecture."""
    vocab_size: int
    page: int = 1
    """Prefixes are shared in multiples of so many tokens."""
    tolerance: float = 1e-4
    deadline_s: float = DEADLINE_S
    """Of one call. An engine that compiles a kernel at its first use needs longer."""
    judge: Judge = field(default_factory=TransformersJudge)
    payloads: Mapping[str, Payload] = field(default_factory=dict)
    """The ways in which weights travel by tensor, by their names."""
    single: str = "model.norm.weight"
    """A weight that the checksums list under its own name and as it is stored; no other shares it."""
    staged: bool = True
    """Whether nothing shows before the end of an update. Otherwise each bucket is in force as it comes."""
    long: int = LONG
    """Tokens of a completion that is caught in the middle."""
    sampled: tuple[str, str] = ("generation_tokens_total", "")
    """The metric that counts sampled tokens as they come, and the label that it counts them under."""
    shows_queue: bool = True
    """Whether an engine that is paused says how many requests wait."""
    frozen_flush: int = 200
    """What an update that asks for a flush is answered with while requests are frozen in place."""

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return client().post(self.url + path, json=body, timeout=self.deadline_s)

    def raw(self, path: str, body: bytes) -> httpx2.Response:
        """A post of bytes that may be no JSON."""
        headers = {"content-type": "application/json"}
        return client().post(self.url + path, content=body, headers=headers, timeout=self.deadline_s)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """A post that must be answered with 200; an answer without a JSON body is {}."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()) if answer.text.startswith("{") else {}

    def get(self, path: str) -> dict[str, Any]:
        """A get that must be answered with 200."""
        answer = client().get(self.url + path, timeout=self.deadline_s)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def generate(
        self, prompt: list[int], *, rid: str = "", more: dict[str, Any] | None = None, **params: Any
    ) -> Sampled:
        """One completion; `params` are sampling parameters, `more` further fields of the body."""
        params = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, **params}
        extra = {"rid": rid} if rid else {}
        body = self.ask(
            "/generate", input_ids=prompt, return_logprob=True, sampling_params=params, **extra, **(more or {})
        )
        return Sampled(self, prompt, body)

    def metric(self, name: str, label: str = "") -> float:
        """A value of /metrics, summed over its labels, or over those lines that have `label`."""
        text = client().get(f"{self.url}/metrics", timeout=DEADLINE_S).text
        lines = re.findall(rf"^sglang:{name}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for labels, value in lines if label in labels)

    def progress(self) -> float:
        """Tokens sampled since the start, those of running requests too."""
        return self.metric(*self.sampled)

    def wait_for_queued(self, count: int) -> None:
        """Until so many requests wait in a paused engine; at once where it does not say."""
        if self.shows_queue:
            wait_until(lambda: self.metric("num_queue_reqs") == count, f"{count} requests to queue")

    def load(self, folder: Path, version: str) -> None:
        self.ask("/update_weights_from_disk", model_path=str(folder), weight_version=version, flush_cache=True)

    def version(self) -> str:
        return str(self.get("/model_info")["weight_version"])

    def checksums(self) -> dict[str, str]:
        """Of the only rank."""
        (rank,) = self.ask("/weights_checker", action="checksum")["ranks"]
        return dict(rank["checksums"])

    def prompt(self, seed: int, length: int = 40) -> list[int]:
        """Ids that look like nothing else."""
        draw = random.Random(seed)
        return [draw.randrange(10, self.vocab_size) for _ in range(length)]


class Sampled:
    """An answer of /generate, held to the contract as it is read."""

    def __init__(self, engine: EngineUnderTest, prompt: list[int], body: dict[str, Any]) -> None:
        meta = body["meta_info"]
        self.engine, self.prompt, self.body, self.meta = engine, prompt, body, meta
        self._rows: dict[Path, Rows] = {}
        self.ids: list[int] = [entry[1] for entry in meta["output_token_logprobs"]]
        self.logprobs: list[float] = [entry[0] for entry in meta["output_token_logprobs"]]
        self.reason: str = meta["finish_reason"]["type"]
        self.spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
        assert body["output_ids"] == self.ids
        assert meta["completion_tokens"] == len(self.ids)
        if self.ids or self.reason != "abort":
            # Who aborts a request that still waits for its place, new or retracted, may not know its prompt (SGLang does not).
            assert meta["prompt_tokens"] == len(prompt)
        assert [start for _, start, _ in self.spans] == [0, *(end for _, _, end in self.spans)][: len(self.spans)]
        assert (self.spans[-1][2] if self.spans else 0) == len(self.ids)

    def rows(self, folder: Path) -> Rows:
        """[completion, vocabulary]: a row of logits for each id of the completion, from all before it."""
        if folder not in self._rows:
            self._rows[folder] = self.engine.judge.logits(folder, self.prompt + self.ids)[len(self.prompt) - 1 : -1]
        return self._rows[folder]

    def gap(self, folder: Path, temperature: float = 1.0, start: int = 0, end: int | None = None) -> float:
        """Largest distance of the logprobs start..end from a full forward through the weights in `folder`."""
        expected = chosen(self.rows(folder) / temperature, self.ids)[start:end]
        assert expected
        return max(abs(a - b) for a, b in zip(expected, self.logprobs[start:end], strict=True))


def log_softmax(rows: Rows) -> Rows:
    """Over the last axis."""
    shifted = rows - rows.max(-1, keepdims=True)
    result: Rows = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def chosen(rows: Rows, ids: Sequence[int]) -> list[float]:
    """log p of each id under its row of logits."""
    return [float(row[token]) for row, token in zip(log_softmax(rows), ids, strict=True)]


@functools.cache
def client() -> httpx2.Client:
    """One for all calls: a client takes a tenth of a second to make. Each call connects anew, as an engine may be started again."""
    return httpx2.Client(limits=httpx2.Limits(max_keepalive_connections=0), verify=False, trust_env=False)


@functools.cache
def reference(folder: Path) -> Any:
    """transformers' own model, with its own attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()


def full_logits(folder: Path, prompt: list[int], completion: list[int]) -> Any:
    """[completion, vocabulary] torch logits of transformers: a row for each id of the completion, from all before it."""
    import torch

    with torch.no_grad():
        return reference(folder)(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]


def full_forward(folder: Path, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
    """log p of each id of the completion."""
    return chosen(full_logits(folder, prompt, completion).double().numpy() / temperature, completion)


@functools.cache
def text_codec(folder: Path) -> TokenCodec:
    """The folder's tokenizer."""
    return TokenCodec(folder)


@dataclass(frozen=True, slots=True)
class Penalty:
    """Penalties of one request, as the formula has them."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def bend(self, logits: Rows, sampled: list[int]) -> Rows:
        """A copy of [vocabulary] logits, with the penalties that the completion so far has earned."""
        bent = logits.copy()
        for token in set(sampled):
            bent[token] -= self.frequency_penalty * sampled.count(token) + self.presence_penalty
            bent[token] *= self.repetition_penalty if bent[token] < 0 else 1 / self.repetition_penalty
        return bent

    def check_greedy(self, rows: Rows, ids: list[int], start: int = 0) -> int:
        """Every id of a greedy completion must be the best of its bent logits. Returns how many are not the best of the plain ones."""
        for at in range(start, len(rows)):
            bent = self.bend(rows[at], ids[:at])
            assert bent[ids[at]] >= bent.max() - NEAR, f"token {at}"
        return sum(ids[at] != rows[at].argmax() for at in range(start, len(rows)))


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Polls; fails with `what` at the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s:.0f} s for: {what}"
        time.sleep(0.005)


def stored(folder: Path) -> dict[str, Any]:
    """The weights of a model folder, as torch tensors."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


class Sender:
    """Rank 0 of a weight group with one engine: a trainer, as plain torch makes it."""

    def __init__(self, engine: EngineUnderTest, pool: Executor, name: str, timeout_s: float = 30.0) -> None:
        import torch.distributed as dist

        self.engine, self.pool, self.name = engine, pool, name
        wait = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=wait)
        place = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
        joined = pool.submit(engine.ask, "/init_weights_update_group", group_name=name, backend="gloo", **place)
        inner = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self.group: Any = dist.ProcessGroupGloo(inner, 0, 2, wait)
        joined.result(timeout_s)

    def announce(self, tensors: Mapping[str, Any], *, flattened: bool, **more: Any) -> Future[httpx2.Response]:
        """Tells the engine what will be broadcast."""
        body = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": self.name,
            **more,
        }
        if flattened:
            body["load_format"] = "flattened_bucket"
        return self.pool.submit(self.engine.post, "/update_weights_from_distributed", **body)

    def send(self, tensors: Mapping[str, Any], *, flattened: bool, **more: Any) -> httpx2.Response:
        """Announces and broadcasts; the engine's answer."""
        import torch
        import torch.distributed as dist

        told = self.announce(tensors, flattened=flattened, **more)
        parts = [tensor.contiguous() for tensor in tensors.values()]
        if flattened:
            parts = [torch.cat([part.flatten().view(torch.uint8) for part in parts])]
        for part in parts:
            self.group.broadcast([part], dist.BroadcastOptions()).wait()
        return told.result(DEADLINE_S)

    def abort(self) -> None:
        """Leaves at once, as a trainer that died would: gloo's sockets close when the group goes, not at its abort."""
        self.group = None
