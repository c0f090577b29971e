"""Which backend: by name, or the best that works on this machine.

In: names, what must hold, options. Out: a backend. Choosing waits for a real box of each that is tried. Nothing is weakened in silence:
what the chosen one does not hold by the kernel is logged, and `unsafe_subprocess` is never chosen.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.sandbox.types import PROMISES, Backend, Enforced, SandboxError, SandboxUnavailableError

logger = logging.getLogger(__name__)

BACKENDS = {
    "bubblewrap": "palestra.sandbox.bubblewrap:Bubblewrap",
    "docker": "palestra.sandbox.container:Docker",
    "landlock": "palestra.sandbox.landlock:Landlock",
    "remote": "palestra.sandbox.remote:Remote",
    "unsafe_subprocess": "palestra.sandbox.unsafe:UnsafeSubprocess",
}
"""Where each one is; loaded when it is asked for."""
REQUIRED = ("files", "network", "processes")
PREFERRED = ("bubblewrap", "docker", "landlock")


def make(name: str, **options: Any) -> Backend:
    """A backend, not started yet. Options are its constructor's.

    Raises:
        ValueError: no such backend, or no such option of it.
        SandboxUnavailableError: a package that it needs is not installed, or it refuses to be made.
    """
    if name not in BACKENDS:
        raise ValueError(f"no sandbox backend {name!r}; known: {', '.join(BACKENDS)}")
    module, _, kind = BACKENDS[name].partition(":")
    try:
        found = getattr(importlib.import_module(module), kind)
    except ImportError as error:
        raise SandboxUnavailableError(f"{name}: {error}; install it: pip install 'palestra[sandbox]'") from error
    known = inspect.signature(found).parameters
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"{name} has no option {', '.join(unknown)}; known: {', '.join(known) or 'none'}")
    backend: Backend = found(**options)
    return backend


async def choose(
    *,
    require: Sequence[str] = REQUIRED,
    prefer: Sequence[str] = PREFERRED,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Backend:
    """The first of `prefer` that works here and holds all of `require` by the kernel; started.

    Args:
        require: promises, of `types.PROMISES`.
        prefer: names of backends, the best first.
        options: for each backend's constructor, by its name.

    Raises:
        SandboxUnavailableError: there is none; the text has each one's own reason.
        ValueError: an unknown promise or backend, or one that must be asked for by name.
    """
    if unknown := sorted(set(require) - set(PROMISES)):
        raise ValueError(f"no promise {', '.join(unknown)}; known: {', '.join(PROMISES)}")
    if "unsafe_subprocess" in prefer:
        raise ValueError("unsafe_subprocess is never chosen: ask for it by name, and say i_understand")
    reasons: list[str] = []
    for name in prefer:
        backend, reason = await _tried(name, (options or {}).get(name, {}), require)
        if backend is not None:
            _tell(name, backend.enforced(), reasons)
            return backend
        reasons.append(f"{name}: {reason.removeprefix(f'{name}: ')}")
    raise SandboxUnavailableError(
        f"no sandbox works here that holds {', '.join(require) or 'anything'}:\n  " + "\n  ".join(reasons)
    )


async def _tried(name: str, options: Mapping[str, Any], require: Sequence[str]) -> tuple[Backend | None, str]:
    """The backend, or why not this one."""
    try:
        backend = make(name, **options)
    except SandboxUnavailableError as error:
        return None, str(error)
    keep = False
    try:
        await backend.start()
        held = backend.enforced()
        lacking = [promise for promise in require if promise in held.weaker()]
        keep = not lacking
    except (SandboxError, OSError) as error:
        return None, str(error)
    finally:
        if not keep:
            await backend.close()
    if keep:
        return backend, ""
    levels = ", ".join(f"{promise} ({getattr(held, promise)})" for promise in lacking)
    return None, " ".join([f"it works, but the kernel does not hold {levels}.", *held.notes])


def _tell(name: str, held: Enforced, refused: Sequence[str]) -> None:
    if refused:
        logger.info("the sandbox is %s, since %s", name, "; ".join(refused))
    if weaker := held.weaker():
        levels = ", ".join(f"{promise}: {level}" for promise, level in weaker.items())
        logger.warning("the sandbox %s does not hold everything (%s). %s", name, levels, " ".join(held.notes))
