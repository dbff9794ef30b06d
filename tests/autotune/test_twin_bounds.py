"""No twin is faster than its devices: bounded where a hidden factor would take it there, in the same order, else untouched."""

import pytest

from autotune.machines import machines_of
from launchers import twins
from launchers.twins import BEST_SHARE, bounded, demand, fastest_step_s
from search_spaces.config import TrialConfig
from search_spaces.model_flops import model_flops_per_token
from tests.autotune.study_cases import study_spec

LLAMA_70B = {
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "vocab_size": 128256,
}


def case(gpu):
    pool = {"name": "p", "gpu": gpu, "nodes": 8, "gpus_per_node": 8}
    spec = study_spec(model=LLAMA_70B, pools=[pool], global_batch_size=512, seq_length=8192)
    return spec.workload(spec.pools[0]), machines_of(spec.pools[0])


@pytest.mark.parametrize("gpu", ["h200", "mi300x", "a100-80gb"])
@pytest.mark.parametrize("kind", ["physics", "table"])
def test_no_twin_reaches_more_of_the_peak_than_any_published_run(gpu, kind):
    workload, machines = case(gpu)
    configs = [TrialConfig(tensor_model_parallel_size=4, micro_batch_size=size) for size in (1, 2, 8)]
    operations = model_flops_per_token(workload.model, 8192) * workload.tokens_per_step / 64
    reached = [
        operations / demand(kind, workload, config, machines, seed).step_s / machines.gpu.peak("bf16")
        for seed in range(25)
        for config in configs
    ]
    assert max(reached) <= BEST_SHARE
    assert sum(share > 0.9 * BEST_SHARE for share in reached) < len(reached) / 2


def test_the_bound_keeps_the_order_and_what_is_slower_as_it_is():
    steps = [0.1, 5.0, 9.9, 10.0, 10.5, 10.99, 11.0, 12.0, 500.0]
    shown = [bounded(step_s, 10.0) for step_s in steps]
    assert shown == sorted(set(shown))
    assert shown[0] >= 10.0
    assert shown[-3:] == steps[-3:]
    assert bounded(0.1, 0.0) == 0.1


def test_narrower_products_may_be_faster_and_a_cpu_has_no_bound():
    workload, machines = case("h200")
    wide, narrow = (fastest_step_s(workload, config, machines) for config in (TrialConfig(), TrialConfig(fp8_format="hybrid")))
    assert wide == pytest.approx(2.0 * narrow, rel=0.01)
    workload, machines = case("b200")
    wide, narrow = (fastest_step_s(workload, config, machines) for config in (TrialConfig(), TrialConfig(fp4_format="e2m1")))
    assert wide == pytest.approx(4.0 * narrow, rel=0.01)
    assert fastest_step_s(workload.model_copy(update={"device": "cpu"}), TrialConfig(), machines) == 0.0
    assert twins.demand("table", workload, TrialConfig(), machines, 0).step_s == pytest.approx(3.0 * wide)
