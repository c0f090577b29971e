"""Keeps claimed groups ours while a step is computed: a thread that renews their lease."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

from palestra.server.types import ServerError
from palestra.trainer.types import RolloutService


class LeaseKeeper:
    """Renews leases three times per lifetime, from entering to leaving the `with` block.

    A renewal that fails is tried again at the next turn: whether the groups are still ours is decided by the commit, not here.
    """

    def __init__(self, service: RolloutService, group_ids: Sequence[str], owner: str, ttl_s: float) -> None:
        self._service, self._ids, self._owner, self._ttl = service, list(group_ids), owner, ttl_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self.failures: list[str] = []
        """Messages of renewals that did not work."""

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=self._ttl)

    def _run(self) -> None:
        while not self._over.wait(self._ttl / 3):
            try:
                held = self._service.renew(self._ids, self._owner, self._ttl)
            except (ServerError, OSError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                continue
            if held < len(self._ids):
                self.failures.append(
                    f"{len(self._ids) - held} of {len(self._ids)} groups are no longer leased to {self._owner}"
                )
