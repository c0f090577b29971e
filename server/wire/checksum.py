"""A checksum of groups' bytes that costs a quarter of zlib's crc32: damage is what it finds, not malice.

Each 64-bit word is multiplied by an odd number of its place in a block and added up modulo 2**64, and blocks are chained by another odd
factor (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast", 2013). A single word that changed always shows,
since an odd factor has an inverse; so do words that changed places, but for a chance of about 2**-64.
"""

from __future__ import annotations

import numpy as np

_BLOCK = 8_192
"""Words: block, factors and their products together fit into a processor's second cache."""
_MASK = 2**64 - 1
_CHAIN = 0x9E3779B97F4A7C15
# Any fixed odd numbers without a pattern would do; these are the same everywhere, as the bytes on disk are.
_FACTORS = np.random.Generator(np.random.PCG64(20_261_130)).integers(0, 2**63, _BLOCK, dtype=np.uint64) * 2 + 1


def checksum(data: bytes | memoryview, start: int) -> int:
    """Of bytes whose number is a multiple of eight, beginning with `start`: 64 bits.

    Raises:
        ValueError: their number is another one.
    """
    if len(data) % 8:
        raise ValueError(f"{len(data)} bytes are no whole number of words")
    words = np.frombuffer(data, "<u8")
    total = start
    for at in range(0, len(words), _BLOCK):
        block = words[at : at + _BLOCK]
        total = (total * _CHAIN + int((block * _FACTORS[: len(block)]).sum(dtype=np.uint64))) & _MASK
    return total
