"""Ask Megatron-Core 0.16 itself whether a case is legal: no GPU, any world size.

What is asked: `TransformerConfig`, `initialize_model_parallel` under torch's fake process group, the micro-batch calculator,
the DDP and optimiser configs, layer allocation, the model build on the meta device for the first and last stage, the interleaved
schedule's own checks, and the checks of the first step that need no kernel. The wheel has no `megatron.training`: with the path of
a Megatron-LM checkout of the same version its `validate_args` is asked first, without it the launcher's part is done here.

    python benchmarks/megatron_016_oracle.py [--megatron-lm PATH] < cases.jsonl > verdicts.jsonl

Cases have the keys of `search_spaces.case.read_case`. A verdict is valid, invalid or unknown, with stage, message and place.
"""

# ruff: noqa: PLC0415  Megatron is imported where it is asked: each case lives in a child, and a checkout's path may come first.

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
import traceback
import types
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.megatron_016_stages import Stages  # noqa: E402  the repository is no package

NEW_TE = "2.14.0"


def ask(case: dict[str, Any], megatron_lm: str | None = None) -> dict[str, Any]:
    """Megatron's verdict on a case, asked in a forked child so that nothing of it is left behind."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            answer = _Oracle(case, megatron_lm).run()
        except BaseException as error:  # noqa: BLE001  the child must always answer
            answer = {"verdict": "unknown", "stage": "oracle", "message": repr(error)}
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe, default=str)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"verdict": "unknown", "stage": "oracle", "message": "child died"}


def warm(megatron_lm: str | None = None) -> None:
    """Import Megatron once, so that every child has it."""
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.transformer.moe.moe_layer  # noqa: F401

    if megatron_lm:
        kernels = types.ModuleType("kernels that need triton")
        kernels.enable_batch_invariant_mode = lambda: None  # type: ignore[attr-defined]
        sys.modules["megatron.core.transformer.custom_layers.batch_invariant_kernels"] = kernels
        sys.path.append(megatron_lm)  # last, so that the wheel's megatron.core stays the one
        package = types.ModuleType("megatron.training")  # its own __init__ imports tokenizers, which the arguments do not need
        package.__path__ = [os.path.join(megatron_lm, "megatron", "training")]
        package.get_args = package.get_timers = package.get_adlr_autoresume = None  # type: ignore[attr-defined]
        sys.modules["megatron.training"] = package
        import megatron.training.arguments  # noqa: F401


class _Oracle(Stages):
    """The stages of a launch, as far as a CPU can go."""

    def __init__(self, case: dict[str, Any], megatron_lm: str | None) -> None:
        self.case = {key: value for key, value in case.items() if value is not None}
        self.megatron_lm = megatron_lm
        self.stage = "start"

    def run(self) -> dict[str, Any]:
        """The verdict, with the stage that refused."""
        complaints = io.StringIO()
        try:
            with contextlib.redirect_stderr(complaints):
                self._launch()
        except SystemExit as error:
            message = (complaints.getvalue().strip().splitlines() or [str(error)])[-1]
            verdict = "unknown" if "unrecognized arguments" in complaints.getvalue() else "invalid"
            return {"verdict": verdict, "stage": self.stage, "message": message}
        except Exception as error:  # noqa: BLE001  whatever Megatron raises is its verdict
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/megatron/" in frame.filename]
            where = f"{frames[-1].filename.split('/megatron/')[-1]}:{frames[-1].lineno} ({frames[-1].name})" if frames else "here"
            verdict = "unknown" if "not installed" in str(error) else "invalid"
            message = f"{type(error).__name__}: {error}"[:400]
            return {"verdict": verdict, "stage": self.stage, "message": message, "where": where}
        return {"verdict": "valid", "stage": "end", "message": ""}

    def _launch(self) -> None:
        """Every stage in the order of a launch."""
        self._environment()
        self.config = self._from_arguments() if self.megatron_lm else self._from_case()
        self._parallel_state()
        self._micro_batches()
        self._optimizer()
        self._learning_rate()
        self._layers()
        self._model()
        self._schedule()
        self._first_step()

    def _environment(self) -> None:
        """Environment and device as the case says, with a recent Transformer Engine."""
        import megatron.core.transformer.transformer_config as transformer_config
        import megatron.core.utils as utils
        import torch
        from packaging.version import Version

        case = self.case
        os.environ.update(WORLD_SIZE=str(case["world_size"]), RANK="0", LOCAL_RANK="0")
        for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
            os.environ.pop(name, None)
        env = case.get("env", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
        os.environ.update({name: str(value) for name, value in env.items() if value is not None})
        arch = case.get("gpu_arch_major", 9)
        device = types.SimpleNamespace(major=arch, minor=0, multi_processor_count=132, name="none")
        torch.cuda.get_device_capability = lambda *_: (arch, 0)
        torch.cuda.get_device_properties = lambda *_: device
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.Stream = torch.cuda.Event = lambda *_, **__: None
        utils._te_version = Version(NEW_TE)
        utils.get_te_version = transformer_config.get_te_version = lambda: Version(NEW_TE)

    # Arguments --------------------------------------------------------------------------------------------------------------

    def _from_arguments(self) -> Any:
        """The configuration of a launch script: its parser, its checks, its translation."""
        self.stage = "arguments"
        from megatron.training import arguments

        from benchmarks.case_argv import case_argv

        sys.argv = ["pretrain_gpt.py", *case_argv(self.case)]
        self.args = arguments.validate_args(arguments.parse_args())
        self.stage = "TransformerConfig"
        config = arguments.core_transformer_config_from_args(self.args)
        self.sizes = {
            "tp": self.args.tensor_model_parallel_size,
            "pp": self.args.pipeline_model_parallel_size,
            "vpp": self.args.virtual_pipeline_model_parallel_size,
            "cp": self.args.context_parallel_size,
            "ep": self.args.expert_model_parallel_size,
            "etp": self.args.expert_tensor_parallel_size,
            "gbs": self.args.global_batch_size,
        }
        self.hidden_ffn = self.args.ffn_hidden_size
        return config

    def _from_case(self) -> Any:
        """The configuration that a launcher builds without Megatron-LM's script, with the script's silent changes."""
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

        self.stage = "TransformerConfig"
        fields = self._shapes() | self._parallelism() | self._options()
        kind = MLATransformerConfig if self.case.get("multi_latent_attention") else TransformerConfig
        if kind is MLATransformerConfig:
            fields.pop("num_query_groups")
        return kind(**fields)

    def _shapes(self) -> dict[str, Any]:
        """Fields that the model gives."""
        import torch
        import torch.nn.functional as functional

        case = self.case
        hidden = case["hidden_size"]
        self.hidden_ffn = case.get("ffn_hidden_size") or int((4 * hidden * 2 / 3) / 64) * 64
        experts = case.get("num_experts") or None
        frequency = case.get("moe_layer_freq", 1)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.get("precision", "bf16")[:4]]
        return {
            "num_layers": case["num_layers"],
            "hidden_size": hidden,
            "num_attention_heads": case["num_attention_heads"],
            "num_query_groups": case.get("num_query_groups"),
            "kv_channels": case.get("kv_channels"),
            "ffn_hidden_size": self.hidden_ffn,
            "num_moe_experts": experts,
            "moe_router_topk": case.get("moe_router_topk") or 2,
            "moe_ffn_hidden_size": case.get("moe_ffn_hidden_size") or (self.hidden_ffn if experts else None),
            "moe_layer_freq": eval(frequency, {"__builtins__": {}}) if isinstance(frequency, str) else frequency,  # noqa: S307
            "moe_shared_expert_intermediate_size": case.get("moe_shared_expert_intermediate_size"),
            "mtp_num_layers": case.get("mtp_num_layers"),
            "add_bias_linear": bool(case.get("add_bias_linear")),
            "gated_linear_unit": True,
            "activation_func": functional.silu,
            "normalization": "RMSNorm",
            "bias_activation_fusion": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "gradient_accumulation_fusion": False,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": dtype is torch.bfloat16,
            "fp16": dtype is torch.float16,
        }

    def _parallelism(self) -> dict[str, Any]:
        """Fields that the meshes give, after the launch script's silent changes."""
        case = self.case
        tp, pp = case.get("tp", 1), case.get("pp", 1)
        etp = case.get("etp", tp)
        vpp = case.get("vpp")
        layers = case["num_layers"] + bool(case.get("account_for_embedding_in_pipeline_split"))
        layers += bool(case.get("account_for_loss_in_pipeline_split"))
        if case.get("num_layers_per_virtual_pipeline_stage"):
            vpp = layers // pp // case["num_layers_per_virtual_pipeline_stage"]
        layout = case.get("pipeline_model_parallel_layout")
        if layout is not None:
            from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

            vpp = PipelineParallelLayerLayout.get_num_stages_from_str(layout) // pp
        vpp = None if vpp == 1 else vpp
        self.sizes = {"tp": tp, "pp": pp, "vpp": vpp, "cp": case.get("cp", 1), "ep": case.get("ep", 1), "etp": etp}
        self.sizes["gbs"] = case.get("gbs") or case.get("mbs", 1) * (case["world_size"] // (tp * pp * case.get("cp", 1)))
        kinds = case.get("cp_comm_type", "p2p")
        return {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            "context_parallel_size": self.sizes["cp"],
            "expert_model_parallel_size": self.sizes["ep"],
            "expert_tensor_parallel_size": etp,
            "sequence_parallel": bool(case.get("sp")) and tp > 1,
            "microbatch_group_size_per_vp_stage": case.get("microbatch_group_size_per_vp_stage"),
            "num_layers_in_first_pipeline_stage": case.get("decoder_first_pipeline_num_layers"),
            "num_layers_in_last_pipeline_stage": case.get("decoder_last_pipeline_num_layers"),
            "pipeline_model_parallel_layout": layout,
            "account_for_embedding_in_pipeline_split": bool(case.get("account_for_embedding_in_pipeline_split")),
            "account_for_loss_in_pipeline_split": bool(case.get("account_for_loss_in_pipeline_split")),
            "cp_comm_type": kinds if isinstance(kinds, str) else kinds[0] if len(kinds) == 1 else kinds,
            "hierarchical_context_parallel_sizes": case.get("hierarchical_context_parallel_sizes"),
            "overlap_p2p_comm": vpp is not None and not case.get("no_overlap_p2p_communication"),
            "batch_p2p_comm": vpp is None or bool(case.get("no_overlap_p2p_communication")),
        }

    def _options(self) -> dict[str, Any]:
        """Fields that the other knobs give."""
        case = self.case
        fields: dict[str, Any] = {name: case[name] for name in _SAME_NAME if name in case}
        fields["tp_comm_overlap"] = bool(case.get("tp_comm_overlap"))
        fields["fp8"] = "hybrid" if "+fp8" in case.get("precision", "") else None
        fields["fp8_param"] = bool(case.get("fp8_param_gather"))
        extra = [str(item) for item in case.get("extra", ())]
        if "--fp4-format" in extra:
            fields["fp4"] = extra[extra.index("--fp4-format") + 1]
        if "--cuda-graph-scope" in extra:
            scope = extra[extra.index("--cuda-graph-scope") + 1 :]
            fields["cuda_graph_scope"] = list(itertools.takewhile(lambda item: not item.startswith("--"), scope))
        fields["cpu_offloading"] = case.get("cpu_offloading_num_layers", 0) > 0
        return fields


_SAME_NAME = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "distribute_saved_activations",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
    "moe_shared_expert_overlap",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_router_padding_for_fp8",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "cpu_offloading_num_layers",
    "fp8_recipe",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "cuda_graph_impl",
)


def main() -> None:
    """Read cases from standard input, write verdicts to standard output."""
    megatron_lm = sys.argv[sys.argv.index("--megatron-lm") + 1] if "--megatron-lm" in sys.argv else None
    warm(megatron_lm)
    for line in sys.stdin:
        print(json.dumps(ask(json.loads(line), megatron_lm)), flush=True)


if __name__ == "__main__":
    main()
