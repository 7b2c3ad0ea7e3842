"""The least value of each permutation, on a GPU: one Triton program for a document and a group of permutations.

Written as one kernel because torch alone would send about a kilobyte through memory for each byte of text; here the
shingles are read once for every sixteen permutations, and nothing but the signature is written.
"""

from __future__ import annotations

from typing import Any

GROUP = 16
"""Permutations of one program."""
STRETCH = 128
"""Shingles looked at together."""


def least_values(hashes: Any, edges: Any, factors: Any, shifts: Any) -> Any:
    """hashes: [count], edges: [documents + 1], factors and shifts: [width], all int64 on the GPU.

    Returns [documents, width] int64 with values below 2^32.
    """
    import torch

    documents, width = len(edges) - 1, len(factors)
    assert width % GROUP == 0
    found = torch.empty((documents, width), dtype=torch.int64, device=hashes.device)
    if documents:
        kernel = _kernel()
        kernel[(documents, width // GROUP)](_narrow(hashes), edges, _narrow(factors), _narrow(shifts), found,
                                            WIDTH=width, GROUP=GROUP, STRETCH=STRETCH)  # fmt: skip
    return found


def _narrow(values: Any) -> Any:
    """Numbers below 2^32 in 32 bits; the sign is only how they are written."""
    import torch

    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)


def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(hashes, edges, factors, shifts, found, WIDTH: tl.constexpr, GROUP: tl.constexpr, STRETCH: tl.constexpr):  # type: ignore[no-untyped-def]
        document, group = tl.program_id(0), tl.program_id(1)
        places = group * GROUP + tl.arange(0, GROUP)
        factor = tl.load(factors + places).to(tl.uint32, bitcast=True)
        shift = tl.load(shifts + places).to(tl.uint32, bitcast=True)
        start, stop = tl.load(edges + document), tl.load(edges + document + 1)
        least = tl.full([GROUP], 0xFFFFFFFF, dtype=tl.int64)
        for first in range(start, stop, STRETCH):
            at = first + tl.arange(0, STRETCH)
            inside = at < stop
            value = tl.load(hashes + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
            mixed = (value[:, None] * factor[None, :] + shift[None, :]).to(tl.int64)
            mixed = tl.where(inside[:, None], mixed, 0xFFFFFFFF)
            least = tl.minimum(least, tl.min(mixed, axis=0))
        tl.store(found + document * WIDTH + places, least)

    return kernel
