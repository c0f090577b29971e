"""The state of torch's random generators, so that a resumed run draws what the interrupted one would have drawn.

The models themselves draw nothing; options of `[megatron]` such as `moe_input_jitter_eps` do. In and out: a file. torch is loaded when it
is called for, not before.
"""

from __future__ import annotations

from pathlib import Path

from palestra.trainer.types import CheckpointError

CPU, CUDA = "cpu", "cuda_"


def write_generators(path: Path) -> None:
    """Writes the state of the CPU's generator and of every GPU's.

    Raises:
        OSError: the disk refused.
    """
    import torch
    from safetensors.torch import save_file

    states = {CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"{CUDA}{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    save_file(states, path)


def read_generators(path: Path) -> None:
    """Sets the generators to what `write_generators` wrote; GPUs that are not there any more are left out.

    Raises:
        CheckpointError: the file is damaged.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        states = load_file(path)
        torch.set_rng_state(states[CPU])
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            if (state := states.get(f"{CUDA}{i}")) is not None:
                torch.cuda.set_rng_state(state, i)
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
