"""One row of the zoo, and configurations with every size tiny."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

SIZES = {
    64: "max_position_embeddings n_positions max_2d_position_embeddings",
    50: "vocab_size",
    24: "intermediate_size hidden_dim d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim",
    16: """
        hidden_size d_model n_embd dim emb_dim embed_dim decoder_hidden_size image_size num_mel_bins
        feature_projection_input_dim
    """,
    12: "moe_intermediate_size shared_expert_intermediate_size",
    8: """
        head_dim d_kv embedding_size projection_dim index_head_dim linear_head_dim q_lora_rank kv_lora_rank
        qk_nope_head_dim v_head_dim mamba_d_head linear_key_head_dim linear_value_head_dim
        max_source_positions
    """,
    4: """
        num_experts num_local_experts n_routed_experts mamba_n_heads mamba_d_state mamba_chunk_size chunk_size
        qk_rope_head_dim sliding_window index_topk patch_size num_conv_pos_embeddings
    """,
    3: "num_channels num_labels conv_depthwise_kernel_size",
    2: """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_attention_heads n_head
        n_heads num_heads num_stages num_encoder_blocks encoder_attention_heads decoder_attention_heads
        type_vocab_size index_n_heads linear_num_key_heads linear_num_value_heads linear_num_heads
        num_experts_per_tok n_group eos_token_id num_conv_pos_embedding_groups
    """,
    1: """
        bos_token_id decoder_start_token_id num_key_value_heads topk_group n_shared_experts
        first_k_dense_replace
    """,
    0: "pad_token_id",
}
STAGES = {
    "depths": [1, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "sr_ratios": [2, 1],
    "mlp_ratios": [2, 2],
    "conv_dim": [8, 8],
    "conv_stride": [3, 2],
    "conv_kernel": [4, 3],
}
TINY: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()} | STAGES


@dataclass(frozen=True)
class Spec:
    """One model: its type and head, what differs from TINY, and what it is fed."""

    model_type: str
    head: str
    feed: str
    config: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    B: int = 3
    T: int = 7
    shape: tuple[int, ...] = ()
    attention: str = ""
    experts: str = "eager"
    float32: bool = False
    noise: float = 0.1


def tiny_config(cls: Any, changes: Mapping[str, Any]) -> Any:
    """A configuration with every known size at its TINY value, nested configurations included."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = inspect.signature(cls.__init__).parameters
    values = {name: _fit(value, known[name].default) for name, value in TINY.items() if name in known}
    for name, sub in cls.sub_configs.items():
        inner = dict(changes.get(name, {}))
        if sub.__name__ != "AutoConfig":
            values[name] = tiny_config(sub, inner).to_dict()
        elif inner:
            values[name] = tiny_config(CONFIG_MAPPING[inner.pop("model_type")], inner).to_dict()
    own = {name: v for name, v in changes.items() if name not in cls.sub_configs}
    return cls(**deepcopy(values | own))  # configs write into the dicts they are given


def _fit(value: Any, default: Any) -> Any:
    """The same size for both stages, where a configuration has one per stage; one where it has only one."""
    if isinstance(default, list | tuple) and not isinstance(value, list):
        return [value, value]
    return value[-1] if isinstance(value, list) and isinstance(default, int) else value
