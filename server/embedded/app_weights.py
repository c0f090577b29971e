"""The HTTP surface of weight updates: SGLang's native paths over `Updates`.

In: requests. Out: JSON {"success", "message", "weight_version"}, the version being the one in force. Waits as `Updates` does.
"""

from __future__ import annotations

from fastapi.requests import Request
from fastapi.responses import Response

from palestra.server.embedded import wire_weights as wire
from palestra.server.embedded.answers import Handler, answer, read
from palestra.server.embedded.engine import Engine
from palestra.server.embedded.groups import GroupPlace, in_a_row
from palestra.server.embedded.updates import Updates


class WeightPaths:
    """The handlers."""

    def __init__(self, engine: Engine, updates: Updates, model_path: str) -> None:
        self._engine, self._updates = engine, updates
        self.model_path = model_path
        """Where the weights in force were last read from."""

    def posts(self) -> dict[str, Handler]:
        """Path -> handler."""
        return {
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
            "/update_weights_from_disk": self.from_disk,
            "/update_weights_from_tensor": self.from_tensor,
            "/update_weights_from_distributed": self.from_group,
            "/init_weights_update_group": self.join,
            "/destroy_weights_update_group": self.leave,
            "/weights_checker": self.check,
        }

    async def begin(self, request: Request) -> Response:
        """POST /begin_weight_update."""
        await read(request, wire.VersionBody)
        await self._updates.begin()
        return self._done("update begun")

    async def end(self, request: Request) -> Response:
        """POST /end_weight_update."""
        body = await read(request, wire.VersionBody)
        await self._updates.end(body.weight_version)
        return self._done()

    async def from_disk(self, request: Request) -> Response:
        """POST /update_weights_from_disk."""
        body = await read(request, wire.DiskBody)
        if await self._updates.from_folder(body.model_path, body.weight_version):
            self.model_path = body.model_path
        return self._done()

    async def from_tensor(self, request: Request) -> Response:
        """POST /update_weights_from_tensor."""
        body = await read(request, wire.TensorBody)
        take = self._updates.from_segments if body.load_format == "shared_memory" else self._updates.from_blobs
        await take(body.serialized_named_tensors, body.weight_version)
        return self._done()

    async def from_group(self, request: Request) -> Response:
        """POST /update_weights_from_distributed."""
        body = await read(request, wire.BroadcastBody)
        slots = in_a_row(body.names, body.dtypes, body.shapes)
        flattened = body.load_format is not None
        await self._updates.from_group(body.group_name, slots, body.weight_version, flattened=flattened)
        return self._done()

    async def join(self, request: Request) -> Response:
        """POST /init_weights_update_group."""
        body = await read(request, wire.GroupBody)
        place = GroupPlace(body.master_address, body.master_port, body.rank_offset, body.world_size, body.backend)
        await self._updates.join(body.group_name, place)
        return self._done(f"joined {body.group_name}")

    async def leave(self, request: Request) -> Response:
        """POST /destroy_weights_update_group."""
        body = await read(request, wire.LeaveBody)
        self._updates.leave(body.group_name)
        return self._done(f"left {body.group_name}")

    async def check(self, request: Request) -> Response:
        """POST and GET /weights_checker."""
        body = await read(request, wire.CheckBody)
        found = await self._updates.checksums(body.skip_tensor_list or [])
        return answer({"success": True, "message": "ok", "weight_version": self._engine.core.version, **found})

    def _done(self, message: str = "ok") -> Response:
        return answer({"success": True, "message": message, "weight_version": self._engine.core.version})
