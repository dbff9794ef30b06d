"""What Megatron-Core 0.16 says of a configuration after its arguments: groups, configs, layers, model, schedule, first step."""

# ruff: noqa: PLC0415  Megatron is imported where it is asked, in a child of its own per case.

from __future__ import annotations

import contextlib
import types
from typing import Any


class Stages:
    """The stages of a launch after its arguments, as far as a CPU can go.

    Attributes:
        case: What is asked.
        stage: The stage that runs, for the verdict.
        config: Megatron's TransformerConfig.
        sizes: Parallel sizes and global batch (tp, pp, vpp, cp, ep, etp, gbs).
        hidden_ffn: Width of the dense feed-forward network.
    """

    case: dict[str, Any]
    stage: str
    config: Any
    sizes: dict[str, Any]
    hidden_ffn: int

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
        torch.zeros = lambda *sizes, device=None, **options: plain_zeros(*sizes, **options)  # noqa: PLW0108  drops the device
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
        if config.fp8 or config.fp4:
            self._low_precision_shapes(tokens * case.get("mbs", 1))
        if config.num_moe_experts:
            from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

            topk_routing_with_score_function(
                torch.randn(4, config.num_moe_experts),
                config.moe_router_topk,
                use_pre_softmax=config.moe_router_pre_softmax,
                num_groups=config.moe_router_num_groups,
                group_topk=config.moe_router_group_topk,
            )

    def _low_precision_shapes(self, tokens: int) -> None:
        """Transformer Engine's own conditions on the matrices of FP8 and NVFP4 products."""
        tokens = tokens // self.sizes["tp"] if self.config.sequence_parallel else tokens
        per_rank = self.hidden_ffn // self.sizes["tp"]
        rows, columns = (32, 32) if self.case.get("fp8_recipe") == "mxfp8" else (8, 16)
        if self.config.fp4:
            rows, columns = 16, 16
        for first, second in ((tokens, self.case["hidden_size"]), (self.case["hidden_size"], per_rank)):
            if first % rows or second % columns:
                raise RuntimeError(f"FP8 and NVFP4 need dimensions divisible by {rows} and {columns}, got ({first}, {second})")


_BUILT_LAYERS = 4
_NEEDS_TE: dict[str, Any] = {
    "moe_grouped_gemm": False,
    "sequence_parallel": False,
    "context_parallel_size": 1,
    "multi_latent_attention": False,
    "fp8": None,
    "fp4": None,
    "cpu_offloading": False,
    "cuda_graph_impl": "none",
    "mtp_num_layers": None,
}
"""What cannot be built without Transformer Engine or CUDA, and what is built in its place."""


class _ChecksPassedError(Exception):
    """The schedule's checks passed."""


_STATE_TYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
