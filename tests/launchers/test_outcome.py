"""Outcomes from evidence: one case per phrase in the table, and near misses."""

from __future__ import annotations

import math
import signal

import pytest

from launchers.log_causes import RULES, cause_of_log, last_words, telling_lines
from launchers.outcome import Evidence, Outcome, RankEnd, Verdict, classify, classify_nodes


def traceback(message, before=""):
    frames = '  File "program.py", line 3, in main\n    raise MemoryError  # CUDA out of memory\n    ^^^^^\n'
    return f"{before}Traceback (most recent call last):\n{frames}{message}\n"


def outcome_of(tail, code=1):
    return classify(Evidence([RankEnd(0, 1.0, code, log_tail=tail)])).outcome


EXCEPTIONS = [
    ("RuntimeError: No CUDA GPUs are available", "LOST"),
    ("RuntimeError: No HIP GPUs are available", "LOST"),
    ("torch.AcceleratorError: CUDA error: no CUDA-capable device is detected", "LOST"),
    ("RuntimeError: hipErrorNoDevice", "LOST"),
    ("AssertionError: Found no NVIDIA driver on your system.", "LOST"),
    ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version", "LOST"),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "LOST"),
    ("pynvml.NVMLError: Driver/library version mismatch", "LOST"),
    ("RuntimeError: Unexpected error from cudaGetDeviceCount(): Error 802: system not yet initialized", "LOST"),
    ("RuntimeError: Unable to determine the device handle: GPU is lost.", "LOST"),
    ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", "LOST"),
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234", "LOST"),
    ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "LOST"),
    ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", "LOST"),
    ("RuntimeError: HIP error: hipErrorECCNotCorrectable", "LOST"),
    ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", "LOST"),
    ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "LOST"),
    ("torch.distributed.DistNetworkError: failed to bind, errno: 98 EADDRINUSE", "LOST"),
    ("OSError: [Errno 98] Address already in use", "LOST"),
    ("OSError: [Errno 28] No space left on device", "LOST"),
    ("OSError: [Errno 116] Stale file handle", "LOST"),
    ("OSError: [Errno 5] Input/output error", "LOST"),
    ("OSError: [Errno 30] Read-only file system: 'x'", "LOST"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB", "OOM"),
    ("torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB", "OOM"),
    ("RuntimeError: CUDA error: out of memory", "OOM"),
    ("RuntimeError: HIP error: hipErrorOutOfMemory", "OOM"),
    ("RuntimeError: cudaErrorMemoryAllocation", "OOM"),
    ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'", "OOM"),
    ("ncclUnhandledCudaError: Call failed.\nLast error:\nFailed to CUDA calloc 4194304 bytes", "OOM"),
    ("RuntimeError: NCCL Error: HIP failure 'out of memory'", "OOM"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "OOM"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "OOM"),
    ("RuntimeError: HIPBLAS_STATUS_ALLOC_FAILED", "OOM"),
    ("RuntimeError: HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources", "OOM"),
    ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes", "OOM"),
    ("OSError: [Errno 12] Cannot allocate memory", "OOM"),
    ("MemoryError", "OOM"),
    ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 1.00 TiB for an array", "OOM"),
    ("RuntimeError: std::bad_alloc", "OOM"),
    ("RuntimeError: found NaN in local grad norm in backward pass before data-parallel communication", "NAN"),
    ("RuntimeError: Unexpected result nan (message='found NaN in local forward loss calculation')", "NAN"),
    ("ValueError: loss became nan at iteration 4", "NAN"),
    ("RuntimeError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)", "HUNG"),
    ("RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation to complete", "HUNG"),
    ("RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:1234", "LOST"),
    ("RuntimeError: NCCL error: remote process exited or there was a network error", "LOST"),
    ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.", "LOST"),
    ("RuntimeError: failed to recv, got 0 bytes", "LOST"),
    ("ConnectionRefusedError: [Errno 111] Connection refused", "LOST"),
    ("BrokenPipeError: [Errno 32] Broken pipe", "LOST"),
    ("RuntimeError: Gloo connectFullMesh failed with no error message", "LOST"),
    ("torch.distributed.DistBackendError: ncclSystemError: System call (e.g. socket, malloc) failed", "LOST"),
    ("RuntimeError: CUDA error: system has unsupported display driver / cuda driver combination", "LOST"),
    ("RuntimeError: Error 804: forward compatibility was attempted on non supported HW", "LOST"),
    ("RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.", "LOST"),
    ("RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment", "LOST"),
    ("RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", "LOST"),
    ("HW Exception by GPU node-4 (Agent handle: 0x55d0) reason :GPU Hang", "LOST"),
    ("OSError: [Errno 122] Disk quota exceeded", "LOST"),
    ("OSError: [Errno 121] Remote I/O error", "LOST"),
    ("OSError: [Errno 107] Transport endpoint is not connected: '/data/index'", "LOST"),
    ("OSError: [Errno 24] Too many open files: '/data/index'", "LOST"),
    ("RuntimeError: can't start new thread", "LOST"),
    ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. Workers are out of shared memory.", "LOST"),
    ("RuntimeError: unable to open shared memory object </torch_7> in read-write mode", "LOST"),
    ("ncclSystemError: System call failed.\nLast error:\nCall to ibv_create_cq failed with error Cannot allocate memory", "LOST"),
    ("ncclInvalidUsage\nLast error:\nBootstrap : no socket interface found", "LOST"),
    ("OSError: [Errno 113] No route to host", "LOST"),
    ("socket.gaierror: [Errno -2] Name or service not known", "LOST"),
    ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "LOST"),
    ("TimeoutError: [Errno 110] Connection timed out", "LOST"),
    ("node1:7:9 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.1<4> with status=12 opcode=0", "LOST"),
    ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "OOM"),
    ("RuntimeError: CUDA driver error: out of memory", "OOM"),
    ("RuntimeError: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY", "OOM"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "OOM"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "OOM"),
    ("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", "NAN"),
    ("FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.", "NAN"),
    ("RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.", "NAN"),
    ("RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped.", "NAN"),
    ("RuntimeError: NaN detected in the loss of step 12", "NAN"),
    ("RuntimeError: encountered a NaN", "NAN"),
    ("RuntimeError: ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress", "HUNG"),
    ("RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 10000 ms", "HUNG"),
]


@pytest.mark.parametrize(("message", "outcome"), EXCEPTIONS)
def test_exception_in_a_log(message, outcome):
    assert outcome_of(traceback(message)) == outcome
    assert outcome_of(traceback(message).replace("\n", "\n[rank0]: ")) == outcome, "as torch prefixes it"


def test_every_rule_has_a_case():
    unmatched = [pattern.pattern for pattern, _ in RULES if not any(pattern.search(message) for message, _ in EXCEPTIONS)]
    assert unmatched == []


NATIVE = [
    ("terminate called after throwing an instance of 'c10::OutOfMemoryError'\n  what():  CUDA out of memory. Tried", "OOM"),
    ("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc", "OOM"),
    ("node1:7:9 [0] init.cc:42 NCCL WARN Cuda failure 'out of memory'", "OOM"),
    ("terminate called after throwing an instance of 'std::runtime_error'\n  what():  bad shape", "CRASHED"),
]


@pytest.mark.parametrize(("tail", "outcome"), NATIVE)
def test_a_native_abort(tail, outcome):
    assert outcome_of(tail, code=-signal.SIGABRT) == outcome


NEAR_MISSES = [
    ("AssertionError: heads not divisible", "UserWarning: this may run out of memory: CUDA out of memory is likely\n"),
    ("AssertionError: heads not divisible", "retrying after torch.OutOfMemoryError: CUDA out of memory\nstep 4 went well\n"),
    ("ValueError: memory_error_rate must be positive", ""),
    ("KeyError: 'MemoryErrorPolicy'", ""),
    ("ValueError: address already_in use_tp must be set", ""),
    ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", ""),
    ("torch.AcceleratorError: CUDA error: device-side assert triggered", ""),
    ("ValueError: nan_policy must be one of: raise, omit", ""),
    ("ValueError: detected information_gain below 0", ""),
    ("ValueError: the normalization is not known", ""),
    ("OutOfResources: out of resource: shared memory, Required: 262144, Hardware limit: 232448", ""),
    ("AssertionError: recv and send sizes differ", "Connection closed by peer\n"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasGemmEx", ""),
]


@pytest.mark.parametrize(("message", "before"), NEAR_MISSES)
def test_near_misses_are_crashes(message, before):
    assert outcome_of(traceback(message, before)) is Outcome.CRASHED


def test_a_log_is_asked_only_where_a_rank_failed():
    end = RankEnd(0, 1.0, 0, log_tail="RuntimeError: CUDA out of memory")
    assert classify(Evidence([end], num_steps=3)) == Verdict(Outcome.COMPLETED, "")


def test_an_exception_that_led_to_the_last_one_counts_and_an_earlier_one_does_not():
    link = "\nDuring handling of the above exception, another exception occurred:\n\n"
    chain = traceback("torch.OutOfMemoryError: CUDA out of memory.") + link + traceback("RuntimeError: shutdown failed")
    assert outcome_of(chain) is Outcome.OOM
    earlier = traceback("torch.OutOfMemoryError: CUDA out of memory.") + "tried again\n" + traceback("KeyError: 3")
    assert outcome_of(earlier) is Outcome.CRASHED


def test_source_lines_do_not_speak():
    assert telling_lines(traceback("KeyError: 3")) == ["Traceback (most recent call last):", "KeyError: 3"]


def test_without_a_log_the_reported_error_counts():
    assert classify(Evidence([RankEnd(0, 1.0, None, "OutOfMemoryError: CUDA out of memory.")])).outcome is Outcome.OOM
    assert classify(Evidence([RankEnd(0, 1.0, None, "KeyError: 3")])).detail == "rank 0: KeyError: 3"


SIGNALS = [
    (signal.SIGKILL, 0, "LOST"),
    (signal.SIGKILL, 1, "OOM"),
    (signal.SIGTERM, 1, "LOST"),
    (signal.SIGSEGV, 1, "CRASHED"),
    (signal.SIGABRT, 0, "CRASHED"),
    (signal.SIGFPE, 0, "CRASHED"),
    (signal.SIGBUS, 0, "CRASHED"),
]


@pytest.mark.parametrize(("number", "oom_kills", "outcome"), SIGNALS)
def test_signal(number, oom_kills, outcome):
    verdict = classify(Evidence([RankEnd(2, 1.0, -number)], host_oom_kills=oom_kills))
    assert verdict.outcome == outcome
    assert verdict.rank == 2
    assert number.name in verdict.detail or "not the GPU" in verdict.detail


@pytest.mark.parametrize(("number", "oom_kills", "outcome"), [(9, 0, "LOST"), (9, 1, "OOM"), (15, 0, "LOST"), (6, 0, "CRASHED")])
def test_signal_as_a_shell_around_the_rank_reports_it(number, oom_kills, outcome):
    assert classify(Evidence([RankEnd(2, 1.0, 128 + number)], host_oom_kills=oom_kills)).outcome == outcome


@pytest.mark.parametrize(
    ("message", "meaning"),
    [
        ("ray.exceptions.OutOfMemoryError: the node running low on memory", "host memory"),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "host memory"),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "GPU memory"),
    ],
)
def test_whose_memory_ran_out(message, meaning):
    assert cause_of_log(message).meaning.startswith(meaning)


def test_first_cause_by_kind_then_by_time():
    closed = RankEnd(0, 1.0, 1, log_tail=traceback("RuntimeError: Connection closed by peer [::1]:1"))
    late = RankEnd(1, 3.0, 1, log_tail=traceback("ValueError: late"))
    early = RankEnd(2, 2.0, 1, log_tail=traceback("ValueError: early"))
    verdict = classify(Evidence([closed, late, early], num_ranks=3))
    assert (verdict.outcome, verdict.rank, verdict.secondary) == (Outcome.CRASHED, 2, False)
    assert "ValueError: early" in verdict.detail
    alone = classify(Evidence([closed], num_ranks=3))
    assert (alone.outcome, alone.secondary) == (Outcome.LOST, True)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite(loss):
    assert classify(Evidence(num_steps=2, last_loss=loss)).outcome is Outcome.NAN


@pytest.mark.parametrize("limit", [Outcome.HUNG, Outcome.TIMEOUT])
def test_limits_yield_to_a_failure(limit):
    assert classify(Evidence(limit=limit, limit_detail="why")) == Verdict(limit, "why")
    failed = RankEnd(0, 1.0, 1, log_tail=traceback("KeyError: 3"))
    assert classify(Evidence([failed], limit=limit, num_ranks=2)).outcome is Outcome.CRASHED


def test_a_lost_process_tree():
    assert classify(Evidence(lost="the warm process ended by SIGKILL")).outcome is Outcome.LOST
    verdict = classify(Evidence(lost="the warm process ended by SIGKILL", host_oom_kills=1))
    assert verdict.outcome is Outcome.OOM
    assert "host" in verdict.detail


def test_no_step_and_early_end():
    assert classify(Evidence([RankEnd(0, 1.0, 0)])).outcome is Outcome.CRASHED
    assert classify(Evidence([RankEnd(0, 1.0, 0)], expects_steps=False)).outcome is Outcome.COMPLETED
    assert classify(Evidence(num_steps=2)).outcome is Outcome.STOPPED


def test_several_nodes_give_one_verdict():
    completed, stopped = Verdict(Outcome.COMPLETED, ""), Verdict(Outcome.STOPPED, "")
    broken = Verdict(Outcome.LOST, "closed", 0, 1.0, secondary=True)
    memory = Verdict(Outcome.OOM, "memory", 5, 2.0)
    assert classify_nodes([completed, broken, memory, stopped]) is memory
    assert classify_nodes([completed, stopped]) is stopped
    assert classify_nodes([completed, completed]) is completed


def test_details_are_short_and_causes_unknown_are_none():
    assert len(last_words("x" * 9999 + "\n" + "line\n" * 99).splitlines()) == 12
    assert cause_of_log("all is well") is None
