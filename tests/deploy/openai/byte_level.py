"""A tiny model that writes bytes, behind a door on loopback, and the official client before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

from deploy.openai.app import create_app
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from tests.deploy.openai.live import live_server
from tests.specdec.engine.grammar_models import save_byte_level_model


@contextmanager
def byte_level_door(folder: Path) -> Iterator[str]:
    """Yield its URL. The model drafts for itself, so that what it is sure of is accepted."""
    save_byte_level_model(folder)
    off = CompileConfig(mode="off")
    config = EngineConfig(
        target=ModelConfig(model=str(folder), dtype="float32", device="cpu", compile=off, num_threads=1),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=str(folder),
            num_speculative_tokens=4,
            controller="fixed",
            compile=off,
            num_threads=1,
        ),
        cache=CacheConfig(block_size=8, num_blocks=400),
    )
    service = AsyncEngine(Engine(config))
    app = create_app(service, DoorSettings(served_model_name="bytes"), HuggingFaceTokenizer.load(folder))
    try:
        with live_server(app) as url:
            yield url
    finally:
        service.close()


@contextmanager
def byte_level_client(folder: Path) -> Iterator[openai.OpenAI]:
    """Yield the official client of it."""
    with (
        byte_level_door(folder) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client
