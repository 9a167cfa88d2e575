"""OpenVINO GenAI: the continuous batching pipeline, bf16 weights, products and K/V, no prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from optimum.exporters.openvino import main_export

from benchmarks.peer_workers.session import Setup, serve_standard_streams

_CACHE_GB = 1


class OpenVino:
    """A checkpoint exported to OpenVINO's form and compiled."""

    def __init__(self, setup: Setup) -> None:
        folder = Path(setup.folder) / "openvino"
        main_export(
            setup.model,
            folder,
            task="text-generation-with-past",
            library_name="transformers",
            local_files_only=True,
            convert_tokenizer=False,
        )
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_seqs = setup.max_batch
        scheduler.max_num_batched_tokens = setup.max_prompt_tokens
        properties = {
            "INFERENCE_NUM_THREADS": setup.num_threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Continue all prompts at once."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        input_ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(input_ids, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]


if __name__ == "__main__":
    serve_standard_streams(OpenVino, ("openvino-genai", "openvino", "optimum-intel"))
