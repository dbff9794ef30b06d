"""ModelSpec: a transformer's shapes under Megatron's names. Workload: what is trained, on how many ranks."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator


class ModelSpec(BaseModel):
    """Shapes of a GPT-style model, one field per Megatron argument.

    Raises:
        pydantic.ValidationError: where shapes contradict each other (heads against hidden size or query groups).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: PositiveInt
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
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    make_vocab_size_divisible_by: PositiveInt = 128
    num_experts: PositiveInt | None = None
    moe_router_topk: PositiveInt = 2
    moe_ffn_hidden_size: PositiveInt | None = None

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}"
                " (change one of them, or give kv_channels)"
            )
        if self.num_query_groups is not None and self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not divisible by num_query_groups={self.num_query_groups}"
            )
        return self

    @property
    def ffn_size(self) -> int:
        """Hidden size of the MLP; Megatron's default where none is given (arguments.py, validate_args)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int((4 * self.hidden_size * 2 / 3) / 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def query_groups(self) -> int:
        """Number of key/value heads: num_query_groups, or one per head."""
        return self.num_query_groups or self.num_attention_heads

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Vocabulary rounded up to a multiple of make_vocab_size_divisible_by x TP (Megatron's vocab_size_with_padding)."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple


class Workload(BaseModel):
    """What is trained and on how many ranks: fixed for one pool at one node count, while `TrialConfig` says how."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSpec
    world_size: PositiveInt
    global_batch_size: PositiveInt
    seq_length: PositiveInt
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step: global batch size x sequence length."""
        return self.global_batch_size * self.seq_length
