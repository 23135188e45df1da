"""Lists the zoo's transformers architectures: the task of each, and a small random configuration.

Two layers, a width of 32 and texts of 16 tokens, so that a step takes a second. What a configuration sets
beside sizes is there because the architecture draws from NumPy's generator otherwise (layer drop and
SpecAugment of the speech models), which no captured step can repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOKENS = 16
VOCABULARY = 96
LABELS = 4

Config = Mapping[str, Any]

_ENCODER: Config = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "num_labels": LABELS, "pad_token_id": 0,
}  # fmt: skip
_DECODER: Config = {
    **_ENCODER, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_GPT: Config = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64, "vocab_size": VOCABULARY,
    "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_T5: Config = {
    "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "vocab_size": VOCABULARY, "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip
_BART: Config = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "use_cache": False, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
_VIT: Config = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8, "num_labels": LABELS,
}  # fmt: skip
_SWIN: Config = {
    "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
    "window_size": 4, "num_labels": LABELS,
}  # fmt: skip
_STAGES: Config = {"hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": LABELS}
_SPEECH: Config = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "conv_dim": (32, 32, 32), "conv_stride": (5, 4, 2), "conv_kernel": (10, 4, 2),
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0, "mask_time_prob": 0.0, "apply_spec_augment": False, "num_labels": LABELS,
    "classifier_proj_size": 16, "vocab_size": VOCABULARY,
}  # fmt: skip
_TWO: Config = {
    "projection_dim": 16,
    "text_config": {**_ENCODER, "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": {**_VIT, "projection_dim": 16},
}


def _state_space(**config: Any) -> Config:
    return {
        "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": VOCABULARY,
        "use_cache": False, **config,
    }  # fmt: skip


ARCHITECTURES: dict[str, tuple[str, Config]] = {
    # Encoders of text
    "bert": ("classify", _ENCODER),
    "roberta": ("classify", _ENCODER),
    "xlm-roberta": ("classify", _ENCODER),
    "camembert": ("fill", _ENCODER),
    "distilbert": (
        "classify",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": VOCABULARY,
         "num_labels": LABELS},
    ),
    "albert": ("classify", {**_ENCODER, "embedding_size": 16}),
    "electra": ("classify", {**_ENCODER, "embedding_size": 16}),
    "deberta": ("classify", {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta-v2": ("classify", {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "layoutlm": ("classify", _ENCODER),
    "mpnet": ("classify", _ENCODER),
    "megatron-bert": ("classify", _ENCODER),
    "mobilebert": ("classify", {**_ENCODER, "embedding_size": 32, "intra_bottleneck_size": 32}),
    "squeezebert": ("classify", {**_ENCODER, "embedding_size": 32}),
    "convbert": ("classify", {**_ENCODER, "embedding_size": 32}),
    "funnel": (
        "classify",
        {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8,
         "d_inner": 64, "num_decoder_layers": 1, "num_labels": LABELS},
    ),
    "longformer": ("classify", {**_ENCODER, "attention_window": 8}),
    "big_bird": ("classify", {**_ENCODER, "attention_type": "original_full"}),
    "nystromformer": ("classify", {**_ENCODER, "num_landmarks": 4, "segment_means_seq_len": TOKENS}),
    "roformer": ("classify", {**_ENCODER, "embedding_size": 32}),
    "rembert": ("classify", {**_ENCODER, "input_embedding_size": 16, "output_embedding_size": 16}),
    "ernie": ("classify", _ENCODER),
    "modernbert": ("classify", {**_ENCODER, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1,
                                "eos_token_id": 2}),
    "fnet": ("classify", _ENCODER),
    "ibert": ("classify", _ENCODER),
    "data2vec-text": ("classify", _ENCODER),
    "xlnet": (
        "classify",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64,
         "num_labels": LABELS},
    ),
    "xlm": ("classify", {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4,
                         "max_position_embeddings": 64, "num_labels": LABELS, "n_words": VOCABULARY,
                         "pad_index": 0}),
    "canine": ("classify", {**_ENCODER, "max_position_embeddings": 64, "num_hash_buckets": 64,
                            "local_transformer_stride": 8, "downsampling_rate": 2}),
    "reformer": (
        "fill",
        {"hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16, "feed_forward_size": 64,
         "vocab_size": VOCABULARY, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4,
         "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "max_position_embeddings": 16,
         "is_decoder": False, "local_num_chunks_after": 1},
    ),
    # Decoders of text
    "gpt2": ("generate", _GPT),
    "gpt_neo": (
        "generate",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "use_cache": False},
    ),
    "gpt_neox": ("generate", _DECODER),
    "gptj": ("generate", {**_GPT, "rotary_dim": 4}),
    "gpt_bigcode": ("generate", _GPT),
    "openai-gpt": ("generate", _GPT),
    "opt": ("generate", {**_DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": ("generate", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY,
                           "use_cache": False}),
    "falcon": ("generate", {key: value for key, value in _DECODER.items() if key != "head_dim"}),
    "llama": ("generate", _DECODER),
    "mistral": ("generate", {**_DECODER, "sliding_window": 8}),
    "mixtral": ("generate", {**_DECODER, **_EXPERTS}),
    "qwen2": ("generate", _DECODER),
    "qwen3": ("generate", _DECODER),
    "qwen2_moe": ("generate", {**_DECODER, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "gemma": ("generate", _DECODER),
    "gemma2": ("generate", {**_DECODER, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("generate", {**_DECODER, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "phi": ("generate", _DECODER),
    "phi3": ("generate", _DECODER),
    "stablelm": ("generate", _DECODER),
    "olmo2": ("generate", _DECODER),
    "starcoder2": ("generate", _DECODER),
    "granite": ("generate", _DECODER),
    "cohere": ("generate", _DECODER),
    "codegen": ("generate", {**_GPT, "rotary_dim": 4}),
    "mpt": ("generate", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
                         "vocab_size": VOCABULARY, "use_cache": False}),
    "biogpt": ("generate", {**_DECODER, "layerdrop": 0.0}),
    "xglm": (
        "generate",
        {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64,
         "max_position_embeddings": 64, "layerdrop": 0.0, "use_cache": False},
    ),
    "mamba": ("generate", _state_space()),
    "mamba2": ("generate", _state_space(num_heads=8, head_dim=8, n_groups=1, chunk_size=8)),
    "falcon_mamba": ("generate", _state_space()),
    "rwkv": ("generate", {"vocab_size": VOCABULARY, "hidden_size": 32, "attention_hidden_size": 32,
                          "num_hidden_layers": 2, "context_length": 64, "use_cache": False}),
    "recurrent_gemma": ("generate", {**_DECODER, "num_hidden_layers": 3, "lru_width": 32,
                                     "attention_window_size": 8}),
    # From text to text
    "t5": ("translate", _T5),
    "mt5": ("translate", _T5),
    "switch_transformers": ("translate", {**_T5, "num_experts": 2}),
    "bart": ("translate", _BART),
    "mbart": ("translate", _BART),
    "pegasus": ("translate", _BART),
    "marian": ("translate", _BART),
    "m2m_100": ("translate", _BART),
    "blenderbot": ("translate", _BART),
    "led": ("translate", {**_BART, "attention_window": 8, "max_encoder_position_embeddings": 64,
                          "max_decoder_position_embeddings": 64}),
    "prophetnet": (
        "translate",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
         "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4,
         "num_decoder_attention_heads": 4, "max_position_embeddings": 64, "use_cache": False},
    ),
    # Images and videos
    "vit": ("see", _VIT),
    "deit": ("see", {**_VIT, "architectures": ["DeiTForImageClassification"]}),
    "beit": ("see", _VIT),
    "dinov2": ("see", _VIT),
    "vit_msn": ("see", _VIT),
    "swin": ("see", _SWIN),
    "swinv2": ("see", _SWIN),
    "convnext": ("see", {**_STAGES, "num_stages": 2, "image_size": 64}),
    "convnextv2": ("see", {**_STAGES, "num_stages": 2, "image_size": 64}),
    "resnet": ("see", {**_STAGES, "embedding_size": 16}),
    "regnet": ("see", {**_STAGES, "embedding_size": 16, "groups_width": 8}),
    "efficientnet": ("see", {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.3,
                             "hidden_dim": 320, "num_labels": LABELS}),
    "mobilenet_v1": ("see", {"image_size": 64, "depth_multiplier": 0.25, "num_labels": LABELS}),
    "mobilenet_v2": ("see", {"image_size": 64, "depth_multiplier": 0.25, "num_labels": LABELS}),
    "poolformer": (
        "see",
        {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "num_labels": LABELS},
    ),
    "pvt": ("see", {"image_size": 64, "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1],
                    "num_attention_heads": [1, 2, 2, 2], "num_labels": LABELS}),
    "segformer": (
        "segment",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 2, 4],
         "decoder_hidden_size": 32, "num_labels": LABELS},
    ),
    "detr": (
        "detect",
        {"backbone_config": {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 32, 32],
                             "depths": [1, 1, 1, 1], "out_features": ["stage4"]},
         "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 5,
         "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False,
         "num_labels": LABELS},
    ),
    "yolos": ("detect", {**_VIT, "image_size": [32, 32], "num_detection_tokens": 5}),
    "videomae": ("watch", {**_VIT, "num_frames": 4}),
    "timesformer": ("watch", {**_VIT, "num_frames": 2}),
    # Sound
    "wav2vec2": ("hear", _SPEECH),
    "hubert": ("hear", _SPEECH),
    "wavlm": ("hear", _SPEECH),
    "unispeech": ("hear", _SPEECH),
    "audio-spectrogram-transformer": (
        "hear-spectrum",
        {**_VIT, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
    ),
    "whisper": ("transcribe", {**_BART, "num_mel_bins": 16, "max_source_positions": 32,
                               "max_target_positions": 32, "suppress_tokens": None,
                               "begin_suppress_tokens": None}),
    # Text and images
    "clip": ("match", _TWO),
    "siglip": ("match", _TWO),
}  # fmt: skip
"""For each architecture its task and a small configuration."""
