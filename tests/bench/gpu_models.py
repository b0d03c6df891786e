"""Random-weight models of real shapes without files: the configuration on disk, the weights from
each parameter's name.

The same name and shape give the same bits in every engine of one device type, whatever loads them
and in whatever order. Deviation 0.02, 0.04 for queries and keys, so that logits are near-ties and a
difference shows.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

VOCAB = 151936
SHAPES: dict[str, dict[str, Any]] = {
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False},
    "30b-a3b-16": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16,
                   "num_attention_heads": 32, "num_key_value_heads": 4,
                   "tie_word_embeddings": False, "moe_intermediate_size": 768, "num_experts": 128,
                   "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
                   "mlp_only_layers": []},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
             "vocab_size": 4096, "tie_word_embeddings": True},
}  # fmt: skip


def configuration(name: str, folder: Path) -> Path:
    """Write config.json of a shape into folder/name; returns that."""
    shape = SHAPES[name]
    moe = "num_experts" in shape
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if moe else "qwen3", "vocab_size": VOCAB, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "torch_dtype": "bfloat16", "use_cache": True, **shape,
    }  # fmt: skip
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def fill(name: str, weight: Any, queries_and_keys: int) -> None:
    """One parameter in place: ones for norms, zeros for biases, else normal."""
    import torch

    data = weight.data
    if "norm" in name:
        data.fill_(1.0)
    elif name.endswith("bias"):
        data.zero_()
    else:
        source = torch.Generator(device=data.device).manual_seed(zlib.crc32(name.encode()))
        data.normal_(0.0, 0.02, generator=source)
        if "qkv_proj" in name:
            data[:queries_and_keys] *= 2


def install() -> None:
    """vLLM's load_format "dummy" fills by name from now on, in this process."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(_: Any, model: Any, model_config: Any) -> None:
        c = model_config.hf_config
        rows = (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        for name, weight in model.named_parameters():
            fill(name, weight, rows)

    DummyModelLoader.load_weights = load_weights
