"""ModelSpec: a transformer's shapes under Megatron's names. Workload: what is trained, on how many ranks."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator, model_validator
from pydantic_core import PydanticCustomError

from search_spaces.layer_pattern import layer_pattern
from search_spaces.whole import GpusPerNode, Layers, NonNegativeInt, PositiveInt, Ranks


class ModelSpec(BaseModel):
    """Shapes of a GPT-style model, one field per Megatron argument.

    Five fields are no arguments of Megatron-LM's script and only count parameters: `layer_norms` (norms of the hidden size in a
    layer), `parametric_norms` (whether norms have weights), `qk_layernorm_per_head` (whether query and key norms have the size of
    a head, else of all heads), `biased` (the parts whose linear layers have biases, where Megatron only knows all or none; none =
    as `add_bias_linear` and `add_qkv_bias` say) and, for a launch, the default of `max_position_embeddings` (none = the sequence
    length).

    Raises:
        pydantic.ValidationError: where shapes contradict each other (heads against hidden size or query groups).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_layers: Layers
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    ffn_hidden_size: PositiveInt | None = None
    num_query_groups: PositiveInt | None = None
    kv_channels: PositiveInt | None = None
    swiglu: bool = True
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    add_bias_linear: bool = False
    untie_embeddings_and_output_weights: bool = True
    layer_norms: NonNegativeInt = 2
    parametric_norms: bool = True
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    max_position_embeddings: PositiveInt | None = None
    make_vocab_size_divisible_by: PositiveInt = 128
    add_qkv_bias: bool = False
    biased: tuple[Literal["attention", "mlp"], ...] | None = None
    qk_layernorm: bool = False
    qk_layernorm_per_head: bool = True
    num_experts: PositiveInt | None = None
    moe_router_topk: PositiveInt = 2
    moe_ffn_hidden_size: PositiveInt | None = None
    moe_layer_freq: PositiveInt | tuple[int, ...] = 1
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    moe_shared_expert_gate: bool = False
    moe_router_pre_softmax: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    moe_router_num_groups: PositiveInt | None = None
    moe_router_group_topk: PositiveInt | None = None
    multi_latent_attention: bool = False
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt = 512
    qk_head_dim: PositiveInt = 128
    qk_pos_emb_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128
    mtp_num_layers: NonNegativeInt | None = None

    @field_validator("moe_layer_freq", mode="before")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        return layer_pattern(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise PydanticCustomError(
                "hidden_size_over_heads",
                "hidden_size={hidden} is not divisible by num_attention_heads={heads} (change one of them, or give kv_channels)",
                {"hidden": self.hidden_size, "heads": self.num_attention_heads},
            )
        if self.num_query_groups is not None and self.num_attention_heads % self.num_query_groups:
            from search_spaces.rules.base import near_divisors  # noqa: PLC0415  rules read the fields of this module

            raise PydanticCustomError(
                "heads_over_query_groups",
                "num_attention_heads={heads} is not divisible by num_query_groups={groups}; nearest: {nearest}",
                {
                    "heads": self.num_attention_heads,
                    "groups": self.num_query_groups,
                    "nearest": near_divisors(self.num_attention_heads, self.num_query_groups)(),
                },
            )
        return self

    @property
    def ffn_size(self) -> int:
        """Hidden size of the MLP; Megatron's default where none is given (arguments.py, validate_args)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int((4 * self.hidden_size * 2 / 3) / 64) * 64 if self.swiglu else 4 * self.hidden_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | Path) -> Self:
        """Shapes from a Hugging Face `config.json`: its content, its path, or the path of its folder. No weights, no network.

        Raises:
            search_spaces.hf.UnknownModelError: the architecture is unknown, or fields that it needs are missing.
        """
        from search_spaces.hf import read_hf  # noqa: PLC0415  hf writes the fields of this module

        return cls.model_validate(read_hf(config))

    @property
    def parameters(self) -> int:
        """Parameters of the whole model without multi-token prediction layers."""
        from search_spaces.parameters import count_parameters  # noqa: PLC0415  parameters reads the fields of this module

        return count_parameters(self).total

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def is_moe(self) -> bool:
        """Whether some layers have experts."""
        return self.num_experts is not None

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts (models/gpt/gpt_layer_specs.py: every moe_layer_freq-th, or as the list says)."""
        if not self.is_moe:
            return (False,) * self.num_layers
        if isinstance(self.moe_layer_freq, tuple):
            return tuple(bool(layer) for layer in self.moe_layer_freq)
        return tuple(layer % self.moe_layer_freq == 0 for layer in range(self.num_layers))

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layers have no experts."""
        return not all(self.moe_layers)

    @property
    def expert_ffn_size(self) -> int:
        """Hidden size of one expert; Megatron's default is the dense one (arguments.py, validate_args)."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def query_groups(self) -> int:
        """Number of key/value heads: num_query_groups, or one per head."""
        return self.num_query_groups or self.num_attention_heads

    def argv(self) -> list[str]:
        """Megatron-LM's command line arguments for these shapes."""
        from search_spaces.argv import model_argv  # noqa: PLC0415  argv reads the fields of this module

        return model_argv(self)

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Vocabulary rounded up to a multiple of make_vocab_size_divisible_by x TP (Megatron's vocab_size_with_padding)."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple


class RunSettings(BaseModel):
    """Arguments of a run that are no knobs and no shapes, but on which some of Megatron's checks depend.

    Attributes:
        gpu_arch_major: CUDA compute capability, major number (8 Ampere, 9 Hopper, 10 Blackwell).
        te_version: Transformer Engine's version; none = recent enough for everything.
        env: Environment of the ranks; none = the launcher sets what the configuration needs.
        train_iters: Steps of the whole run.
        lr_warmup_iters: Warm-up steps of the learning rate.
        lr_warmup_fraction: Warm-up as a share of the decay steps.
        lr_decay_iters: Steps over which the learning rate decays; none = train_iters.
        lr_decay_style: How it decays.
        lr_wsd_decay_iters: Steps of the decay at the end of style WSD, which needs them.
        rampup_batch_size: Start, increment and samples of a batch size ramp-up.
        gradient_accumulation_fusion: Whether weight gradients are accumulated by a fused kernel.
        optimizer: Megatron's optimizer.
        separate_main_params: Whether the optimiser has fp32 parameters beside 16-bit weights, as Megatron's always has.
        decrease_batch_size_if_needed: Whether a global batch that does not divide is cut down to one that does.
        check_for_nan_in_loss_and_grad: Whether every step looks for NaN, which a graph of the whole iteration cannot.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gpu_arch_major: PositiveInt = 9
    te_version: str | None = None
    env: dict[str, str | None] | None = None
    train_iters: PositiveInt | None = 10
    lr_warmup_iters: NonNegativeInt = 0
    lr_warmup_fraction: float | None = None
    lr_decay_iters: PositiveInt | None = None
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_wsd_decay_iters: PositiveInt | None = None
    rampup_batch_size: tuple[int, int, int] | None = None
    gradient_accumulation_fusion: bool = False
    optimizer: Literal["adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"] = "adam"
    check_for_nan_in_loss_and_grad: bool = True
    separate_main_params: bool = True
    decrease_batch_size_if_needed: bool = False

    @model_validator(mode="after")
    def _decay_is_complete(self) -> Self:
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            needed = {"style": self.lr_decay_style}
            raise PydanticCustomError("wsd_decay_over_steps", "lr_decay_style={style} needs lr_wsd_decay_iters", needed)
        return self


def installed_megatron() -> Literal["0.16", "0.19"]:
    """The version of the rules for launching here: that of the installed Megatron-Core, 0.19 where there is none."""
    try:
        installed = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return "0.19"
    return "0.16" if tuple(map(int, installed.split(".")[:2])) < (0, 17) else "0.19"


class Workload(BaseModel):
    """What is trained and on how many ranks: fixed for one pool at one node count, while `TrialConfig` says how.

    Attributes:
        model: Shapes of the model.
        world_size: Ranks.
        global_batch_size: Sequences per optimiser step.
        seq_length: Tokens per sequence.
        device: Torch device type of the ranks.
        megatron: Version whose rules hold (`installed_megatron` for a launch here).
        gpus_per_node: GPUs of a node, for what is worth trying; none = unknown.
        settings: Other arguments of the run on which rules depend.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: ModelSpec
    world_size: Ranks
    global_batch_size: PositiveInt
    seq_length: PositiveInt
    device: Literal["cuda", "cpu"] = "cuda"
    megatron: Literal["0.16", "0.19"] = "0.19"
    gpus_per_node: GpusPerNode | None = None
    settings: RunSettings = RunSettings()

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step: global batch size x sequence length."""
        return self.global_batch_size * self.seq_length
