"""Small models with random weights of realistic size, one per architecture, with odd sizes on
purpose.

Head sizes 64, 80 and 128; vocabularies that sixteen doesn't divide; tied and untied heads; biases;
sliding windows and soft caps where the architecture has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHARED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.03,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# name -> (transformers' config class, its model class, sizes)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {
        "vocab_size": 515, "hidden_size": 192, "intermediate_size": 328, "num_attention_heads": 3,
        "num_key_value_heads": 1, "tie_word_embeddings": True,
    }),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {
        "vocab_size": 517, "hidden_size": 160, "intermediate_size": 211, "num_attention_heads": 2,
        "num_key_value_heads": 1, "tie_word_embeddings": False,
    }),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {
        "vocab_size": 389, "hidden_size": 96, "intermediate_size": 203, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True,
    }),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {
        "vocab_size": 333, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "num_experts": 7, "num_experts_per_tok": 3,
        "moe_intermediate_size": 72, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False,
    }),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {
        "vocab_size": 401, "hidden_size": 128, "intermediate_size": 250, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "sliding_window": 32, "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    }),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {
        "vocab_size": 403, "hidden_size": 128, "intermediate_size": 250, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 80, "sliding_window": 48, "query_pre_attn_scalar": 80,
    }),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": 509, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 1024,
    }),
    "opt": ("OPTConfig", "OPTForCausalLM", {
        "vocab_size": 507, "hidden_size": 128, "ffn_dim": 250, "num_attention_heads": 2,
        "word_embed_proj_dim": 128, "dropout": 0.0,
    }),
}  # fmt: skip


def make(folder: Path, name: str, seed: int = 3) -> Path:
    """Write the model's folder unless it is there. Norm weights scatter about one, others have std
    0.04.
    """
    path = folder / name
    if (path / "config.json").exists():
        return path
    import torch
    import transformers

    config_name, model_name, sizes = MODELS[name]
    config = getattr(transformers, config_name)(**{**SHARED, **sizes})
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if "norm" in parameter_name or "ln_" in parameter_name:
                centre = 0.0 if name.startswith("gemma") or parameter_name.endswith("bias") else 1.0
                weight.copy_(centre + 0.1 * torch.randn_like(weight))
            else:
                wide = (
                    "embed_tokens" in parameter_name
                    or "lm_head" in parameter_name
                    or "wte" in parameter_name
                )
                weight.copy_((0.12 if wide else 0.04) * torch.randn_like(weight))
    model.save_pretrained(path)
    return path
