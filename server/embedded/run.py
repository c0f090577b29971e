"""The way in for other modules: sets the process up before torch is loaded, then serves.

In: options. Out: the base URL, to `on_ready`. Waits until a signal ends the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from palestra.server.embedded.types import EngineOptions, ModelRefused


def run(options: EngineOptions, on_ready: Callable[[str], None]) -> None:
    """Runs one engine in the main thread of this process.

    Raises:
        ModelRefused: the model folder cannot be served.
        OSError: the address cannot be bound.
        KeyboardInterrupt: SIGINT ended it, after an orderly end. (SIGTERM ends the process itself after one.)
    """
    if not (Path(options.model_path) / "config.json").is_file():
        raise ModelRefused(f"{options.model_path} is no Hugging Face model folder: there is no config.json in it")
    # OpenMP's threads spin while they wait: with a busy neighbour on the same cores that makes a step tens of times
    # slower. The variable is read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from palestra.server.embedded.process import serve

    serve(options, on_ready)
