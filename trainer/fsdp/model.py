"""A causal language model of transformers that answers log p of chosen tokens, and how it is sharded.

In: a Hugging Face folder; rows of token ids and which of their places predict which token. Out: log p [K]. Logits exist only for those K
places. Nothing is waited for but the other ranks, where there are any: each layer's weights are gathered as it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from palestra.trainer.megatron.families import read_config
from palestra.trainer.types import ModelError

SEES_ALL = frozenset({"deepseek_v3", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Model types whose layers all look at everything before them, at positions that they are told: any mask and order can be given to them."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What goes through the model at once: R sequences of L places."""

    token_ids: torch.Tensor
    """[R, L]."""
    mask: torch.Tensor | None
    """[R, L] which places hold a token, or [1, 1, L, L] added to attention's scores (0 or -inf); None: plainly causal."""
    positions: torch.Tensor | None
    """[R, L]; None: counted from 0."""
    predictors: torch.Tensor
    """[K] places, counted through all sequences, that predict."""
    targets: torch.Tensor
    """[K] the tokens that they predict."""
    temperature: torch.Tensor
    """[K]."""


class ScoringModel(torch.nn.Module):
    """The whole of what is sharded: decoder and output layer, called together so that one forward pass gathers the weights of both."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs, chunk: int) -> torch.Tensor:
        """log p [K] of the targets.

        `chunk`: predictions whose logits exist at a time, the rest being computed again in the backward pass; 0: all at once.
        """
        states = hidden_states(self.model, inputs.token_ids, inputs.mask, inputs.positions)
        states = states.flatten(0, 1)[inputs.predictors]
        count = len(inputs.targets)
        if not chunk or count <= chunk:
            return self._logprob(states, inputs.targets, inputs.temperature)
        parts = [slice(start, start + chunk) for start in range(0, count, chunk)]
        scored = (
            checkpoint(self._logprob, states[at], inputs.targets[at], inputs.temperature[at], use_reentrant=False)
            for at in parts
        )
        return torch.cat(list(scored))

    def _logprob(self, states: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        logits = self.model.get_output_embeddings()(states).float() / temperature[:, None]
        return -F.cross_entropy(logits, targets, reduction="none")


def hidden_states(
    model: Any, token_ids: torch.Tensor, mask: torch.Tensor | None = None, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """[R, L, H] what the output layer is given."""
    told = {} if positions is None else {"position_ids": positions}
    out: torch.Tensor = model.base_model(input_ids=token_ids, attention_mask=mask, use_cache=False, **told)[0]
    return out


def load_model(folder: Path) -> Any:
    """The model of a Hugging Face folder in float32, with PyTorch's own attention.

    Dropout and the like stay off, as they are in the engine whose tokens are trained on.

    Raises:
        ModelError: transformers does not know it, the folder is incomplete, or it is no causal language model with a plain output layer.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if read_config(folder).get("quantization_config") is not None:
        raise ModelError(f"{folder} is quantised: only weights in a floating type can be trained")
    disable_progress_bar()
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, StrictDataclassError) as error:
        raise ModelError(f"{folder} cannot be trained with transformers: {error}") from error
    if missing := sorted(told["missing_keys"]):
        raise ModelError(f"{folder} lacks weights that its config.json asks for: {', '.join(missing[:5])}")
    model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # a text may hold that token too, and then its gradient counts
    _prove(model, folder)
    return model


def _prove(model: Any, folder: Path) -> None:
    """Looks whether log p may be computed as it is here: later tokens change nothing, and the output layer alone makes the logits."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        raise ModelError(f"{folder}: {type(model).__name__} has no output layer apart from its decoder")
    ids = torch.arange(8)[None] % model.config.get_text_config().vocab_size
    other = ids.clone()
    other[0, -1] = 0
    with torch.no_grad():
        logits, changed = model(ids, use_cache=False).logits, model(other, use_cache=False).logits
        ours = head(hidden_states(model, ids))
    if not torch.allclose(logits[:, :-1], changed[:, :-1], rtol=1e-4, atol=1e-5):
        raise ModelError(f"{folder}: {type(model).__name__} lets tokens see those after them: it is no causal model")
    if not torch.allclose(logits, ours, rtol=1e-4, atol=1e-5):
        raise ModelError(
            f"{folder}: {type(model).__name__} scales or caps the logits of its output layer, which is not supported"
        )


def sees_all(config: Any) -> bool:
    """Whether rows may share their beginnings: every layer looks at all that a mask lets it see, and nowhere else."""
    kinds = getattr(config, "layer_types", None) or ()
    whole = all(kind == "full_attention" for kind in kinds) and getattr(config, "sliding_window", None) is None
    return whole and config.model_type in SEES_ALL


def shard(model: Any, mesh: DeviceMesh) -> ScoringModel:
    """Shards each layer, and what is outside of layers together.

    Weights are given back after the forward pass, the outer ones too: what is gathered again is always what the shards are by then.
    Gradients of ranks are added: the weights of the loss sum to one over all of them.
    """
    layers = set(model._no_split_modules or ())
    for module in [module for module in model.modules() if type(module).__name__ in layers]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    scoring = ScoringModel(model)
    fully_shard(scoring, mesh=mesh, reshard_after_forward=True)
    for module in scoring.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale what it adds up
    return scoring
