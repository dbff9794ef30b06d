"""The memory model on published peaks, as `benchmarks/accuracy.py` scores them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy_memory import accuracy, capacity_gib, report
from benchmarks.published import PublishedRow, even_layout, published_row, read_throughput
from benchmarks.published_golden import read_golden
from benchmarks.published_models import kinds
from search_spaces.layout import parse_layout

SIMUMAX = {
    "id": "smx-004",
    "source_group": "simumax-b200",
    "model": "llama3-70b truncated to 12 layers",
    "layers": "12.0",
    "hidden": "8192.0",
    "heads": "64.0",
    "kv_heads": "8.0",
    "ffn_hidden": "28672.0",
    "vocab": "128256.0",
    "seq_len": "4096.0",
    "gpu": "B200-SXM",
    "gpus_per_node": "8",
    "n_gpus": "8.0",
    "tp": "8.0",
    "pp": "1.0",
    "vpp": "1.0",
    "cp": "1.0",
    "ep": "1.0",
    "sp": "on",
    "micro_batch": "1.0",
    "global_batch": "4.0",
    "precision": "bf16",
    "recompute": "none (--recompute-num-layers 0)",
    "optimizer_sharding": "Megatron distributed optimizer",
    "notes": "CE fusion on; NO TP/P2P/DP overlap",
    "peak_mem_gib_norm": "28.29",
    "mem_definition": "max over ranks of torch max_memory_allocated",
    "status": "ok",
    "quality": "A",
    "validation_core": "1",
}

BLANK = (
    "moe_experts",
    "moe_topk",
    "moe_ffn",
    "nvlink_domain",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "peak_mem_gb",
    "workload",
)


def read(changes: dict[str, str] | None = None) -> PublishedRow:
    return published_row({**dict.fromkeys(BLANK, ""), **SIMUMAX, **(changes or {})})


def test_a_row_becomes_a_workload_and_a_configuration():
    row = read({"tokens_per_s_per_gpu": "1024"})
    assert (row.workload.world_size, row.workload.global_batch_size, row.gpu) == (8, 4, "B200-SXM")
    assert row.config.tensor_model_parallel_size == 8
    assert row.config.use_distributed_optimizer
    assert not row.config.overlap_grad_reduce
    assert row.facts.cross_entropy == "te"
    assert row.step_time_s == pytest.approx(4 * 4096 / 1024 / 8)
    assert row.assumed == ()


def test_recomputation_is_read_from_words():
    assert read({"recompute": "selective: layernorm, moe_act"}).config.recompute_modules == ("layernorm", "moe_act")
    assert read({"recompute": "full, block, 5 layers"}).config.recompute_num_layers == 5
    assert read({"recompute": ""}).assumed == ("recompute_granularity",)


def test_low_precisions_are_read_from_words():
    recipes = {"FP8-CS": "tensorwise", "MXFP8": "mxfp8", "FP8 (block)": "blockwise"}
    assert {name: read({"precision": name}).config.fp8_recipe for name in recipes} == recipes
    four_bit = read({"precision": "NVFP4"}).config
    assert (four_bit.fp4_format, four_bit.fp8_format) == ("e2m1", None)


@pytest.mark.parametrize(
    "names",
    [
        ("GPT OSS 120B", "gpt_oss_120b", "GPT-OSS-20B"),
        ("Kimi_K2", "Kimi K2", "kimi-k2"),
        ("DeepSeekV3", "DeepSeek-V3", "deepseek v3"),
        ("deepseekv2 truncated to 4 layers", "DeepSeek-V2"),
        ("Qwen3_235B_a22B", "Qwen3 30B A3B", "Qwen3-32B"),
        ("LLAMA3.1_405B", "Llama-3-8B", "Mixtral 8x7B", "Mistral-7B"),
        ("Nemotron-8B", "Nemotron-4 340B"),
        ("Qwen2.5-7B", "Qwen2_72B", "InternLM-7B"),
    ],
)
def test_one_kind_of_model_has_several_spellings(names):
    found = [kinds(name) for name in names]
    assert found[0] is not None
    assert found == found[:1] * len(names)


def test_models_of_other_kinds_are_not_taken_for_those_they_are_named_after():
    apart = (
        "LLAMA4 Scout",
        "Llama-3.3-Nemotron-49B",
        "Qwen3-Next-80B",
        "Qwen3-VL-30B",
        "Nemotron_3_Nano",
        "DeepSeekV4 Flash",
        "GPT-J 6B",
    )
    assert [kinds(name) for name in apart] == [None] * len(apart)
    assert kinds("DeepSeek-V2-Lite") != kinds("DeepSeek-V2") != kinds("DeepSeekV3 (w/o MTP)") != kinds("DeepSeekV3")
    assert kinds("gpt_oss_20b") != kinds("GPT3-20B")


def test_layers_that_do_not_divide_get_a_layout():
    layout = parse_layout(even_layout(61, 16, 1))
    assert (layout.decoders, layout.mtp, len(layout.stages), layout.problem) == (61, 1, 16, "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"notes": "pp_layout Et*7|t*5L; dispatcher hybridep", "pp": "2.0"}, ""),
        ({"notes": "pp_layout Et*7|t*6L", "pp": "2.0"}, "does not give"),
        ({"notes": "pp_layout Et*7|t*5mL", "pp": "2.0"}, "does not give"),
        ({"notes": "pp_layout Et*7|t*5L", "pp": "4.0"}, "does not give"),
        ({"notes": "pp_layout given", "pp": "2.0"}, "does not give"),
    ],
)
def test_a_stated_layout_has_the_model_s_layers(tmp_path, changes, reason):
    row = {**dict.fromkeys(BLANK, ""), **SIMUMAX, "n_gpus": "32.0", **changes}
    path = tmp_path / "throughput.csv"
    path.write_text(",".join(row) + "\n" + ",".join(f'"{value}"' for value in row.values()) + "\n")
    rows, left_out = read_throughput(path)
    assert (len(rows), reason in left_out.get("smx-004", "")) == (0 if reason else 1, True)
    assert accuracy(rows)["oom"]["ran"] == len(rows)


@pytest.mark.parametrize(
    ("board", "gib"), [("GB200", 184.0), ("V100-SXM2-32GB", 31.5), ("H100-PCIe (350 W)", 78.8), ("TPU v4", float("inf"))]
)
def test_boards_that_the_table_of_capacities_lacks_are_those_of_the_hardware_file(board, gib):
    assert capacity_gib(board) == pytest.approx(gib, rel=0.01)


def test_a_row_predicts_its_peak():
    found = accuracy([read()])
    assert found["groups"][0]["mape"] < 0.01


def test_a_row_that_ran_out_of_memory_is_called():
    found = accuracy([read({"status": "oom", "gpu": gpu}) for gpu in ("A100-SXM4-40GB", "B200-SXM")])
    assert found["oom"]["verdicts"] == {
        "oom": {"fits": 2, "at_risk": 0, "does_not_fit": 0},
        "ran": {"fits": 0, "at_risk": 0, "does_not_fit": 0},
    }
    large = accuracy([read({"status": "oom", "gpu": "A100-SXM4-40GB", "micro_batch": "32.0", "global_batch": "32.0"})])["oom"]
    assert (large["rows"], large["called_out"]) == ({"smx-004": "does_not_fit"}, 1.0)


def test_calibration_rows_are_not_scored():
    rows = [read({"id": f"row-{size}", "micro_batch": f"{size}.0", "global_batch": "64.0"}) for size in (1, 2, 4, 8)]
    found = {entry["mode"]: entry["n"] for entry in accuracy(rows)["groups"]}
    assert found == {"shipped": 4, "calibrated": 2}


def test_published_peaks(shared: Path):
    folder = shared / "data" / "published"
    rows, left_out = read_throughput(folder / "throughput.csv")
    assert len(rows) > 400
    assert all(left_out.values())
    assert len(read_golden(folder / "megatron_golden.csv")[0]) > 150
    found = report(folder)
    error = {group["source"]: group["mape"] for group in found["groups"] if group["mode"] == "shipped"}
    assert error["simumax-b200"] <= 0.03
    assert error["megatron-golden"] <= 0.08
    assert error["megatron-golden-ci"] <= 0.055
    assert error["megatron-bridge-skills"] <= 0.08
    oom = found["oom"]
    assert oom["called_out"] * len(oom["rows"]) >= len(oom["rows"]) - 1
    assert oom["wrongly_refused"] <= 0.02
    assert oom["at_risk"] <= 0.10
