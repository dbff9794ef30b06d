"""Checks on the run's other arguments, and on what the device can run."""

from __future__ import annotations

import operator
from functools import partial

import numpy as np

from search_spaces.columns import Columns
from search_spaces.config import TrialConfig, knobs
from search_spaces.rules.base import Finding, Rule, always, finding


def one_warmup(c: Columns) -> Finding:
    """Learning rate warm-up is a fraction or a number of steps (arguments.py validate_args)."""
    settings = c.workload.settings
    both = settings.lr_warmup_fraction is not None and settings.lr_warmup_iters != 0 and settings.train_iters is not None
    return always(both, "lr_warmup_fraction and lr_warmup_iters={iters} exclude each other", iters=settings.lr_warmup_iters)


def warmup_within_decay(c: Columns) -> Finding:
    """Warm-up ends before the learning rate's decay (optimizer_param_scheduler.py OptimizerParamScheduler)."""
    settings = c.workload.settings
    decay = settings.lr_decay_iters or settings.train_iters or 0
    warmup = settings.lr_warmup_iters if settings.lr_warmup_fraction is None else settings.lr_warmup_fraction * decay
    return always(
        decay > 0 and warmup >= decay,
        "warm-up of {warmup} steps must be less than the {decay} decay steps",
        warmup=warmup,
        decay=decay,
    )


def ramp_up(c: Columns) -> Finding:
    """Batch size ramp-up is not for runs counted in iterations (arguments.py validate_args, 0.16; 0.19 ignores it)."""
    given = c.workload.settings.rampup_batch_size is not None and c.workload.settings.train_iters is not None
    return always(given and not c.v19, "rampup_batch_size needs training counted in samples, not train_iters")


def device(c: Columns) -> Finding:
    """Knobs that need a GPU keep their default on CPU (`Knob.devices`, `Knob.why_not`)."""
    changed = {
        name: c.where(name, partial(operator.ne, TrialConfig.model_fields[name].default))
        for name, knob in knobs().items()
        if c.workload.device not in knob.devices
    }
    blocked = np.zeros(1, dtype=np.bool_)
    for mask in changed.values():
        blocked = blocked | mask
    return finding(
        blocked,
        "on {device}: {why}",
        device=c.workload.device,
        why=lambda: "; ".join(f"{name}: {knobs()[name].why_not}" for name, mask in changed.items() if mask.reshape(-1)[0]),
    )


def expert_tensor_ranks_on_cpu(c: Columns) -> Finding:
    """Expert tensor ranks gather uneven numbers of tokens, which gloo refuses."""
    return finding(
        (c.etp > 1) & c.model.is_moe & (c.workload.device == "cpu"),
        "on cpu: expert_tensor_parallel_size={etp} gathers uneven token counts, which gloo refuses; legal: 1",
        etp=c.etp,
    )


RULES: tuple[Rule, ...] = (one_warmup, warmup_within_decay, ramp_up, device, expert_tensor_ranks_on_cpu)
