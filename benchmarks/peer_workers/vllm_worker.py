"""vLLM's CPU build: its engine in this process, all else as it comes (torch.compile), no prefix cache."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peer_workers.session import Setup, serve_standard_streams


class Vllm:
    """A checkpoint in vLLM's offline engine."""

    def __init__(self, setup: Setup) -> None:
        cores = sorted(os.sched_getaffinity(0))[: setup.num_threads]
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CACHE_ROOT": str(Path(setup.folder) / "vllm"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM

        self._llm = LLM(
            setup.model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=setup.max_context,
            max_num_seqs=setup.max_batch,
        )

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Continue all prompts at once."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        results = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]


def _packages() -> tuple[str, ...]:
    """The distribution that holds `vllm` goes by several names."""
    return (*importlib.metadata.packages_distributions()["vllm"], "torch")


if __name__ == "__main__":
    serve_standard_streams(Vllm, _packages())
