"""What each name of the zoo changes in the tiny default."""

from __future__ import annotations

from typing import Any

from tests.zoo.names import SQUARE

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
RESNET = {"model_type": "resnet", "out_features": ["stage1", "stage2"]}
# Deep narrow networks without active normalisation need weights that keep the signal alive.
STRONG = {"noise": 0.5}
DETR = {"backbone_config": RESNET, "num_queries": 5}


def sizes(**config: Any) -> dict[str, Any]:
    """An option that changes the configuration alone."""
    return {"config": config}


def shaped(*shape: int, **config: Any) -> dict[str, Any]:
    """An option that changes the shape of a sample, and the configuration."""
    return {"shape": shape, "config": config}


OPTIONS: dict[str, dict[str, Any]] = {
    "roc_bert": sizes(shape_vocab_size=50, pronunciation_vocab_size=50, shape_embed_dim=8, pronunciation_embed_dim=8),
    "squeezebert": sizes(embedding_size=16),
    "luke": sizes(entity_vocab_size=20, entity_emb_size=8),
    "perceiver": sizes(
        num_latents=5,
        d_latents=16,
        num_self_attends_per_block=1,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
    ),
    "xmod": sizes(default_language="en_XX"),
    "bros": sizes(hidden_size=64, num_attention_heads=4),
    "lilt": sizes(hidden_size=24, channel_shrink_ratio=2),
    "layoutlmv3": sizes(coordinate_size=3, shape_size=2, visual_embed=False),
    "codegen": sizes(n_head=4, rotary_dim=4),
    "gptj": sizes(rotary_dim=4),
    "gpt_neo": sizes(attention_types=[[["global", "local"], 1]], window_size=3),
    "gemma3n_text": sizes(
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=50,
        hidden_size_per_layer_input=4,
        laurel_rank=4,
        activation_sparsity_pattern=[0.5, 0.0],
    ),
    "gemma4_text": sizes(vocab_size_per_layer_input=50, hidden_size_per_layer_input=4),
    "glm4v_moe_text": sizes(rope_parameters=MROPE, head_dim=16),
    "dbrx": sizes(
        attn_config={"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 1.0},
        ffn_config={"ffn_hidden_size": 12},
    ),
    "lfm2_moe": sizes(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "longcat_flash": sizes(
        ffn_hidden_size=24,
        expert_ffn_hidden_size=12,
        moe_topk=2,
        zero_expert_num=1,
        head_dim=4,
        num_key_value_heads=2,
    ),
    "zaya": sizes(num_experts_per_tok=1, router_hidden_size=8),
    "inkling_text": sizes(swa_head_dim=8, swa_num_attention_heads=2, swa_num_key_value_heads=1, rel_extent=8),
    "ernie4_5_moe": sizes(moe_num_experts=4, moe_k=2),
    "falcon_h1": sizes(mamba_d_ssm=32),
    "granitemoehybrid": sizes(layer_types=["mamba", "attention"], shared_intermediate_size=12),
    "mamba2": sizes(num_heads=4, n_groups=2, state_size=4),
    "zamba": sizes(layers_block_type=["hybrid", "mamba", "hybrid"], num_hidden_layers=3),
    "zamba2": sizes(layers_block_type=["mamba", "hybrid"], n_mamba_heads=4),
    "nemotron_h": sizes(ssm_state_size=4, mamba_num_heads=4, mamba_head_dim=8, n_groups=2),
    "bit": sizes(num_groups=2),
    "cvt": sizes(patch_sizes=[3, 3], patch_stride=[2, 2], patch_padding=[1, 1], depth=[1, 2], cls_token=[False, True]),
    "donut-swin": sizes(window_size=2),
    "swin": sizes(window_size=2, depths=[2, 1]),
    "swinv2": sizes(window_size=2, depths=[2, 1]),
    "maskformer-swin": sizes(window_size=2),
    "swin2sr": sizes(window_size=2, patch_size=1),
    "efficientnet": sizes(
        width_coefficient=0.25,
        depth_coefficient=1.0,
        hidden_dim=320,
        kernel_sizes=[3, 5],
        in_channels=[32, 32],
        out_channels=[32, 64],
        strides=[2, 1],
        num_block_repeats=[1, 2],
        expand_ratios=[1, 2],
    )
    | STRONG,
    "hiera": sizes(
        num_query_pool=1,
        masked_unit_size=[2, 2],
        patch_size=[3, 3],
        patch_stride=[2, 2],
        patch_padding=[1, 1],
        masked_unit_attention=[True, False],
        num_heads=[1, 2],
    ),
    "levit": shaped(
        3,
        64,
        64,
        hidden_sizes=[8, 8, 16],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[4, 4, 4],
        image_size=64,
        patch_size=16,
    )
    | {"noise": 0.2},
    "mgp-str": sizes(num_bpe_labels=5, num_wordpiece_labels=5) | {"outputs": ("logits",)},
    "mobilenet_v1": sizes(depth_multiplier=0.1) | STRONG,
    "mobilenet_v2": sizes(depth_multiplier=0.1) | STRONG,
    "mobilevit": shaped(3, 64, 64, hidden_sizes=[8, 8, 8], neck_hidden_sizes=[8] * 7, patch_size=2) | STRONG,
    "mobilevitv2": shaped(
        3, 64, 64, base_attn_unit_dims=[64] * 3, n_attn_blocks=[1] * 3, width_multiplier=0.1, patch_size=2
    )
    | STRONG,
    "pvt": sizes(sequence_reduction_ratios=[2, 1], patch_sizes=[4, 2], strides=[4, 2]),
    "textnet": sizes(
        stem_out_channels=8,
        hidden_sizes=[8, 8, 16],
        conv_layer_kernel_sizes=[[[3, 3], [1, 3]], [[3, 1]]],
        conv_layer_strides=[[1, 2], [1]],
    ),
    "hgnet_v2": sizes(
        stem_channels=[3, 4, 8],
        stage_in_channels=[8, 8],
        stage_mid_channels=[4, 4],
        stage_out_channels=[8, 16],
        stage_num_blocks=[1, 1],
        stage_downsample=[False, True],
        stage_light_block=[False, True],
        stage_kernel_size=[3, 3],
        stage_numb_of_layers=[2, 2],
    )
    | STRONG,
    "videomae": sizes(num_frames=4),
    "vivit": sizes(num_frames=4, tubelet_size=[2, 4, 4]),
    "vjepa2": sizes(
        crop_size=16,
        frames_per_clip=4,
        pred_hidden_size=16,
        pred_num_attention_heads=2,
        pred_num_hidden_layers=2,
        pred_num_mask_tokens=2,
    ),
    "deformable_detr": sizes(**DETR, num_feature_levels=2, d_model=32),
    "rt_detr": sizes(
        **DETR,
        encoder_hidden_dim=16,
        encoder_in_channels=[8, 16],
        feat_strides=[8, 16],
        encode_proj_layers=[1],
        decoder_in_channels=[16, 16],
        num_feature_levels=2,
    ),
    "depth_anything": sizes(
        backbone_config={
            "model_type": "dinov2",
            "out_features": ["stage1", "stage2"],
            "reshape_hidden_states": False,
        },
        reassemble_hidden_size=16,
        reassemble_factors=[2, 1],
        neck_hidden_sizes=[8, 8],
        fusion_hidden_size=8,
        head_hidden_size=8,
    ),
    "upernet": sizes(backbone_config=RESNET, use_auxiliary_head=False),
    "audio-spectrogram-transformer": sizes(max_length=24, frequency_stride=4, time_stride=4),
    "audioflamingo3_encoder": {"feed": "masked_features", "shape": (16, 16)},
    "gemma4_audio": shaped(24, 8, subsampling_conv_channels=[8, 4]),
    "patchtst": sizes(context_length=24, num_input_channels=16),
    "patchtsmixer": sizes(context_length=24, num_input_channels=16),
    "univnet": sizes(
        model_in_channels=4,
        model_hidden_channels=4,
        resblock_stride_sizes=[2, 2, 2],
        kernel_predictor_hidden_channels=4,
    ),
    "encodec": shaped(1, 90, num_filters=4, upsampling_ratios=[2, 2], codebook_size=8),
    "mimi": shaped(
        1,
        90,
        num_filters=4,
        upsampling_ratios=[2, 2],
        codebook_size=8,
        codebook_dim=8,
        upsample_groups=16,
        vector_quantization_hidden_dimension=8,
        num_quantizers=2,
    ),
    "dac": shaped(1, 90, encoder_hidden_size=4, downsampling_ratios=[2, 2], codebook_size=8, n_codebooks=2),
    "speech_to_text": sizes(input_feat_per_channel=16, conv_channels=8),
    "moonshine": shaped(
        1500,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
    ),
    "speecht5": shaped(90),
    "encoder-decoder": sizes(
        encoder={"model_type": "bert"}, decoder={"model_type": "gpt2", "add_cross_attention": True}
    ),
    "vision-encoder-decoder": sizes(
        encoder={"model_type": "vit"},
        decoder={"model_type": "bert", "add_cross_attention": True, "is_decoder": True},
    ),
    "speech-encoder-decoder": shaped(90, encoder={"model_type": "wav2vec2"}, decoder={"model_type": "bart"}),
    "llama/float32": {"float32": True},
    "mixtral/batched": {"experts": "batched_mm"},
    "clip": {"interacts": True},
    "siglip": {"interacts": True},
}

# Latent attention has as many key as query heads.
MLA = """
    axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa mistral4 mistral_large4_text
    minicpm3 youtu
"""

SHARED: list[tuple[str, dict[str, Any]]] = [
    (MLA + "diffllama esmc", sizes(num_key_value_heads=2)),
    (
        "qwen2_vl_text qwen2_5_vl_text glm4v_text glm_image_text glm_ocr_text hunyuan_vl_text",
        sizes(rope_parameters=MROPE),
    ),
    (
        "aimv2 altclip blip chinese_clip groupvit metaclip_2 tipsv2 clipseg",
        {"outputs": ("text_embeds", "image_embeds")},
    ),
    (
        "voxtral_encoder glmasr_encoder qwen2_audio_encoder voxtral_realtime_encoder whisper",
        {"shape": (16, 16)},
    ),
    ("detr conditional_detr dab-detr table-transformer", sizes(**DETR)),
    ("bert/eager llama/eager vit/eager", {"attention": "eager"}),
    ("mixtral/grouped deepseek_v3/grouped", {"experts": "grouped_mm", "float32": True}),
]


def options(name: str) -> dict[str, Any]:
    """What the model type and its variant change, the variant last."""
    model_type = name.split("/")[0]
    found: dict[str, Any] = {"B": 4, "T": 4} if name in SQUARE.split() else {}
    for key in dict.fromkeys([model_type, name]):
        for names, shared in SHARED:
            found |= shared if key in names.split() else {}
        found |= OPTIONS.get(key, {})
    return found
