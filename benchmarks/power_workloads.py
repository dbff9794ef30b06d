"""What the workloads of the published power sweeps compute: their share of matrix products, from the step-time model.

Shapes are those of the models' papers (GPT-3 table 2.1, T5, BERT, BLOOM), of bert-huge those of Perseus' Merak (BERT-large with
2,048 in place of 1,024); micro-batch and tensor parallel size come from the row.
"""

from __future__ import annotations

import re
from typing import Any

from search_spaces.calibration import columns_of
from search_spaces.coefficients import shipped
from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec, links_of
from search_spaces.model import ModelSpec, Workload
from search_spaces.power import matrix_share
from search_spaces.step_time import estimate

OTHER_SHARE = 0.8
_GPT = {"vocab_size": 50257, "swiglu": False, "position_embedding_type": "learned_absolute", "seq_length": 2048}
_BLOOM = _GPT | {"vocab_size": 250880}
_BERT = _GPT | {"vocab_size": 30522, "seq_length": 384}
_T5 = _GPT | {"vocab_size": 32128, "kv_channels": 128, "seq_length": 512}
_SHAPES: dict[str, dict[str, Any]] = {
    "gpt3-small": _GPT | {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "gpt3-medium": _GPT | {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    "gpt3-large": _GPT | {"num_layers": 24, "hidden_size": 1536, "num_attention_heads": 16},
    "gpt3-xl": _GPT | {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16},
    "gpt3-2.7b": _GPT | {"num_layers": 32, "hidden_size": 2560, "num_attention_heads": 32},
    "gpt3-6.7b": _GPT | {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    "gpt3-13b": _GPT | {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40},
    "gpt3-175b": _GPT | {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96},
    "bloom-3b": _BLOOM | {"num_layers": 30, "hidden_size": 2560, "num_attention_heads": 32},
    "bloom-7b": _BLOOM | {"num_layers": 30, "hidden_size": 4096, "num_attention_heads": 32},
    "bloom-176b": _BLOOM | {"num_layers": 70, "hidden_size": 14336, "num_attention_heads": 112},
    "bert-base": _BERT | {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "bert-large": _BERT | {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    "bert-huge": _BERT | {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16},
    "t5-large": _T5 | {"num_layers": 48, "hidden_size": 1024, "num_attention_heads": 16, "kv_channels": 64},
    "t5-3b": _T5 | {"num_layers": 48, "hidden_size": 1024, "ffn_hidden_size": 16384, "num_attention_heads": 32},
    "t5-11b": _T5 | {"num_layers": 48, "hidden_size": 1024, "ffn_hidden_size": 65536, "num_attention_heads": 128},
}


def share_of(workload: str, config: str, gpu: GpuSpec) -> float:
    """Share of the busy seconds that are matrix products and attention.

    Args:
        workload: As the row names it.
        config: The row's configuration, with `mbs4` or `batch 48` and `tp2`.
        gpu: The device.
    """
    name = next((name for name in _SHAPES if workload.lower().startswith(name)), None)
    if name is None:
        return OTHER_SHARE
    shape = dict(_SHAPES[name])
    seq_length = shape.pop("seq_length")
    ranks = _number(r"\btp(\d+)", config)
    samples = _number(r"\b(?:mbs|batch )(\d+)", config)
    step = Workload(model=ModelSpec(**shape), world_size=ranks, global_batch_size=samples, seq_length=seq_length)
    knobs = TrialConfig(
        tensor_model_parallel_size=ranks,
        micro_batch_size=samples,
        precision="bf16" if "bf16" in gpu.peak_tflops else "fp16",
    )
    times = estimate(columns_of(step, [knobs]), gpu, links_of(gpu, max(ranks, 2)), shipped(gpu.name))
    return float(matrix_share(times)[0])


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 1
