"""Architectures of transformers with random weights, a layer or two each, and inputs by name.

An encoder-decoder is two programs: the encoder, and the decoder, which is given what the encoder yields. The weights
are those of a net that keeps the size of what goes through it, so that every layer counts in the output.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from extras import transformers_module
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH = 96, 12, 32
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """How a model is built and what it is given.

    Attributes:
        model: name of the class.
        config: name of the config's class.
        options: of the config.
        inputs: makes one batch.
        part: picks the program out of the whole model.
        output: which output counts; None for the first.
    """

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[], Inputs]
    part: Callable[[nn.Module], nn.Module] = field(default=lambda model: model)
    output: str | None = None


def tokens() -> Inputs:
    return {"input_ids": torch.randint(3, VOCABULARY, (2, LENGTH)), "attention_mask": torch.ones(2, LENGTH).long()}


def padded() -> Inputs:
    """Two texts, the second one shorter."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 2 * LENGTH // 3 :] = 0
    return tokens() | {"attention_mask": mask}


def decoded() -> Inputs:
    given = {f"decoder_{name}": value for name, value in tokens().items()}
    return given | {"encoder_outputs": torch.randn(2, LENGTH, WIDTH)}


def image(size: int = 32) -> Callable[[], Inputs]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


class Decoder(nn.Module):
    """The decoder of an encoder-decoder, with its head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, decoder_input_ids: Tensor, decoder_attention_mask: Tensor, encoder_outputs: Tensor) -> Tensor:
        return self.model(
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=(encoder_outputs,),
            use_cache=False,
        ).logits


def encoder(model: Any) -> nn.Module:
    return model.get_encoder()


LAYERS = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {**LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
DECODER = {**TEXT, "use_cache": False}
GROUPED = {**DECODER, "num_key_value_heads": 1, "head_dim": 16}
TWO = {"d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": VOCABULARY}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
T5 = {"d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
BART = {**TWO, **HEADS, **SPECIAL, "forced_eos_token_id": None}
WHISPER = {**TWO, **HEADS, **SPECIAL, "num_mel_bins": 16, "max_source_positions": LENGTH, "max_target_positions": 32}
PATCHES = {**LAYERS, "image_size": 32, "patch_size": 8}


def _text(family: str, config: dict[str, Any] = TEXT, kind: str = "Model", inputs: Any = padded) -> Architecture:
    return Architecture(f"{family}{kind}", f"{family}Config", config, inputs)


def _causal(family: str, config: dict[str, Any] = GROUPED) -> Architecture:
    return _text(family, config, "ForCausalLM", tokens)


ARCHITECTURES: dict[str, Architecture] = {
    "BERT": _text("Bert", kind="ForSequenceClassification"),
    "DistilBERT": _text(
        "DistilBert", {"dim": WIDTH, "n_layers": 1, "n_heads": 2, "hidden_dim": 64, "vocab_size": VOCABULARY}
    ),
    "ALBERT": _text("Albert", {**TEXT, "embedding_size": 16}),
    "MPNet": _text("MPNet"),
    "ModernBERT": _text(
        "ModernBert", {**TEXT, **SPECIAL, "cls_token_id": 1, "sep_token_id": 2, "decoder_start_token_id": None}
    ),
    "DeBERTa v2": _text("DebertaV2", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "GPT-2": _text(
        "GPT2",
        {"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY, "use_cache": False},
        "LMHeadModel",
        tokens,
    ),
    "GPT-NeoX": _causal("GPTNeoX", DECODER),
    "OPT": _causal("OPT", {**DECODER, "ffn_dim": 64, "word_embed_proj_dim": WIDTH}),
    "BLOOM": _causal(
        "Bloom", {"hidden_size": WIDTH, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "use_cache": False}
    ),
    "Llama": _causal("Llama"),
    "Mistral": _causal("Mistral", {**GROUPED, "sliding_window": 8}),
    "Qwen2": _causal("Qwen2"),
    "Qwen3": _causal("Qwen3"),
    "Gemma 2": _causal("Gemma2", {**GROUPED, "sliding_window": 8}),
    "Phi": _causal("Phi", {**DECODER, "num_key_value_heads": 2}),
    "Falcon": _causal(
        "Falcon",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": VOCABULARY,
            "use_cache": False,
        },
    ),
    "Mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": WIDTH, "num_hidden_layers": 1, "state_size": 4, "vocab_size": VOCABULARY, "use_cache": False},
        lambda: {"input_ids": tokens()["input_ids"][:, :6]},
    ),
    "XLNet": Architecture(
        "XLNetModel",
        "XLNetConfig",
        {"d_model": WIDTH, "n_layer": 1, "n_head": 2, "d_inner": 64, "vocab_size": 96},
        padded,
    ),
    "T5, encoder": Architecture("T5ForConditionalGeneration", "T5Config", {**T5, **SPECIAL}, padded, encoder),
    "T5, decoder": Architecture("T5ForConditionalGeneration", "T5Config", {**T5, **SPECIAL}, decoded, Decoder),
    "BART, encoder": Architecture("BartForConditionalGeneration", "BartConfig", BART, padded, encoder),
    "BART, decoder": Architecture("BartForConditionalGeneration", "BartConfig", BART, decoded, Decoder),
    "Whisper, encoder": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WHISPER,
        lambda: {"input_features": torch.randn(2, 16, 2 * LENGTH)},
        encoder,
    ),
    "Whisper, decoder": Architecture("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, decoded, Decoder),
    "ViT": Architecture("ViTForImageClassification", "ViTConfig", PATCHES, image()),
    "DINOv2": Architecture("Dinov2Model", "Dinov2Config", {**PATCHES, "mlp_ratio": 2}, image()),
    "Swin": Architecture(
        "SwinModel",
        "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4},
        image(),
    ),
    "ConvNeXt": Architecture(
        "ConvNextModel", "ConvNextConfig", {"depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2}, image()
    ),
    "SegFormer": Architecture(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "depths": [1] * 4,
            "hidden_sizes": [16, 16, 32, 32],
            "num_attention_heads": [1, 2, 2, 2],
            "decoder_hidden_size": 32,
        },
        image(64),
    ),
    "ResNet": Architecture(
        "ResNetModel", "ResNetConfig", {"depths": [1, 1], "hidden_sizes": [32, 64], "embedding_size": 16}, image(64)
    ),
    "BiT": Architecture(
        "BitModel",
        "BitConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_groups": 4},
        image(64),
    ),
    "SigLIP, images": Architecture("SiglipVisionModel", "SiglipVisionConfig", PATCHES, image()),
    "CLIP, images": Architecture(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", {**PATCHES, "projection_dim": 16}, image()
    ),
    "CLIP, texts": Architecture(
        "CLIPTextModelWithProjection", "CLIPTextConfig", {**TEXT, **SPECIAL, "projection_dim": 16}, padded
    ),
    "Wav2Vec2": Architecture(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {
            **LAYERS,
            "conv_dim": (16, 16),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        },
        lambda: {"input_values": torch.randn(2, 400)},
    ),
}


def build(name: str) -> tuple[nn.Module, Callable[[], Inputs]]:
    """Returns a model with random weights and what makes a batch for it."""
    found = ARCHITECTURES[name]
    transformers = transformers_module()
    torch.manual_seed(0)
    config = getattr(transformers, found.config)(**found.options)
    whole = getattr(transformers, found.model)(config).eval()
    for parameter in whole.parameters():
        if parameter.dim() > 1 and not torch.nn.parameter.is_lazy(parameter):
            nn.init.xavier_normal_(parameter.data.flatten(1) if parameter.dim() > 2 else parameter.data)
    return found.part(whole).eval(), found.inputs
