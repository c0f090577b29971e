"""What a plan knows by name: models, GPUs and recipes. Pure but for package data."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.planner.examples import OURS, PUBLIC, text_of
from palestra.cli.planner.model import parameters
from palestra.cli.planner.presets import DEVICES, MODEL_SOURCES, MODELS
from palestra.cli.planner.text import Line, table


def listing() -> Iterator[Line]:
    """Three tables."""
    yield Line("models (model.preset)", "head")
    rows = [["name", "parameters", "active", "layers", "source"]]
    for name, dims in MODELS.items():
        counted = parameters(dims)
        rows.append([name, _billions(counted.total), _billions(counted.active), str(dims.layers), MODEL_SOURCES[name]])
    yield from table(rows)
    yield Line("")
    yield Line("GPUs (hardware.gpu)", "head")
    rows = [["name", "GiB", "TFLOPS", "TB/s", "source"]]
    for name, device in DEVICES.items():
        memory = f"{device.memory_bytes / 2**30:.1f}" if device.memory_bytes else "the host's"
        rows.append([name, memory, f"{device.flops / 1e12:g}", f"{device.hbm / 1e12:g}", device.source])
    yield from table(rows)
    yield Line("")
    yield Line("recipes (--recipe, --compare)", "head")
    for name in (*OURS, *PUBLIC):
        about = text_of(name).partition("\n")[0].lstrip("# ")
        yield Line(f"  {name:<12}  {about}")


def _billions(count: float) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
