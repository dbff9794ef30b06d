"""What the end of a failed rank's log means: a table of phrases, and which lines of the log may speak.

Only for ranks that have failed: a log that mentions memory in a warning, while all ranks end well, is never asked.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?", re.MULTILINE)
_WARNING = re.compile(r"\bwarnings?\b|^\[W|^\s*warn", re.IGNORECASE)
_NUM_LAST_LINES = 60
_NUM_DETAIL_LINES = 12
_LONGEST_DETAIL_LINE = 400


class Cause(NamedTuple):
    """Why a rank failed.

    Attributes:
        outcome: Name of the `Outcome`.
        meaning: One phrase for a person.
        secondary: True where it only says that another rank went away first.
    """

    outcome: str
    meaning: str
    secondary: bool = False


def _rule(pattern: str, outcome: str, meaning: str, *, secondary: bool = False) -> tuple[re.Pattern[str], Cause]:
    return re.compile(pattern, re.IGNORECASE | re.MULTILINE), Cause(outcome, meaning, secondary)


_DEVICE = "the device or its driver failed"
_NETWORK = "the network failed"
_HOST_MEMORY = "host memory ran out, not the GPU's"
_NOT_FINITE = "a value became not finite"

RULES = (
    # The device itself: before memory, since a broken device also fails allocations.
    _rule(r"no CUDA-capable device|no CUDA GPUs are available|No HIP GPUs are available|hipErrorNoDevice", "LOST", "no GPU"),
    _rule(r"Found no NVIDIA driver|driver version is insufficient|NVIDIA driver on your system is too old", "LOST", "GPU driver"),
    _rule(
        r"unsupported display driver|forward compatibility was attempted|CUDA driver initialization failed", "LOST", "GPU driver"
    ),
    _rule(r"CUDA (error: )?unknown error", "LOST", _DEVICE),
    _rule(r"Driver/library version mismatch|system not yet initialized", "LOST", "GPU driver or fabric manager is not up"),
    _rule(r"fallen off the bus|\bXid\b.*\b\d+|GPU is lost", "LOST", _DEVICE),
    _rule(r"uncorrectable (ECC|NVLink) error|hipErrorECCNotCorrectable|ECC error", "LOST", _DEVICE),
    _rule(r"over nvlink or a hardware error|HW Exception by GPU|\bGPU Hang\b", "LOST", _DEVICE),
    _rule(r"CUDA-capable device(s|\(s\) is/)\s?are busy or unavailable", "LOST", "the GPU is in use by somebody else"),
    _rule(r"EADDRINUSE|address already in use", "LOST", "the port of the rendezvous was taken"),
    _rule(r"No space left on device|Stale file handle|Input/output error|Read-only file system", "LOST", "the file system failed"),
    _rule(r"Disk quota exceeded|Remote I/O error|Transport endpoint is not connected: '", "LOST", "the file system failed"),
    _rule(
        r"Too many open files|can't start new thread|(fork|thread).*Resource temporarily unavailable",
        "LOST",
        "a limit of the system was reached",
    ),
    _rule(r"(insufficient|out of|unable to \w+) shared memory", "LOST", "shared memory (/dev/shm) ran out"),
    # The network: before memory, since its card may not get memory that others have left.
    _rule(r"\bibv_\w+ failed|no socket interface found", "LOST", _NETWORK),
    _rule(r"No route to host|Network is unreachable|Name or service not known|Temporary failure in name", "LOST", _NETWORK),
    # Memory of the host, under a name that the device's has too.
    _rule(r"ray\.exceptions\.OutOfMemoryError|node running low on memory", "OOM", _HOST_MEMORY),
    # Memory of the device.
    _rule(r"OutOfMemoryError|(CUDA|HIP) ((driver )?error: )?out of memory|hipErrorOutOfMemory", "OOM", "GPU memory ran out"),
    _rule(r"CUDA_ERROR_OUT_OF_MEMORY|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION", "OOM", "GPU memory ran out"),
    _rule(r"cudaErrorMemoryAllocation|Cuda failure.*out of memory|Failed to CUDA (c|m|host )?alloc", "OOM", "GPU memory ran out"),
    _rule(
        r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT|HIPBLAS|ROCBLAS)_STATUS_(ALLOC_FAILED|MEMORY_ERROR)", "OOM", "GPU memory ran out"
    ),
    _rule(r"hip failure.*out of memory|HSA_STATUS_ERROR_OUT_OF_RESOURCES", "OOM", "GPU memory ran out"),
    # Memory of the host.
    _rule(r"DefaultCPUAllocator|can't allocate memory|Cannot allocate memory|std::bad_alloc", "OOM", _HOST_MEMORY),
    _rule(r"^(\w+\.)*_?(Array)?MemoryError\b|cudaHostAlloc.*out of memory|ERROR_HOST_ALLOCATION", "OOM", _HOST_MEMORY),
    # Numbers.
    _rule(r"found (nan|inf) in|Unexpected result (nan|inf)|(loss|grad\w*) (is|was|became) (nan|inf)", "NAN", _NOT_FINITE),
    _rule(r"(loss|grad\w*|norm)\b.* (is|are|was|were|became) (not |non-?)finite|returned nan values", "NAN", _NOT_FINITE),
    _rule(r"\b(nan|inf)s? (was |were )?(detected|encountered)|\b(detected|encountered) (an? )?(nan|inf)s?\b", "NAN", _NOT_FINITE),
    _rule(r"loss scale already at minimum|Minimum loss scale reached", "NAN", _NOT_FINITE),
    # What the others say when one rank has gone.
    _rule(
        r"Watchdog caught collective operation timeout|watchdog got stuck|Timed out waiting \d+ms for|monitoredBarrier",
        "HUNG",
        "a collective timed out",
        secondary=True,
    ),
    _rule(
        r"Connection (closed|reset|aborted) by (remote )?peer|Connection reset|Broken ?pipe",
        "LOST",
        "another rank went away",
        secondary=True,
    ),
    _rule(r"remote process exited|ncclRemoteError|NCCL communicator was aborted", "LOST", "another rank went away", secondary=True),
    _rule(r"Got completion from peer .*with status=", "LOST", "another rank went away", secondary=True),
    _rule(r"failed to recv, got 0 bytes|recvValue failed|store has been closed", "LOST", "another rank went away", secondary=True),
    _rule(
        r"DistNetworkError|DistStoreError|Connection (refused|timed out)|Socket Timeout",
        "LOST",
        "another rank was not reached",
        secondary=True,
    ),
    _rule(r"application bug somewhere|connectFullMesh failed", "LOST", "another rank was not reached", secondary=True),
    # The network or shared memory below NCCL or RCCL.
    _rule(r"ncclSystemError|unhandled system error", "LOST", "the network or shared memory failed below NCCL"),
)
"""Tried in this order; the first that matches a telling line is the cause."""


def cause_of_log(tail: str) -> Cause | None:
    """What the end of a failed rank's log says, or None where it is nothing known."""
    text = "\n".join(telling_lines(tail))
    return next((cause for pattern, cause in RULES if pattern.search(text)), None)


def telling_lines(tail: str) -> list[str]:
    """The lines that may name a cause: the last exception with those that led to it, else the end without warnings."""
    lines = _RANK_PREFIX.sub("", tail).splitlines()
    begin = _begin_of_last_exception(lines)
    if begin is None:
        return [line for line in lines[-_NUM_LAST_LINES:] if not _WARNING.search(line)]
    return [line for line in lines[begin:] if line and not line.startswith("  ") and not _WARNING.search(line)]


def last_words(tail: str) -> str:
    """The last lines of a log, for a detail."""
    lines = [line[:_LONGEST_DETAIL_LINE] for line in tail.splitlines() if line.strip()]
    return "\n".join(lines[-_NUM_DETAIL_LINES:])


def _begin_of_last_exception(lines: list[str]) -> int | None:
    begins = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    while begins:
        begin = begins.pop()
        before = next((line for line in reversed(lines[:begin]) if line.strip()), "")
        if not (begins and before.startswith(_CHAIN)):
            return begin
    return None
