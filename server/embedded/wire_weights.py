"""The wire of weight updates: the bodies of SGLang 0.5.23's paths, checked.

In: JSON bodies. Out: checked values. Waits for nothing. Fields that name SGLang's own machinery (`torch_empty_cache`, `selector`) are read
where they cannot change what is asked for here; others are refused by name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from palestra.server.embedded.wire import Wire

GROUP = "weight_update_group"
"""A group that the body does not name."""


class _Update(Wire):
    """What all ways of updating share. `flush_cache` may be anything: the cache of old weights is never used again."""

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: Literal[False] = False
    torch_empty_cache: bool = False
    selector: Literal["all", "target"] = "all"


class DiskBody(_Update):
    """POST /update_weights_from_disk."""

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    is_async: Literal[False] = False
    keep_pause: Literal[False] = False
    recapture_cuda_graph: bool = False
    token_step: int = 0


class TensorBody(_Update):
    """POST /update_weights_from_tensor. `safetensors`: base64 of a safetensors blob each. `shared_memory`: base64 each of the JSON
    {"shm": segment's name, "nbytes", "tensors": [{"name", "dtype", "shape", "offset"}]}, read on this host before the answer."""

    serialized_named_tensors: list[str]
    load_format: Literal["safetensors", "shared_memory"]


class GroupBody(Wire):
    """POST /init_weights_update_group. This engine's rank is `rank_offset`: it is one process."""

    master_address: str = Field(min_length=1)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int
    world_size: int = Field(ge=2)
    group_name: str = Field(default=GROUP, min_length=1)
    backend: str = "nccl"


class LeaveBody(Wire):
    """POST /destroy_weights_update_group."""

    group_name: str = GROUP


class BroadcastBody(_Update):
    """POST /update_weights_from_distributed: what rank 0 broadcasts next, one by one or (`flattened_bucket`) as one run of bytes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = GROUP
    load_format: Literal["flattened_bucket"] | None = None


class VersionBody(Wire):
    """POST /begin_weight_update, POST /end_weight_update. The version may also have come with the last bucket, as SGLang wants it."""

    weight_version: str | None = None
    flush_cache: bool = True
    selector: Literal["all", "target"] = "all"


class CheckBody(Wire):
    """POST or GET /weights_checker."""

    action: Literal["checksum"] = "checksum"
    skip_tensor_list: list[str] | None = None
    """Parts of names to leave out."""
    allow_quant_error: bool = False
    selector: Literal["all", "target"] = "all"
