"""Sleeping until a word of shared memory changes: the futex system call, which Python does not offer.

For processes that map the same file; knows addresses and 32-bit words, and nothing of who waits for what.
"""

import ctypes
import platform

_FUTEX = 202 if platform.machine() in ("x86_64", "AMD64") else 98  # the others share one table
_WAIT, _WAKE = 0, 1  # between processes: without FUTEX_PRIVATE_FLAG
_EVERYONE = 2**31 - 1


class _Duration(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_call = ctypes.CDLL(None).syscall
_call.restype = ctypes.c_long
_call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleep while the word at `address` is `seen`, until a `wake`, or for `timeout_s`. Which of them, look."""
    duration = _Duration(int(timeout_s), int(timeout_s % 1 * 1e9))
    _call(_FUTEX, address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(duration))


def wake(address: int) -> None:
    """Wake all that sleep on the word at `address`."""
    _call(_FUTEX, address, _WAKE, _EVERYONE, None)
