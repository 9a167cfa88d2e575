"""Multi-token prediction in DeepSeek-V3's form (its report, section 2.2, equations 21-23).

    h' = block(eh_proj [enorm(e(x_{t+1})) ; hnorm(h_t)]), logits = head(norm(h'))

h_t is the target's state behind its final norm, and norm(h') stands for it at the next depth. SGLang does so
for modules of DeepSeek-V3 and GLM-4.5, vLLM for those of Qwen3-Next and MiMo; of the former two vLLM hands on
h' itself, so that its drafts of the second token and later ones may differ. Where there are fewer modules
than depths, the last one is used again.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.attention.base import LayerAttention
from specdec.drafters.attention import Attends
from specdec.drafters.base import FINAL_NORM, Borrowed, FeatureDrafter, FeatureStep, TargetParts
from specdec.drafters.blocks import BlockFamily, block_family, probe_layers, run_block


class MtpModule(nn.Module):
    """One module; embedding and head may be its own."""

    def __init__(self, family: BlockFamily, layer_idx: int) -> None:
        super().__init__()
        size = int(family.config.hidden_size)
        self.enorm = family.make_norm()
        self.hnorm = family.make_norm()
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = family.make_layer(layer_idx)
        self.norm = family.make_norm()

    def combine(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """[B, T, H] twice -> the block's input [B, T, H]."""
        joined = torch.cat([self.enorm(embedded), self.hnorm(features)], dim=-1)
        combined: torch.Tensor = self.eh_proj(joined)
        return combined


class Mtp(FeatureDrafter):
    """All modules of a checkpoint."""

    def __init__(
        self,
        target: TargetParts,
        config: PretrainedConfig | None = None,
        *,
        num_modules: int = 1,
        has_embeddings: bool = False,
        has_head: bool = False,
    ) -> None:
        """Make modules of decoder layers as `config`, the target's by default, describes them.

        `has_embeddings`, `has_head`: there are copies of the target's of its own (shared by all modules).
        """
        super().__init__(target)
        config = target.config if config is None else config
        self.config = config
        first = int(config.num_hidden_layers)
        family = block_family(config, first + num_modules)
        size = target.hidden_size
        self.first_layer = first
        self.mtp_modules = nn.ModuleList(MtpModule(family, first + index) for index in range(num_modules))
        self.embed_tokens = nn.Embedding(target.vocab_size, size) if has_embeddings else None
        self.head = nn.Linear(size, target.vocab_size, bias=False) if has_head else None
        self.rotary = family.rotary
        blocks = [module.block for module in self.mtp_modules]
        self._attention_layers = probe_layers(blocks, self.rotary, size, first)  # type: ignore[arg-type]

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (FINAL_NORM,)

    @property
    def attention_layers(self) -> tuple[LayerAttention, ...]:
        return self._attention_layers

    @property
    def num_modules(self) -> int:
        return len(self.mtp_modules)

    @property
    def borrowed(self) -> frozenset[Borrowed]:
        own: dict[Borrowed, nn.Module | None] = {"embeddings": self.embed_tokens, "head": self.head}
        return frozenset(name for name, module in own.items() if module is None)

    def step(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attention: Attends,
        depth: int = 0,
    ) -> FeatureStep:
        module = self.mtp_modules[min(depth, len(self.mtp_modules) - 1)]
        assert isinstance(module, MtpModule)
        hidden = module.combine(embedded.to(features.dtype), features)
        rotary = self.rotary(hidden, positions)
        hidden = run_block(module.block, hidden, position_embeddings=rotary, paged=attention)
        normed: torch.Tensor = module.norm(hidden)
        return FeatureStep(normed, normed)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        head = self.target.head if self.head is None else self.head
        return self.target.logit_scaling(head(outputs))
