"""Which renderer a model folder gets.

In: a folder with a tokenizer, its configuration, and perhaps a chat template. Out: a `Renderer`, and why it is that one. Families that
are written out come first; a checkpoint of none of them is driven by its own template. Nothing here waits but for the disk.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from palestra.server.renderer.jinja import ChatTemplate, read_json
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.renderer.types import Renderer
from palestra.server.types import RenderError

GENERIC = "generic"


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family's class is, and what its constructor takes besides the codec."""

    module: str
    """Of `palestra.server.renderer.families`."""
    cls: str
    given: Mapping[str, Any] = field(default_factory=dict)

    def make(self, codec: TokenCodec) -> Renderer:
        """The renderer. The module is imported here, so that a service loads one family and not all.

        Raises:
            RenderError: the tokenizer lacks a special token of the family.
        """
        module = importlib.import_module(f"palestra.server.renderer.families.{self.module}")
        return cast(Renderer, getattr(module, self.cls)(codec, **self.given))


FAMILIES: Mapping[str, Family] = {
    "chatml": Family("chatml", "ChatMLRenderer"),
    "qwen2.5": Family("qwen", "Qwen25Renderer"),
    "qwen3": Family("qwen", "Qwen3Renderer"),
    "qwen3-instruct": Family("qwen", "Qwen3InstructRenderer"),
    "qwen3-thinking": Family("qwen", "Qwen3ThinkingRenderer"),
    "qwen3.5": Family("qwen", "Qwen35Renderer"),
    "minimax": Family("minimax", "MiniMaxRenderer"),
    "glm": Family("glm", "GlmRenderer"),
    "kimi": Family("kimi", "KimiRenderer"),
    "llama3": Family("llama", "LlamaRenderer"),
    "deepseek-v3": Family("deepseek", "DeepSeekRenderer", {"variant": "v3"}),
    "deepseek-v3.1": Family("deepseek", "DeepSeekRenderer", {"variant": "v31"}),
    "deepseek-r1": Family("deepseek", "DeepSeekRenderer", {"variant": "r1"}),
    "harmony": Family("harmony", "HarmonyRenderer"),
    "mistral": Family("mistral", "MistralRenderer"),
    **{f"mistral-{v}": Family("mistral", "MistralRenderer", {"version": v}) for v in ("v3", "v7", "v11", "v13")},
}
"""Every family that is written out. `generic`, which needs a chat template, is known besides."""

_MARKS: tuple[tuple[str, frozenset[str]], ...] = (
    ("deepseek", frozenset({"<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"})),  # noqa: RUF001
    ("llama3", frozenset({"<|start_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"})),
    ("harmony", frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>"})),
    ("mistral", frozenset({"[INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]"})),
    ("kimi", frozenset({"<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>"})),
    ("glm", frozenset({"[gMASK]", "<|observation|>", "<arg_key>"})),
    ("minimax", frozenset({"]~b]", "<minimax:tool_call>"})),
    ("qwen", frozenset({"<|im_start|>", "<tool_call>"})),
    ("chatml", frozenset({"<|im_start|>", "<|im_end|>"})),
)
"""Special tokens that only one family has, the more telling first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The family of a folder."""

    family: str
    """A key of FAMILIES, or `generic`."""
    why: str
    """What speaks for it, for the reader."""


def load_renderer(folder: Path, family: str | None = None) -> Renderer:
    """The renderer of a model folder: the named family, or the one that its configuration and special tokens speak for.

    Raises:
        RenderError: no family fits, the named one is not known or does not fit the tokenizer, or there is no tokenizer.
    """
    codec = TokenCodec(folder)
    return make_renderer(folder, codec, family or choose_family(folder, codec).family)


def make_renderer(folder: Path, codec: TokenCodec, family: str) -> Renderer:
    """The renderer of a family on a folder's tokenizer.

    Raises:
        RenderError: the family is not known, or does not fit the folder.
    """
    if family == GENERIC:
        from palestra.server.renderer.families.generic import GenericRenderer

        return GenericRenderer.of(folder, codec)
    if family not in FAMILIES:
        raise RenderError(f"no chat family {family!r}; known: {known_families()}")
    try:
        return FAMILIES[family].make(codec)
    except RenderError as error:
        raise RenderError(f"{folder}: the chat family {family} does not fit: {error}") from error


def choose_family(folder: Path, codec: TokenCodec) -> Choice:
    """The family of a model folder.

    Raises:
        RenderError: none fits, and there is no chat template.
    """
    template = ChatTemplate.of(folder)
    source = template.source if template is not None else ""
    kind = _model_kind(folder)
    mark = next((name for name, marks in _MARKS if marks <= codec.special.keys()), None)
    if mark == "deepseek":
        return _deepseek(template, source, kind)
    if mark == "qwen":
        return _qwen(codec, source, kind)
    if mark == "chatml" and re.search(r"\btools\b", source):
        return Choice(GENERIC, "ChatML's special tokens, and a chat template that lists tools in a way of its own")
    if mark is not None:
        return Choice(mark, "its special tokens")
    if source:
        return Choice(
            GENERIC, "no family that is written out has these special tokens, and the folder has a chat template"
        )
    raise RenderError(
        f"{folder}: no chat family fits this tokenizer and there is no chat template; known: {known_families()}"
    )


def known_families() -> str:
    """The names of all families, for a message."""
    return ", ".join([*FAMILIES, GENERIC])


def _model_kind(folder: Path) -> str:
    """`model_type` of config.json, else its first architecture, in small letters; "" where neither is there."""
    config = read_json(folder / "config.json")
    return str(config.get("model_type") or next(iter(config.get("architectures") or ()), "")).lower()


def _deepseek(template: ChatTemplate | None, source: str, kind: str) -> Choice:
    """V3, V3.1 and R1 share their tokenizer: the template tells them apart, and a distilled model is R1's."""
    if re.search(r"\bthinking\b", source):
        return Choice("deepseek-v3.1", "DeepSeek's special tokens, and a chat template with a choice of thinking")
    if template is not None and template.text([{"role": "user", "content": "x"}]).rstrip().endswith("<think>"):
        return Choice("deepseek-r1", "DeepSeek's special tokens, and a chat template that opens a think block")
    if kind and not kind.startswith("deepseek"):
        return Choice("deepseek-r1", f"DeepSeek's special tokens on a model of type {kind}: a distilled R1")
    return Choice("deepseek-v3", "DeepSeek's special tokens")


def _qwen(codec: TokenCodec, source: str, kind: str) -> Choice:
    """Qwen's generations share most special tokens: model type and template tell them apart."""
    thinks = {"<think>", "<tool_response>"} <= codec.special.keys()
    if not source:
        return Choice("qwen3" if thinks else "qwen2.5", "Qwen's special tokens, without a chat template")
    if not kind.startswith("qwen"):
        return Choice(
            GENERIC, f"Qwen's special tokens on a model of type {kind or 'unknown'}, which has its own chat template"
        )
    if "<function=" in source:
        if "<think>" in source:
            return Choice("qwen3.5", "a Qwen template with calls in XML and think blocks")
        return Choice(GENERIC, "a Qwen template with calls in XML and no think blocks")
    if "<think>" not in source:
        return Choice("qwen3-instruct" if thinks else "qwen2.5", "a Qwen template without think blocks")
    if "enable_thinking" in source:
        return Choice("qwen3", "a Qwen template with a choice of thinking")
    return Choice("qwen3-thinking", "a Qwen template that always thinks")
