"""Ask the kernel whether its clock is kept by the network."""

from __future__ import annotations

import ctypes

UNSYNCHRONISED = 0x40
"""The bit by which adjtimex says that nobody sets the clock."""


class _Timex(ctypes.Structure):
    """The beginning of the kernel's struct timex; the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def synchronised() -> bool | None:
    """Whether the clock is set by the network; None where the kernel does not tell."""
    try:
        kernel, told = ctypes.CDLL(None, use_errno=True), _Timex()
        if kernel.adjtimex(ctypes.byref(told)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return not told.status & UNSYNCHRONISED
