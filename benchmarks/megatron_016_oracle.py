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


class _Oracle:
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

        sys.argv = ["pretrain_gpt.py", *self._argv()]
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

    def _argv(self) -> list[str]:
        """The case as a command line, by the shared oracle's spelling where 0.16 knows the argument."""
        from benchmarks.case_argv import case_argv

        return case_argv(self.case)

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
        if "+fp8" in case.get("precision", ""):
            fields["fp8"] = "hybrid"
        fields["fp8_param"] = bool(case.get("fp8_param_gather"))
        extra = [str(item) for item in case.get("extra", ())]
        if "--cuda-graph-scope" in extra:
            scope = extra[extra.index("--cuda-graph-scope") + 1 :]
            fields["cuda_graph_scope"] = list(itertools.takewhile(lambda item: not item.startswith("--"), scope))
        fields["cpu_offloading"] = case.get("cpu_offloading_num_layers", 0) > 0
        return fields

    # Stages after the arguments ---------------------------------------------------------------------------------------------

    def _parallel_state(self) -> None:
        """Both meshes under a process group that sends nothing."""
        self.stage = "parallel_state"
        import torch.distributed as dist
        from megatron.core import parallel_state
        from torch.testing._internal.distributed.fake_pg import FakeStore

        sizes = self.sizes
        dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=self.case["world_size"])
        parallel_state.initialize_model_parallel(
            sizes["tp"],
            sizes["pp"],
            sizes["vpp"],
            context_parallel_size=sizes["cp"],
            hierarchical_context_parallel_sizes=self.case.get("hierarchical_context_parallel_sizes"),
            expert_model_parallel_size=sizes["ep"],
            expert_tensor_parallel_size=sizes["etp"],
            num_distributed_optimizer_instances=self.case.get("num_distributed_optimizer_instances", 1),
            order="tp-cp-ep-pp-dp" if self.case.get("use_tp_pp_dp_mapping") else "tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
        )
        self.state = parallel_state

    def _micro_batches(self) -> None:
        """The micro-batch calculator."""
        self.stage = "micro_batches"
        from megatron.core import num_microbatches_calculator as calculator

        data_parallel = self.case["world_size"] // (self.sizes["tp"] * self.sizes["pp"] * self.sizes["cp"])
        calculator.init_num_microbatches_calculator(0, None, self.sizes["gbs"], self.case.get("mbs", 1), data_parallel, False)
        self.micro_batches = calculator.get_num_microbatches()

    def _optimizer(self) -> None:
        """DDP and optimiser configs, as far as they can be built without Transformer Engine."""
        self.stage = "optimizer"
        import torch
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig

        case = self.case
        types = {name: _DTYPES[case[name]] for name in _STATE_TYPES if name in case}
        names = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "use_megatron_fsdp")
        DistributedDataParallelConfig(**{name: bool(case.get(name)) for name in names})
        with contextlib.suppress(RuntimeError):  # Transformer Engine's Adam is not here
            OptimizerConfig(
                optimizer=case.get("optimizer", "adam"),
                use_distributed_optimizer=bool(case.get("use_distributed_optimizer")),
                use_precision_aware_optimizer=bool(case.get("use_precision_aware_optimizer")),
                optimizer_cpu_offload=bool(case.get("optimizer_cpu_offload")),
                **{name: getattr(torch, dtype) for name, dtype in types.items()},
            )

    def _learning_rate(self) -> None:
        """The learning rate's schedule."""
        self.stage = "learning_rate"
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        case = self.case
        decay = (case.get("lr_decay_iters") or case.get("train_iters", 10)) * self.sizes["gbs"]
        fraction = case.get("lr_warmup_fraction")
        warmup = case.get("lr_warmup_iters", 0) * self.sizes["gbs"] if fraction is None else fraction * decay
        OptimizerParamScheduler(
            types.SimpleNamespace(param_groups=[]), 0.0, 1e-4, 1e-5, warmup, decay, "linear", 0.01, 0.01, decay, "constant"
        )

    def _layers(self) -> None:
        """Layers of every stage."""
        self.stage = "layers"
        from megatron.core.transformer.transformer_block import get_num_layers_to_build

        for rank in range(self.sizes["pp"]):
            self.state.set_pipeline_model_parallel_rank(rank)
            for chunk in range(self.sizes["vpp"] or 1):
                get_num_layers_to_build(self.config, vp_stage=chunk if self.sizes["vpp"] else None, pp_rank=rank)
        self.state.set_pipeline_model_parallel_rank(0)

    def _model(self) -> None:
        """The first and the last stage on the meta device; kernels that are missing here are left out."""
        self.stage = "model"
        config = self.config
        kept = {name: getattr(config, name) for name in _NEEDS_TE}
        config.use_cpu_initialization, config.perform_initialization = True, False
        for name, value in _NEEDS_TE.items():
            setattr(config, name, value)
        config.num_query_groups = config.num_query_groups or config.num_attention_heads
        self._build_few_layers()
        for rank in sorted({0, self.sizes["pp"] - 1}):
            self._build(rank, kept["sequence_parallel"])
        for name, value in kept.items():
            setattr(config, name, value)
        self.state.set_pipeline_model_parallel_rank(0)

    def _build_few_layers(self) -> None:
        """Build the first layers of a stage only: more of the same kind say nothing new and cost seconds."""
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.transformer import transformer_block

        whole = transformer_block.get_num_layers_to_build

        def few(*arguments: Any, **options: Any) -> int:
            return min(int(whole(*arguments, **options)), _BUILT_LAYERS)

        transformer_block.get_num_layers_to_build = gpt_layer_specs.get_num_layers_to_build = few

    def _build(self, rank: int, sequence_parallel: bool) -> None:
        """One stage, and the checks of its modules' first step."""
        import torch
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

        vpp = self.sizes["vpp"]
        chunk = (0 if rank == 0 else vpp - 1) if vpp else None
        self.state.set_pipeline_model_parallel_rank(rank)
        if vpp:
            self.state.set_virtual_pipeline_model_parallel_rank(chunk)
        with torch.device("meta"):
            if self.config.num_moe_experts:
                spec = get_gpt_decoder_block_spec(
                    self.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=chunk
                )
            else:
                spec = get_gpt_layer_local_spec(None, False, False, normalization="RMSNorm")
            model = GPTModel(
                config=self.config,
                transformer_layer_spec=spec,
                vocab_size=1024 * self.sizes["tp"],
                max_sequence_length=self.case["seq_length"],
                pre_process=rank == 0,
                post_process=rank == self.sizes["pp"] - 1,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                vp_stage=chunk,
            )
        self._attention_shape(model)
        self.config.sequence_parallel = sequence_parallel
        self._experts_guard(model)
        self.config.sequence_parallel = False

    def _attention_shape(self, model: Any) -> None:
        """The view of SelfAttention.get_query_key_value_tensors on shapes alone."""
        import torch

        self.stage = "attention_shape"
        attention = next((module for module in model.modules() if type(module).__name__ == "SelfAttention"), None)
        if attention is not None:
            groups, tensor_ranks = self.config.num_query_groups, self.sizes["tp"]
            rows = attention.linear_qkv.weight.shape[0]
            rows = rows * tensor_ranks // groups if groups < tensor_ranks else rows
            heads_per_group = attention.num_attention_heads_per_partition // attention.num_query_groups_per_partition
            width = (heads_per_group + 2) * attention.hidden_size_per_attention_head
            torch.empty(rows, device="meta").view(attention.num_query_groups_per_partition, width)
        self.stage = "model"

    def _experts_guard(self, model: Any) -> None:
        """The guard in MoELayer.forward, which raises before any kernel."""
        import torch

        self.stage = "experts_guard"
        layer = next((module for module in model.modules() if type(module).__name__ == "MoELayer"), None)
        if layer is not None:
            try:
                layer.train().forward(torch.zeros(1, 1, 1))
            except ValueError as error:
                if "sequence parallelism" in str(error):
                    raise
            except Exception:  # noqa: BLE001, S110  the zero-size input fails further on, which says nothing
                pass
        self.stage = "model"

    def _schedule(self) -> None:
        """The interleaved schedule's checks of micro-batches; it stops where the work would begin."""
        if not self.sizes["vpp"] or self.sizes["pp"] == 1:
            return
        self.stage = "schedule"
        import torch
        from megatron.core.enums import ModelType
        from megatron.core.pipeline_parallel import schedules

        calls: list[int] = []

        def model_type(*_: Any) -> Any:
            calls.append(1)
            if len(calls) > 1:
                raise _ChecksPassedError
            return ModelType.encoder_or_decoder

        class Chunk(torch.nn.Module):
            config = self.config

        group = types.SimpleNamespace(size=lambda: self.sizes["pp"], rank=lambda: 0)
        groups = types.SimpleNamespace(tp=group, cp=group, pp=group, dp_cp=group, embd=None, pos_embd=None)
        vpp = self.sizes["vpp"]
        sends = types.SimpleNamespace(pp_group=group, config=self.config, virtual_pipeline_model_parallel_size=vpp)
        plain_zeros = torch.zeros

        def zeros_on_cpu(*sizes: Any, device: Any = None, **options: Any) -> Any:
            return plain_zeros(*sizes, **options)

        torch.zeros = zeros_on_cpu
        schedules.get_model_type = model_type
        try:
            schedules.forward_backward_pipelining_with_interleaving(
                forward_step_func=None,
                data_iterator=[None] * vpp,
                model=[Chunk() for _ in range(vpp)],
                num_microbatches=self.micro_batches,
                seq_length=self.case["seq_length"],
                micro_batch_size=self.case.get("mbs", 1),
                forward_only=False,
                p2p_communicator=sends,
                pg_collection=groups,
            )
        except _ChecksPassedError:
            pass
        finally:
            torch.zeros = plain_zeros

    def _first_step(self) -> None:
        """Splits and alignments of the first step."""
        import torch

        self.stage = "first_step"
        case, config = self.case, self.config
        tokens = case["seq_length"] // self.sizes["cp"]
        if config.sequence_parallel:
            from megatron.core.tensor_parallel.mappings import _split_along_first_dim

            _split_along_first_dim(torch.zeros(tokens, 1), self.state.get_tensor_model_parallel_group())
        if self.sizes["cp"] > 1:
            torch.zeros(case["seq_length"]).view(2 * self.sizes["cp"], -1)
        if config.fp8:
            self._fp8_shapes(tokens * case.get("mbs", 1))
        if config.num_moe_experts:
            from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

            topk_routing_with_score_function(
                torch.randn(4, config.num_moe_experts),
                config.moe_router_topk,
                use_pre_softmax=config.moe_router_pre_softmax,
                num_groups=config.moe_router_num_groups,
                group_topk=config.moe_router_group_topk,
            )

    def _fp8_shapes(self, tokens: int) -> None:
        """Transformer Engine's own conditions on the matrices of FP8 products."""
        tokens = tokens // self.sizes["tp"] if self.config.sequence_parallel else tokens
        per_rank = self.hidden_ffn // self.sizes["tp"]
        rows, columns = (32, 32) if self.case.get("fp8_recipe") == "mxfp8" else (8, 16)
        for first, second in ((tokens, self.case["hidden_size"]), (self.case["hidden_size"], per_rank)):
            if first % rows or second % columns:
                raise RuntimeError(f"FP8 needs dimensions divisible by {rows} and {columns}, got ({first}, {second})")


_BUILT_LAYERS = 4
_NEEDS_TE: dict[str, Any] = {
    "moe_grouped_gemm": False,
    "sequence_parallel": False,
    "context_parallel_size": 1,
    "multi_latent_attention": False,
    "fp8": None,
    "cpu_offloading": False,
    "cuda_graph_impl": "none",
    "mtp_num_layers": None,
}
"""What cannot be built without Transformer Engine or CUDA, and what is built in its place."""


class _ChecksPassedError(Exception):
    """The schedule's checks passed."""


_STATE_TYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
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
