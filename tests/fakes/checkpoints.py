"""Small checkpoints, written to disk as real ones are: seeded tiny models of each family, and the counter.

Every folder has a byte-level tokenizer whose token ids are the bytes, so any text and any split can be made. The
tensor names are spelled out here once more, on purpose: the project's own table is what they test.
"""

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

NUM_BYTES = 256
END_OF_TEXT = 256
IM_START = 257
IM_END = 258
PAD = 259
BYTE_VOCAB_SIZE = 260
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
# What a family has beside the keys of all; experts are 40 columns wide, and 5 of them.
_OF_FAMILY: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "intermediate_size": 40, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "moe_intermediate_size": 40,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
# 6 query heads over 2 KV heads, and a vocabulary that no number of ranks divides.
_TINY: Mapping[str, Any] = {
    "vocab_size": 1003,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
}
# GPT-2 has words of its own.
_TINY_GPT2: Mapping[str, Any] = {
    "vocab_size": 1003,
    "n_embd": 96,
    "n_layer": 2,
    "n_head": 6,
    "n_inner": None,
    "n_positions": 512,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
}


def write_tiny_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A seeded two-layer Llama. `overrides` replace keys of config.json; a value of `...` leaves the key out."""
    return write_tiny_model(folder, "llama", seed=seed, **overrides)


def write_tiny_model(folder: Path, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """A seeded tiny checkpoint of `family` in Hugging Face layout: config, weights, tokenizer."""
    config = {
        **(_TINY_GPT2 if family == "gpt2" else _TINY),
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        **_OF_FAMILY.get(family, {}),
        **overrides,
    }
    config = {key: value for key, value in config.items() if value is not ...}
    write_folder(folder, config, tiny_weights(config, seed))
    return folder


def tiny_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Seeded weights large enough that every one of them shows in the logits."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[1] ** -0.5)

    if config["model_type"] == "gpt2":
        return _gpt2_weights(config, drawn)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    weights = {"model.embed_tokens.weight": drawn(vocab, hidden), "model.norm.weight": 1 + drawn(hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, tensor in _layer_weights(config, drawn).items():
            weights[f"model.layers.{layer}.{name}"] = tensor
    if not config.get("tie_word_embeddings", False):
        weights["lm_head.weight"] = drawn(vocab, hidden)
    return weights


def _layer_weights(config: Mapping[str, Any], drawn: Callable[..., Tensor]) -> dict[str, Tensor]:
    family, hidden = config["model_type"], config["hidden_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    weights = {
        "input_layernorm.weight": 1 + drawn(hidden),
        "self_attn.q_proj.weight": drawn(query, hidden) * 2,
        "self_attn.k_proj.weight": drawn(kv, hidden) * 2,
        "self_attn.v_proj.weight": drawn(kv, hidden),
        "self_attn.o_proj.weight": drawn(hidden, query),
        "post_attention_layernorm.weight": 1 + drawn(hidden),
        **_feed_forward_weights(config, drawn),
    }
    if family == "qwen2" or config.get("attention_bias", False):
        weights |= {
            f"self_attn.{name}_proj.bias": drawn(size) for name, size in zip("qkv", (query, kv, kv), strict=True)
        }
    if config.get("attention_bias", False):
        weights["self_attn.o_proj.bias"] = drawn(hidden)
    if config.get("mlp_bias", False):
        sizes = {"gate": config["intermediate_size"], "up": config["intermediate_size"], "down": hidden}
        weights |= {f"mlp.{name}_proj.bias": drawn(size) for name, size in sizes.items()}
    if family in ("qwen3", "qwen3_moe"):
        weights |= {f"self_attn.{name}_norm.weight": 1 + drawn(head_dim) for name in "qk"}
    return weights


def _feed_forward_weights(config: Mapping[str, Any], drawn: Callable[..., Tensor]) -> dict[str, Tensor]:
    hidden = config["hidden_size"]
    match config["model_type"]:
        case "mixtral":
            module, (gate, up, down) = "block_sparse_moe", ("w1", "w3", "w2")
            ffn, num_experts = config["intermediate_size"], config["num_local_experts"]
        case "qwen3_moe":
            module, (gate, up, down) = "mlp", ("gate_proj", "up_proj", "down_proj")
            ffn, num_experts = config["moe_intermediate_size"], config["num_experts"]
        case _:
            ffn = config["intermediate_size"]
            return {
                "mlp.gate_proj.weight": drawn(ffn, hidden),
                "mlp.up_proj.weight": drawn(ffn, hidden),
                "mlp.down_proj.weight": drawn(hidden, ffn),
            }
    weights = {f"{module}.gate.weight": drawn(num_experts, hidden) * 2}
    for expert in range(num_experts):
        for name, shape in {gate: (ffn, hidden), up: (ffn, hidden), down: (hidden, ffn)}.items():
            weights[f"{module}.experts.{expert}.{name}.weight"] = drawn(*shape)
    return weights


def _gpt2_weights(config: Mapping[str, Any], drawn: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Matrices lie the other way round, [in, out], and query, key and value are one."""
    hidden, vocab = config["n_embd"], config["vocab_size"]
    ffn = config["n_inner"] or 4 * hidden

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": 1 + drawn(hidden), f"{name}.bias": drawn(hidden)}

    def conv(name: str, inputs: int, outputs: int) -> dict[str, Tensor]:
        return {f"{name}.weight": drawn(outputs, inputs).t().contiguous(), f"{name}.bias": drawn(outputs)}

    weights = {"transformer.wte.weight": drawn(vocab, hidden), **norm("transformer.ln_f")}
    weights["transformer.wpe.weight"] = drawn(config["n_positions"], hidden)
    for layer in range(config["n_layer"]):
        name = f"transformer.h.{layer}"
        weights |= norm(f"{name}.ln_1") | norm(f"{name}.ln_2")
        weights |= conv(f"{name}.attn.c_attn", hidden, 3 * hidden) | conv(f"{name}.attn.c_proj", hidden, hidden)
        weights |= conv(f"{name}.mlp.c_fc", hidden, ffn) | conv(f"{name}.mlp.c_proj", ffn, hidden)
    if not config.get("tie_word_embeddings", True):
        weights["lm_head.weight"] = drawn(vocab, hidden)
    return weights


def write_counter_model(
    folder: Path, *, cycle: range = range(BYTE_VOCAB_SIZE), max_positions: int = 4096, **overrides: Any
) -> Path:
    """A Llama whose next token is the last one + 1, whatever came before: a token lost or repeated shows.

    Counting wraps within `cycle`, so `range(32, 127)` gives printable text for ever; tokens outside it count up
    until they are in it. With the default, counting up from 255 meets END_OF_TEXT and stops there. Greedy and
    sampling at temperature 1 give the same: the right token leads by 70.
    """
    hidden = 320  # one dimension a token: the embedding is one-hot
    config = {
        **_TINY,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": BYTE_VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": max_positions,
        **overrides,
    }
    silent = {name: torch.zeros_like(tensor) for name, tensor in tiny_weights(config, seed=0).items()}
    weights = {name: torch.ones_like(tensor) if "norm" in name else tensor for name, tensor in silent.items()}
    tokens = torch.arange(BYTE_VOCAB_SIZE)
    following = torch.tensor([_count(token, cycle) for token in range(BYTE_VOCAB_SIZE)])
    weights["model.embed_tokens.weight"][tokens, tokens] = 1.0
    weights["lm_head.weight"][following, tokens] = 4.0  # times sqrt(320), what the norm makes of a one
    write_folder(folder, config, weights)
    return folder


def _count(token: int, cycle: range) -> int:
    return cycle.start if token == cycle.stop - 1 else (token + 1) % BYTE_VOCAB_SIZE


def write_hollow_llama(folder: Path, *, vocab_size: int) -> Path:
    """A tiny Llama whose embedding and head may be as large as no disk: all weights are a hole in one file."""
    config = {**_TINY, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size}
    shapes = {
        name: list(tensor.shape) for name, tensor in tiny_weights(config | {"vocab_size": 1}, seed=0).items()
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[name][0] = vocab_size
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * torch.float32.itemsize
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def write_folder(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(folder)


def write_byte_tokenizer(folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`: token id = byte, then the special tokens. No BOS is added."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[3],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _byte_characters() -> list[str]:
    """The visible character that byte-level BPE writes for each byte: itself, or the next one above 255."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    characters, above = [], NUM_BYTES
    for byte in range(NUM_BYTES):
        characters.append(chr(byte if byte in visible else above))
        above += byte not in visible
    return characters
