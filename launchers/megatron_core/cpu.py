"""Lets Megatron-Core train on CPU over gloo. Used by that backend only, in the rank's own process.

Megatron names CUDA in many places, and all of them are settled here: what `torch.cuda` answers, tensors asked for on "cuda",
comparisons with CUDA type names, streams and events, the random number state, and collectives that gloo lacks or does slowly.
Nothing here changes what is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from launchers.megatron_core.loop import Device

_CPU = torch.device("cpu")
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # mallopt's names: malloc.h
_FACTORIES = ("arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")


class _NoStream:
    """A stream or an event where all work is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        """Nothing runs that could be waited for."""

    def wait_event(self, _: Any) -> None:
        """Nothing runs that could be waited for."""

    def synchronize(self) -> None:
        """Nothing runs that could be waited for."""

    def record(self, *_: Any) -> None:
        """Nothing runs that could be recorded."""

    def record_event(self, *_: Any) -> _NoStream:
        """An event that has already happened."""
        return _NoStream()


def install(master_addr: str) -> Device:
    """Adapts torch and Megatron in this process for good; call it once, before process groups are made."""
    if master_addr in ("127.0.0.1", "localhost", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    torch.set_num_threads(1)  # ranks share the cores
    _keep_freed_memory()
    torch.compiler.set_stance("force_eager")  # compiling Megatron's fused functions takes longer than a trial
    _answer_for_cuda()
    _place_tensors()
    _adapt_megatron()
    return Device(_CPU, _nothing, _resident_set_peak_bytes)


def _keep_freed_memory() -> None:
    """The C library keeps what tensors free, as CUDA's caching allocator does.

    By default it gives large blocks back to the kernel and asks for them again in every step: thousands of page faults, whose cost
    differs from step to step by several percent. Other C libraries than glibc have no `mallopt` and stay as they are.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for option, size in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20)):
            mallopt(option, size)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _resident_set_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB


def _answer_for_cuda() -> None:
    """What `torch.cuda` answers: the CPU is the current device, streams do nothing, one random state serves both."""
    no_stream = _NoStream()
    answers: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "is_initialized": lambda: False,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "manual_seed": torch.manual_seed,
        "get_rng_state": _rng_state,
        "set_rng_state": _set_rng_state,
        "Stream": _NoStream,
        "Event": _NoStream,
        "current_stream": lambda *_, **__: no_stream,
        "default_stream": lambda *_, **__: no_stream,
        "stream": lambda *_: contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    megatron_random._get_cuda_rng_state = _rng_state
    megatron_random._set_cuda_rng_state = _set_rng_state


def _rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _place_tensors() -> None:
    """Tensors asked for on "cuda" are made on the CPU; `type()` answers CUDA's names, which Megatron's optimisers compare with."""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    type_of = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    torch.Tensor.type = cuda_type  # type: ignore[method-assign, assignment]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


def _adapt_megatron() -> None:
    parallel_state.create_group = _shared_groups()
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    moe_utils.te_general_gemm = None
    mappings._gather_along_first_dim = _uneven_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _uneven_reduce_scatter(mappings._reduce_scatter_along_first_dim)
    # A machine may have Transformer Engine or Apex and still run a CPU pool; their kernels take CUDA tensors only.
    clip_grads.multi_tensor_applier = utils.local_multi_tensor_applier
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_impl = utils.local_multi_tensor_scale


def _shared_groups() -> Callable[..., Any]:
    """Megatron's `create_group`, but one gloo group per set of ranks and made by its members alone.

    Megatron makes some 50 groups on 4 ranks, most of them for the same few sets of ranks, and each costs a round of all ranks.
    Sharing is safe, since every rank issues its collectives in one thread and in the same order.
    """
    groups: dict[tuple[int, ...], Any] = {}

    def create_group(ranks: Sequence[int], *_: Any, **__: Any) -> Any:
        key = tuple(ranks)
        if key not in groups and dist.get_rank() in key:
            everyone = len(key) == dist.get_world_size()
            groups[key] = dist.group.WORLD if everyone else dist.new_group(list(key), use_local_synchronization=True)
        return groups.get(key)

    return create_group


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron converts to numpy only what it moves off a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _uneven_gather(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gathers parts of different lengths (tokens per expert): gloo takes equal ones only, so pad and cut."""

    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = even(padded, group).view(len(sizes), max(sizes), *input_.shape[1:])
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather


def _uneven_reduce_scatter(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Sums over ranks and keeps this rank's part, for parts of different lengths."""

    def reduce_scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even(input_, group, None, use_global_buffer)
        summed = input_.clone()
        dist.all_reduce(summed, group=group)
        sizes = [int(size) for size in input_split_sizes]
        mine: torch.Tensor = torch.split(summed, sizes)[group.rank()]
        return mine.contiguous()

    return reduce_scatter
