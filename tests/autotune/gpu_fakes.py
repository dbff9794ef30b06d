"""A GPU that says what a test wants, for what is decided from readings; the bindings themselves are tested in tests/telemetry."""

from __future__ import annotations

from autotune.telemetry import GpuInfo, PowerLimitError
from launchers.gpu_sample import GpuSample


class FakeGpu:
    """One GPU whose reading, processes and limits are attributes."""

    def __init__(self, index=0, *, package="", mig=False, limits_w=(200.0, 700.0)):
        uuid = f"GPU-{index}"
        self.info = GpuInfo(
            uuid,
            index,
            "nvidia",
            "H100",
            "",
            package or uuid,
            mig=mig,
            min_power_limit_w=limits_w[0],
            max_power_limit_w=limits_w[1],
        )
        self.gaps, self.lost = {}, ""
        self.reading = {"memory_used_gib": 0.5, "power_w": 600.0, "utilization": 1.0, "power_limit_w": 650.0}
        self.running = ()
        self.requested_w = 700.0
        self.own_limit_w = 650.0
        self.may_set = True
        self.asked = []

    def read(self, fields=frozenset()):
        return GpuSample(time_s=0.0, gpu=self.info.uuid, **self.reading)

    def processes(self):
        return self.running

    def requested_power_limit_w(self):
        return self.requested_w

    def enforced_power_limit_w(self):
        return min(self.requested_w, self.own_limit_w)

    def set_power_limit_w(self, watts):
        if not self.may_set:
            raise PowerLimitError("NVML: NO_PERMISSION", permission=True)
        self.asked.append(watts)
        self.requested_w = watts
