"""A model's dimensions and the way in which training lays it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelDims:
    """The shapes of a decoder model. Names follow `[model]` of a run's file."""

    layers: int
    hidden: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int = 0
    """Inner width of a dense layer."""
    tied: bool = False
    """Whether the output projection is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False
    attn_gate: bool = False
    """A gate on the attention's output, as wide as the queries."""
    max_position: int = 0
    """0: unknown."""
    experts: int = 0
    """Routed experts of a layer; 0: a dense model."""
    topk: int = 0
    """Routed experts that a token goes to."""
    moe_ffn: int = 0
    """Inner width of an expert."""
    shared_ffn: int = 0
    """Inner width of the expert that every token goes to; 0: none."""
    dense_layers: int = 0
    """Leading layers without experts, of a model that has experts."""
    shared_gate: bool = False
    expert_bias: bool = False
    """A bias of the router that no gradient moves."""
    q_lora: int = 0
    """Rank of the query projection of latent attention; 0: full."""
    kv_lora: int = 0
    """Rank of latent attention (MLA); 0: the model has none."""
    nope_dim: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    index_dim: int = 0
    """Head size of a sparse attention's indexer; 0: none."""
    linear_layers: int = 0
    """Layers of linear attention."""
    lin_k_heads: int = 0
    lin_v_heads: int = 0
    lin_k_dim: int = 0
    lin_v_dim: int = 0
    lin_conv: int = 0
    """Width of its short convolution."""
    linear_kind: Literal["gdn", "kda", "mamba2"] = "gdn"
    mtp_layers: int = 0
    """Layers that predict further tokens."""

    @property
    def mla(self) -> bool:
        """Whether attention is latent."""
        return self.kv_lora > 0

    @property
    def attn_layers(self) -> int:
        """Layers with a cache of keys and values."""
        return max(0, self.layers - self.linear_layers)

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return max(0, self.layers - self.dense_layers) if self.experts else 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How training is spread over `gpus` processes. Sizes of the meshes are floored where they do not divide: rules say so."""

    gpus: int
    tp: int = 1
    """Tensor parallel size of everything but experts."""
    pp: int = 1
    vpp: int = 1
    """Model chunks of one pipeline stage (interleaved schedule)."""
    cp: int = 1
    ep: int = 1
    etp: int = 1
    """Tensor parallel size of experts."""
    sp: bool = False
    """Sequence parallel regions beside tensor parallel ones."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    distributed_optimizer: bool = True

    @property
    def dp(self) -> int:
        """Copies of the model outside of experts."""
        return max(1, self.gpus // (self.tp * self.pp * self.cp))

    @property
    def edp(self) -> int:
        """Copies of each expert."""
        return max(1, self.gpus // (self.etp * self.ep * self.pp))


def stage_layers(layers: int, pp: int, first: int | None = None, last: int | None = None) -> tuple[int, ...] | None:
    """Layers of each pipeline stage; None: they cannot be spread like this.

    `first`, `last`: of those ends; the others share the rest equally, which is what megatron-core asks for.
    """
    if pp == 1:
        return (layers,)
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or (middle == 0 and rest) or (middle and rest % middle) or (middle and rest == 0):
        return None
    ends = ((first,) if first is not None else ()), ((last,) if last is not None else ())
    between = [rest // middle] * middle if middle else []
    return (*ends[0], *between, *ends[1])
