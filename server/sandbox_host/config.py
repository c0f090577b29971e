"""The configuration of a sandbox host: the boxes that it has, and how it lends them. Checked whole before anything starts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from palestra.envs.config import Section
from palestra.envs.sandboxes import SandboxConfig


class HostSection(Section):
    """`[host]`: the listener, and how long it waits for whom."""

    table: ClassVar[str] = "host"
    listen: str = Field("127.0.0.1:8070", pattern=r"^.+:\d{1,5}$")
    """HOST:PORT; port 0 takes a free one. A host other than loopback needs a token."""
    token_file: str | None = None
    """A file with what clients must bear as their token."""
    queue: int = Field(64, ge=0)
    """Most requests that wait for a box; further ones are refused with 429."""
    lease_s: float = Field(60.0, ge=1.0, allow_inf_nan=False)
    """A box whose client is not heard of for so long is destroyed, seconds."""
    share: tuple[str, ...] = ()
    """Folders of this machine that clients may mount into their boxes or take packages from, beside those of [sandbox]. Never writable."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


class HostConfig(Section):
    """The whole file of a sandbox host."""

    sandbox: SandboxConfig = SandboxConfig()
    host: HostSection = HostSection()
    version: Literal[1] = 1
    """Of this file's form."""

    @model_validator(mode="after")
    def _fits(self) -> HostConfig:
        if self.sandbox.backend == "remote":
            raise ValueError("a host lends boxes of its own machine: sandbox.backend cannot be remote there")
        if self.host.address[1] > 65535:
            raise ValueError(f"host.listen: {self.host.address[1]} is no port")
        return self
