"""The model: transformers' modules with our attention over slots, and hooks on the routers of its experts.

In: pieces of work. Out: logits of the rows that are drawn from. Waits for the computation, nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from palestra.server.embedded.attention import IMPLEMENTATION, SlotPlan, Span, slot_attention
from palestra.server.embedded.scheduler import Piece
from palestra.server.embedded.types import ModelRefused
from palestra.server.embedded.workspace import CacheShape, Workspace


class SlotModel:
    """A causal language model whose keys and values live in a `Workspace`."""

    def __init__(self, model: Any) -> None:
        self.module = model.eval()
        config = model.config
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.groups: int = config.num_attention_heads // config.num_key_value_heads
        self.layers: int = config.num_hidden_layers
        self._routers = find_routers(model)
        self._routed: dict[int, torch.Tensor] = {}
        for layer, router in self._routers.items():
            router.register_forward_hook(lambda _m, _i, out, layer=layer: self._routed.__setitem__(layer, out[-1]))
        top_k = config.num_experts_per_tok if self._routers else 0
        self.shape = CacheShape(self.layers, config.num_key_value_heads, head_width(config), model.dtype, top_k)

    def read(self, pieces: Sequence[Piece], space: Workspace, used: int) -> torch.Tensor:
        """Sends the pieces through the model, filling their slots. Returns [rows, vocabulary] logits: piece by piece those after the
        places that it scores, then the one after its end if it is the last of its job."""
        space.reserve(max(piece.start + piece.count for piece in pieces), used)
        plan = make_plan(pieces, space, used, self.groups)
        ids = [token for p in pieces for token in p.job.tokens[p.start : p.start + p.count]]
        kept, at = [], 0
        for piece in pieces:
            kept += [at + place - piece.start for place in piece.scores]
            at += piece.count
            if piece.last:
                kept.append(at - 1)
        out = self.module(
            input_ids=torch.tensor([ids]),
            position_ids=plan.positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor(kept, dtype=torch.long),
            plan=plan,
        )
        if space.experts is not None:
            space.experts[plan.slots, plan.positions] = self._experts(len(ids))
        logits: torch.Tensor = out.logits[0]
        return logits

    def _experts(self, tokens: int) -> torch.Tensor:
        """[tokens, layers, top-k] of the step that just ran."""
        taken = torch.full((tokens, self.layers, self.shape.top_k), -1, dtype=torch.int16)
        for layer, indices in self._routed.items():
            taken[:, layer] = indices.to(torch.int16)
        self._routed.clear()
        return taken


def make_plan(pieces: Sequence[Piece], space: Workspace, used: int, groups: int) -> SlotPlan:
    """Lays the pieces out: single tokens first, as the scheduler orders them."""
    kv = space.kv
    counts = torch.tensor([p.count for p in pieces])
    slots = torch.tensor([p.slot for p in pieces]).repeat_interleave(counts)
    positions = torch.cat([torch.arange(p.start, p.start + p.count) for p in pieces])
    singles = [p for p in pieces if p.count == 1]
    reach = max((p.start + 1 for p in singles), default=1)
    ends = torch.zeros(used, dtype=torch.long)
    if singles:
        ends[slots[: len(singles)]] = positions[: len(singles)]
    mask = torch.zeros(used, 1, 1, reach, dtype=kv.dtype)
    mask.masked_fill_((torch.arange(reach) > ends[:, None])[:, None, None], float("-inf"))
    spans, at = [], len(singles)
    for piece in pieces[len(singles) :]:
        total = piece.start + piece.count
        rows = torch.zeros(piece.count, total, dtype=kv.dtype)
        rows.masked_fill_(torch.arange(total) > torch.arange(piece.start, total)[:, None], float("-inf"))
        spans.append(Span(piece.slot, at, at + piece.count, total, rows.repeat(groups, 1)[None, None]))
        at += piece.count
    return SlotPlan(kv, slots, positions, len(singles), used, reach, mask, tuple(spans))


def head_width(config: Any) -> int:
    """Width of a cached key or value, whichever is wider. With latent attention `head_dim` is that of the rotary part alone."""
    if getattr(config, "kv_lora_rank", None):
        return max(int(config.qk_nope_head_dim + config.qk_rope_head_dim), int(config.v_head_dim))
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def find_routers(model: Any) -> dict[int, Any]:
    """Layer -> the module that picks its experts, as transformers itself records router logits. Its last output are the picked ids."""
    recorded = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    if recorded is None:
        return {}
    kind = recorded.target_class
    routers = {}
    for layer, block in enumerate(model.base_model.layers):
        for module in block.modules():
            if isinstance(module, kind):
                routers[layer] = module
    return routers


def load_model(folder: str, dtype: str) -> SlotModel:
    """Loads a Hugging Face folder.

    Raises:
        ModelRefused: there is no such folder, or its architecture cannot be served.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as fault:
        raise ModelRefused(f"{folder}: config.json cannot be read: {fault}") from fault
    sliding = any("full" not in kind for kind in getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)  # some families have a window without a word about it per layer
    if sliding or getattr(config, "use_sliding_window", False) or (window and window < config.max_position_embeddings):
        raise ModelRefused(f"{folder}: layers without full attention are not built")
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, slot_attention)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=IMPLEMENTATION
        )
    except (OSError, ValueError, RuntimeError) as fault:
        raise ModelRefused(f"{folder}: the weights cannot be loaded: {fault}") from fault
    return SlotModel(model)


def end_ids(folder: str) -> frozenset[int]:
    """The ids at which the model's own configuration ends a generation."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
