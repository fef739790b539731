"""Which models: names by family, head and feed. A name is a model type, or a model type and a variant."""

from __future__ import annotations

BASE = "AutoModel"
CAUSAL = "AutoModelForCausalLM"
MASKED = "AutoModelForMaskedLM"
SEQ2SEQ = "AutoModelForSeq2SeqLM"

GROUPS: dict[tuple[str, str, str], str] = {
    ("text", MASKED, "text_padded"): """
        albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie
        esm eurobert fnet funnel ibert megatron-bert mobilebert modernbert mpnet mra nomic_bert
        nystromformer rembert roberta roberta-prelayernorm roc_bert roformer squeezebert xlm-roberta
        xlm-roberta-xl yoso jina_embeddings_v3 flaubert tapas longformer luke perceiver xmod bert/eager
    """,
    ("text", BASE, "text_padded"): """
        canine dpr gte ultrabert splinter embedding_gemma2_text clip_text_model esmc tipsv2_text_model
        molmo2_text muse_glimmer_text qwen2_vl_text qwen2_5_vl_text qwen3_vl_text glm4v_text glm_image_text
        glm_ocr_text hunyuan_vl_text
    """,
    ("text", BASE, "text_boxes"): "bros layoutlm lilt layoutlmv3 markuplm",
    ("text", CAUSAL, "text_padded"): """
        apertus arcee beam bert-generation biogpt bitnet bloom codegen cohere cohere2 cwm diffllama doge
        emu3 ernie4_5 exaone4 falcon flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
        gemma4_unified_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj granite
        granite_swa helium hrm_text hunyuan_v1_dense hyperclovax jais2 llama minicpm3 ministral ministral3
        mistral mllama llama/eager llama/float32
    """,
    ("text", CAUSAL, "text"): """
        modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 openai-gpt opt persimmon phi phi3 qwen2
        qwen3 seed_oss smollm3 stablelm starcoder2 vaultgemma xglm xlm xlnet youtu cpmant ctrl trocr
    """,
    ("moe", CAUSAL, "text_padded"): """
        afmoe aria_text axk1 axk2 bailing_hybrid cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32
        deepseek_v4 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss
        granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 inkling_text jetmoe kolibri1
        laguna lfm2_moe llama4_text longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
        mixtral olmoe phimoe qwen2_moe qwen3_moe qwen4_exp_text solar_open zaya mixtral/batched
        mixtral/grouped deepseek_v3/grouped
    """,
    ("moe", BASE, "text_padded"): """
        openai_privacy_filter mistral4 mistral_large4_text muse_spark_text glm4v_moe_text qwen3_vl_moe_text
    """,
    ("moe", SEQ2SEQ, "seq2seq"): "switch_transformers nllb-moe",
    ("ssm", CAUSAL, "text_padded"): """
        bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 mamba mamba2 nemotron_h
        olmo_hybrid qwen3_5_text qwen3_5_moe_text qwen3_next recurrent_gemma
    """,
    ("ssm", CAUSAL, "text"): "rwkv xlstm zamba zamba2",
    ("seq2seq", SEQ2SEQ, "seq2seq"): """
        bart bigbird_pegasus blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp
        pegasus pegasus_x plbart prophetnet t5 t5gemma umt5
    """,
    ("seq2seq", "EncoderDecoderModel", "seq2seq"): "encoder-decoder",
    ("seq2seq", "VisionEncoderDecoderModel", "pixels2seq"): "vision-encoder-decoder",
    ("seq2seq", "SpeechEncoderDecoderModel", "speech2seq"): "speech-encoder-decoder",
    ("vision", BASE, "pixels"): """
        aimv2_vision_model beit bit chinese_clip_vision_model clip_vision_model convnext convnextv2 cvt
        data2vec-vision deit dinov2 dinov2_with_registers dinov3_convnext dinov3_vit donut-swin dpt
        efficientnet focalnet hiera ijepa internvl_vision levit maskformer-swin mlcd_vision_model
        mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 pixio poolformer pvt pvt_v2 qianfan_ocr_vision
        regnet resnet sam3_vit_model sam_hq_vision_model sam_vision_model sapiens2 segformer
        siglip_vision_model swiftformer swin swin2sr swinv2 textnet tipsv2_vision_model vit vit_mae vit_msn
        vitdet yolos glpn idefics3_vision detr conditional_detr deformable_detr dab-detr rt_detr
        table-transformer vit/eager
    """,
    ("vision", "AutoModelForDepthEstimation", "pixels"): "depth_anything",
    ("vision", "AutoModelForSemanticSegmentation", "pixels"): "upernet",
    ("vision", "AutoModelForImageClassification", "pixels"): "hgnet_v2",
    ("vision", "MgpstrForSceneTextRecognition", "pixels"): "mgp-str",
    ("vision", BASE, "video"): "timesformer videomae vivit vjepa2",
    ("vision", BASE, "text"): "imagegpt",
    ("vision", BASE, "text_and_pixels"): """
        aimv2 altclip blip chinese_clip clip flava groupvit metaclip_2 siglip vilt tipsv2 clipseg
    """,
    ("audio", BASE, "sound"): """
        wav2vec2 wav2vec2-conformer hubert wavlm unispeech unispeech-sat data2vec-audio sew sew-d mimi
        dac
    """,
    ("audio", BASE, "codes"): "encodec",
    ("audio", BASE, "features"): """
        audio-spectrogram-transformer wav2vec2-bert parakeet_encoder lasr_encoder voxtral_encoder
        audioflamingo3_encoder glmasr_encoder gemma4_audio qwen2_audio_encoder patchtst patchtsmixer univnet
        voxtral_realtime_encoder
    """,
    ("audio", BASE, "speech2seq"): "whisper speech_to_text moonshine",
    ("audio", "SpeechT5ForSpeechToText", "speech2seq"): "speecht5",
}

# Four samples of four positions: a layout that is guessed from sizes is guessed wrong here.
SQUARE = """
    albert bert roberta electra distilbert gpt2 llama mistral opt bloom falcon gemma2 phi qwen2 xlnet mixtral
    deepseek_v2 qwen3_moe olmoe gpt_oss switch_transformers mamba mamba2 rwkv recurrent_gemma t5 bart vit swin
"""

FAST = """
    albert bert bert/eager deberta distilbert electra fnet funnel modernbert roberta canine layoutlm
    bloom falcon gemma2 gpt2 gpt_neo llama llama/eager llama/float32 mistral opt phi qwen2 qwen3 xlnet
    deepseek_v2 deepseek_v3 gpt_oss jetmoe llama4_text mixtral mixtral/batched mixtral/grouped nllb-moe olmoe
    qwen2_moe qwen3_moe switch_transformers
    bamba jamba mamba mamba2 recurrent_gemma rwkv xlstm qwen3_next
    bart encoder-decoder longt5 m2m_100 t5
    beit clip convnext cvt deformable_detr detr idefics3_vision mobilenet_v2 regnet resnet swin vit vivit
    encodec hubert moonshine parakeet_encoder univnet wav2vec2 whisper
"""
