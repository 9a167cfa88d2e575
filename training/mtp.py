"""One multi-token-prediction module in DeepSeek-V3's form (its report, section 2.2), over a Llama target.

It predicts token i+2 from the target's hidden state at position i and token i+1:
``block(eh_proj([enorm(embed(token i+1)) ; hnorm(hidden i)]))``, then its own norm and the shared LM head.
As in the published implementations the embedding half comes first and ``hidden`` is the target's output
after its final norm.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm


class MultiTokenPrediction(nn.Module):
    """The module's own weights; embedding and LM head belong to the target."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = LlamaRMSNorm(size, eps)
        self.hnorm = LlamaRMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = LlamaDecoderLayer(config, layer_idx=config.num_hidden_layers)
        self.norm = LlamaRMSNorm(size, eps)

    def combine(self, hidden: torch.Tensor, next_embeddings: torch.Tensor) -> torch.Tensor:
        """Final-norm hidden states and embeddings of the next tokens -> block input, all [B, T, H]."""
        return self.eh_proj(torch.cat([self.enorm(next_embeddings), self.hnorm(hidden)], dim=-1))

    def forward(
        self, hidden: torch.Tensor, next_embeddings: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """-> [B, T, H], normed, ready for the LM head: row i predicts token i+2."""
        return self.norm(self.block(self.combine(hidden, next_embeddings), position_embeddings=rotary))


def published_tensors(
    mtp: MultiTokenPrediction, embedding: torch.Tensor, layer: int
) -> dict[str, torch.Tensor]:
    """The module under DeepSeek-V3's names; ``embedding`` [V, H] serves as embedding and as (tied) head."""
    prefix = f"model.layers.{layer}."
    tensors = {
        prefix + "enorm.weight": mtp.enorm.weight,
        prefix + "hnorm.weight": mtp.hnorm.weight,
        prefix + "eh_proj.weight": mtp.eh_proj.weight,
        prefix + "shared_head.norm.weight": mtp.norm.weight,
        prefix + "shared_head.head.weight": embedding,
        prefix + "embed_tokens.weight": embedding.clone(),
    }
    tensors |= {prefix + name: tensor for name, tensor in mtp.block.state_dict().items()}
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def load_published_tensors(
    config: LlamaConfig, tensors: dict[str, torch.Tensor], layer: int
) -> MultiTokenPrediction:
    """Rebuild the module from the published names (embedding and head are the target's, so not read)."""
    mtp = MultiTokenPrediction(config)
    renames = {"shared_head.norm.weight": "norm.weight"}
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(f"model.layers.{layer}.")
        if short in ("shared_head.head.weight", "embed_tokens.weight"):
            continue
        is_direct = short.split(".")[0] in ("enorm", "hnorm", "eh_proj") or short in renames
        own[renames.get(short, short) if is_direct else f"block.{short}"] = tensor.float()
    mtp.load_state_dict(own)
    return mtp
