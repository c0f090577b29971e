"""The `[sandbox]` section: where code of models runs, and what it may use there.

In: the section. Out: a backend that was started and holds what is required, and a pool of its boxes. Waits for the backend to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from palestra.envs.config import Section
from palestra.envs.findings import Finding, RefusedError, Severity
from palestra.sandbox.choose import choose, make
from palestra.sandbox.pool import Pool
from palestra.sandbox.types import MIB, Backend, BoxSpec, Limits, Mount, SandboxUnavailableError

Promise = Literal["files", "network", "processes", "memory", "pids", "disk", "syscalls", "cpu"]
"""A field of `sandbox.types.Enforced`."""
_USUAL = Limits()
USUAL_BOXES = 8


def refusals(backend: str, boxes: int, i_understand: bool) -> Iterator[Finding]:
    """What no run may ask of its boxes: none at all (P902), or, without a word on it, code of models with all rights of the user (P905)."""
    if boxes < 1:
        message = f"sandbox.boxes is {boxes}: an episode that runs code would wait for a box in vain"
        fix = "give as many as a group has rollouts"
        yield Finding("P902", Severity.ERROR, "sandbox.boxes", message, fix)
    if backend == "unsafe_subprocess" and not i_understand:
        message = 'sandbox.backend = "unsafe_subprocess" runs code of models with all rights of this user'
        fix = "if this machine is itself the sandbox, say so: sandbox.i_understand = true"
        yield Finding("P905", Severity.ERROR, "sandbox.backend", message, fix, {"sandbox.backend": "auto"})


class SandboxConfig(Section):
    """`[sandbox]`: boxes for code that a model wrote."""

    table: ClassVar[str] = "sandbox"
    not_built: ClassVar[frozenset[str]] = frozenset({"create_s", "busy_s", "destroy_s", "egress_list"})
    backend: Literal["auto", "bubblewrap", "docker", "landlock", "remote", "unsafe_subprocess"] = "auto"
    """`auto`: the first of bubblewrap, docker and landlock that works here and holds what `require` names. `remote`: boxes of `hosts`.
    `unsafe_subprocess`: no sandbox at all."""
    boxes: int = USUAL_BOXES
    """Most boxes at a time: used, kept ready, being made or destroyed."""
    warm: int | None = Field(None, ge=0)
    """Boxes that are kept ready; None: a few."""
    memory_bytes: int = Field(_USUAL.memory_bytes, ge=32 * MIB)
    """Memory of a box, all its processes and files in /tmp and /workspace together, bytes."""
    total_memory_bytes: int | None = Field(None, ge=32 * MIB)
    """Memory of all boxes together, bytes; None: a share of what this machine has."""
    pids: int = Field(_USUAL.pids, ge=4)
    """Processes and threads of a box."""
    disk_bytes: int = Field(_USUAL.disk_bytes, ge=1)
    """Size of /workspace, and of /tmp, each."""
    output_bytes: int = Field(_USUAL.output_bytes, ge=1)
    """Bytes kept of each stream of a run."""
    total_output_bytes: int = Field(_USUAL.total_output_bytes, ge=1)
    """Bytes that a run may write before it is killed."""
    cpus: float = Field(_USUAL.cpus, gt=0)
    """CPU time per time of a box."""
    image: str | None = None
    """Image of the docker backend; None: its default one."""
    mounts: dict[str, str] = Field(default_factory=dict)
    """What boxes may read of the host, such as a data set: path in the box = path on the host."""
    preload: tuple[str, ...] = ()
    """Modules that code in a box finds imported already, such as numpy."""
    packages: str | None = None
    """A site-packages folder of the host that Python in a box imports from."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables in a box."""
    hosts: tuple[str, ...] = ()
    """Of backend remote: URLs of `palestra sandbox serve`."""
    token_file: str | None = None
    """Of backend remote: a file with the hosts' token."""
    require: tuple[Promise, ...] = ("files", "network", "processes")
    """Promises that the kernel must hold: a backend where it does not hold one of them is not used."""
    i_understand: bool = False
    """Of backend unsafe_subprocess: that code of models gets all rights of this user."""
    base_url: str | None = None
    """Of backend docker: where its daemon listens, such as unix:///run/docker.sock; None: as DOCKER_HOST says."""
    network: Annotated[str, Field(validate_default=True)] = "none"
    """What boxes reach: nothing."""
    per_episode: bool = True
    """A box is used by one episode."""
    fresh_grader: bool = True
    """Code is judged in another box than it ran in."""

    @field_validator("network")
    @classmethod
    def _network(cls, value: str) -> str:
        if value != "none":
            raise ValueError(f"not built: sandbox.network = {value!r}; only none")
        return value

    @field_validator("per_episode", "fresh_grader")
    @classmethod
    def _always(cls, value: bool, info: Any) -> bool:
        if not value:
            raise ValueError(f"not built: sandbox.{info.field_name} = false; only true")
        return value

    @model_validator(mode="after")
    def _fits(self) -> SandboxConfig:
        belongs = {"hosts": "remote", "token_file": "remote", "i_understand": "unsafe_subprocess"}
        for name, backend in belongs.items():
            if getattr(self, name) and self.backend != backend:
                raise ValueError(f'sandbox.{name} needs sandbox.backend = "{backend}"')
        for name in ("image", "base_url"):
            if getattr(self, name) is not None and self.backend not in ("docker", "auto", "remote"):
                raise ValueError(f'sandbox.{name} needs sandbox.backend = "docker"')
        if self.backend == "remote" and not self.hosts:
            raise ValueError('sandbox.backend = "remote" needs sandbox.hosts')
        for found in refusals(self.backend, self.boxes, self.i_understand):
            raise RefusedError(found)
        spec_of(self)
        return self


def spec_of(section: SandboxConfig) -> BoxSpec:
    """What a box is like.

    Raises:
        ValueError: values that do not go together.
    """
    limits = Limits(
        memory_bytes=section.memory_bytes,
        pids=section.pids,
        disk_bytes=section.disk_bytes,
        output_bytes=section.output_bytes,
        total_output_bytes=section.total_output_bytes,
        cpus=section.cpus,
    )
    return BoxSpec(
        limits=limits,
        image=section.image,
        mounts=tuple(Mount(source, target) for target, source in section.mounts.items()),
        preload=section.preload,
        packages=section.packages,
        env=tuple(section.env.items()),
    )


def options_of(section: SandboxConfig) -> dict[str, dict[str, Any]]:
    """What backends of each name are made with.

    Raises:
        SandboxUnavailableError: the token cannot be read.
    """
    options: dict[str, dict[str, Any]] = {
        "docker": {} if section.base_url is None else {"base_url": section.base_url},
        "unsafe_subprocess": {"i_understand": section.i_understand},
    }
    if section.backend == "remote":
        token = None if section.token_file is None else read_token(section.token_file, "sandbox.token_file")
        options["remote"] = {"urls": section.hosts, "token": token}
    return options


def read_token(path: str, field: str) -> str:
    """The token in a file; `field` is the configuration's name of it, for messages.

    Raises:
        SandboxUnavailableError: there is none.
    """
    try:
        token = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SandboxUnavailableError(f"{field}: {path} cannot be read: {error}") from None
    if not token or not token.isascii() or not token.isprintable():
        raise SandboxUnavailableError(f"{field}: {path} holds no token; write one into it, in one line of plain text")
    return token


async def make_backend(section: SandboxConfig) -> Backend:
    """The backend, started; its user closes it.

    Raises:
        SandboxUnavailableError: it cannot work here, or does not hold what is required.
    """
    options = options_of(section)
    if section.backend == "auto":
        return await choose(require=section.require, options=options)
    backend = make(section.backend, **options.get(section.backend, {}))
    try:
        await backend.start()
        if section.backend != "unsafe_subprocess":  # by explicit wish it promises nothing
            _hold(backend, section)
    except BaseException:
        await backend.close()
        raise
    return backend


def _hold(backend: Backend, section: SandboxConfig) -> None:
    enforced = backend.enforced()
    if lacking := [name for name in section.require if name in enforced.weaker()]:
        notes = "".join(f"\n  {note}" for note in enforced.notes)
        raise SandboxUnavailableError(
            f"{backend.name}: the kernel does not hold {', '.join(lacking)} here, which sandbox.require names{notes}"
        )


def make_pool(section: SandboxConfig, backend: Backend) -> Pool:
    """A pool of the section's boxes on a started backend; its user starts and closes it."""
    return Pool(
        backend,
        spec_of(section),
        boxes=section.boxes,
        warm=section.warm,
        memory_bytes=section.total_memory_bytes,
    )
