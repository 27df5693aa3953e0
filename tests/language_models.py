"""Tiny language models with random weights, and the files that they come in."""

from typing import Any

import torch
from extras import transformers_module

VOCABULARY = 200
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "GPTNeoX": {"rotary_pct": 0.5},
    "Gemma": {"num_key_value_heads": 1, "head_dim": 16},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 24},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 1024},
    "Bloom": {},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "window_size": 24},
    "BioGpt": {},
    "Falcon": {"alibi": True, "multi_query": False, "bias": True},
    "Mpt": {"max_seq_len": 640},
    "Qwen2Moe": {
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "DeepseekV2": {
        **dict.fromkeys(("kv_lora_rank", "moe_intermediate_size"), 32),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
        **dict.fromkeys(("n_shared_experts", "first_k_dense_replace"), 1),
        "q_lora_rank": None,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "DeepseekV3": {
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 32),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
        **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def causal(family="Llama", **changes):
    """Returns a causal model of a family, in eval mode."""
    transformers = transformers_module()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **FAMILIES[family], **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def texts(length, count=1):
    """Returns ids [1, length]."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (1, length), generator=generator) for _ in range(count)]


def words():
    """Returns the tokens of the tiny tokenizer: special ones, letters, and what merges make of them."""
    letters = [chr(code) for code in range(97, 123)]
    tokens = ["<unk>", "<s>", "</s>", "Ġ", *letters]
    merges = []
    for one in ("Ġ", *letters):
        for other in letters[:7]:
            if len(tokens) < VOCABULARY:
                merges.append((one, other))
                tokens.append(one + other)
    return tokens, merges


def tokenizer():
    """Returns a tokenizer of transformers that writes words of small letters and spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = words()
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = transformers_module().PreTrainedTokenizerFast
    return fast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write_folder(folder, model, with_tokenizer=True):
    """Writes a Hugging Face folder and returns it."""
    model.save_pretrained(folder)
    if with_tokenizer:
        tokenizer().save_pretrained(folder)
    return folder


def write_gguf(path, model):
    """Writes a Llama as a GGUF file and returns its path."""
    config, state = model.config, model.state_dict()
    writer = _described(path, "llama", config)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for name, tensor in _gguf_names(config.num_hidden_layers).items():
        weight = state[tensor]
        kind = tensor.rpartition("self_attn.")[2][:1]
        if kind in heads and "_proj" in tensor and "self_attn" in tensor:  # llama.cpp's order of rotated channels
            weight = weight.view(heads[kind], 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(name, weight.contiguous().numpy())
    return _written(writer, path)


def write_mixture(path, model):
    """Writes a Qwen2-MoE as a GGUF file, which has the experts' first layers apart, and returns its path."""
    import gguf

    config = model.config
    writer = _described(path, "qwen2moe", config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2MOE, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        layer, (base, _, kind) = "".join(name.split(".")[2:3]), name.rpartition(".")
        if name.endswith("experts.gate_up_proj"):
            for part, rows in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", rows.contiguous().numpy())
        elif name.endswith("experts.down_proj"):
            writer.add_tensor(f"blk.{layer}.ffn_down_exps.weight", weight.numpy())
        else:
            whole = weight[0] if "shared_expert_gate" in name else weight
            writer.add_tensor(f"{names.get_name(base)}.{kind}", whole.numpy())
    return _written(writer, path)


def _described(path, architecture, config):
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens, merges = words()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return writer


def _written(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_names(layers):
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(layers):
        names |= {f"blk.{layer}.{name}": f"model.layers.{layer}.{part}" for name, part in parts.items()}
    return {f"{name}.weight": f"{part}.weight" for name, part in names.items()}
