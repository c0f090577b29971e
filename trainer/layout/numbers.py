"""Small arithmetic that rules of a layout share: divisors, neighbours, splits of a pipeline, versions. Pure."""

from __future__ import annotations

import re
from functools import lru_cache
from math import lcm

from palestra.trainer.layout.types import Layout, stage_layers

WINDOW, PAIRS = 1024, 24
"""How many sizes of an end are tried on either side of the mean: where one end is given, and where both are."""


def divisors(number: int) -> tuple[int, ...]:
    """Of a positive number, rising."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


def nearest(numbers: tuple[int, ...], to: int) -> tuple[int, ...]:
    """The same numbers, the closest first; of two that are as close the larger one."""
    return tuple(sorted(numbers, key=lambda each: (abs(each - to), -each)))


def around(number: int, step: int) -> tuple[int, ...]:
    """Multiples of `step` next to a number that is none: above, and below where that is positive."""
    below = number // step * step
    return (below + step, below) if below else (below + step,)


def mesh_step(layout: Layout) -> int:
    """GPU counts that both meshes divide are multiples of this."""
    return lcm(layout.tp * layout.pp * layout.cp, layout.etp * layout.ep * layout.pp)


def row_multiple(layout: Layout) -> int:
    """Tokens of a packed row are padded to a multiple of this: halves for each context rank, equal parts for sequence parallel ones."""
    return lcm(2 * layout.cp if layout.cp > 1 else 1, layout.tp if layout.sp else 1)


@lru_cache(maxsize=256)
def spreads(layers: int, pp: int, vpp: int = 1) -> tuple[tuple[int | None, int | None], ...]:
    """(first, last) of pipelines that can be: layers of its ends, None where an end is like the middle. At least one wherever there is any.

    Those whose largest stage is smallest come first, since it sets the pace; of these the ones that give fewer ends, then the evenest, and
    the last end rather than the first. Ends that are far from the mean are not looked at.
    """
    if pp < 2 or pp * vpp > layers or layers % vpp:
        return ()
    one, both = _sizes(layers, pp, vpp, WINDOW), _sizes(layers, pp, vpp, PAIRS)
    pairs: list[tuple[int | None, int | None]] = [(None, None)]
    pairs += [(None, size) for size in one] + [(size, None) for size in one]
    pairs += [(first, last) for first in both for last in both]
    found = []
    for first, last in pairs:
        spread = stage_layers(layers, pp, first, last)
        if spread is not None and not any(each % vpp for each in spread):
            given = (first is not None) + (last is not None)
            found.append(((max(spread), given, max(spread) - min(spread), first is not None), (first, last)))
    return tuple(pair for _, pair in sorted(found, key=lambda each: each[0]))


def _sizes(layers: int, pp: int, vpp: int, most: int) -> range:
    """Sizes of an end, multiples of `vpp`, about as far from the mean as there are stages."""
    far = min(pp, most) * vpp
    low = max(vpp, (layers // pp - far) // vpp * vpp)
    return range(low, min(layers, layers // pp + far) + 1, vpp)


def version(text: str) -> tuple[int, ...]:
    """The numbers of a version, without zeros at its end: `core_v0.16.1` is (0, 16, 1); none where there are no numbers."""
    found = re.search(r"\d+(?:\.\d+)*", text)
    parts = [int(part) for part in found.group().split(".")] if found else []
    while parts and not parts[-1]:
        del parts[-1]
    return tuple(parts)


def older(text: str, than: str) -> bool:
    """Whether a version comes before another one. One that cannot be read counts as old: what was mended later cannot be relied on."""
    return version(text) < version(than)
