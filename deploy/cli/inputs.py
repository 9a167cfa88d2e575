"""From command-line options to what the engine takes."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError
from pydantic_core import from_json

from deploy.config_file import load_config
from specdec.core.errors import ConfigError
from specdec.engine.config import EngineConfig
from specdec.model.config import Dtype, ModelConfig
from specdec.proposers.config import SpeculativeConfig

_DEMO_PROMPTS = (
    "def quicksort(",
    "import os\nimport sys\n\ndef main(",
    "class Node:\n    def __init__(self",
    "def read_file(path):\n",
    "    for key, value in ",
    "try:\n    import json\nexcept ImportError:\n",
    "def test_",
    "# Return the length of the longest",
)


def engine_config(
    config: Path | None,
    model: Path | None,
    draft: Path | None,
    dtype: Dtype | None,
    num_speculative_tokens: int | None,
    default_config: Path,
) -> EngineConfig:
    """Return the engine that the options ask for.

    Raises:
        ConfigError: the options contradict each other, or the file is wrong.
    """
    if model is None:
        if draft is not None:
            raise ConfigError("--draft needs --model; or name both in a configuration file and give --config")
        if config is None and not default_config.exists():
            raise ConfigError(f"there is no {default_config} here; give --config FILE or --model FOLDER")
        engine = load_config(config or default_config).engine()
    elif config is not None:
        raise ConfigError("give either --config or --model, not both")
    else:
        engine = EngineConfig(target=ModelConfig(model=str(model)), speculative_config=_drafter(draft))
    return _overridden(engine, dtype, num_speculative_tokens)


def takes_sampling_defaults(config: Path | None, model: Path | None, default_config: Path) -> bool:
    """Whether what is not said of sampling is as the checkpoint has it: `http.generation_config` of the file.

    Options that `engine_config` has taken.
    """
    return model is not None or load_config(config or default_config).http.generation_config == "auto"


def _drafter(draft: Path | None) -> SpeculativeConfig:
    if draft is None:
        return SpeculativeConfig()
    return SpeculativeConfig(method="draft_model", model=str(draft))


def _overridden(
    engine: EngineConfig, dtype: Dtype | None, num_speculative_tokens: int | None
) -> EngineConfig:
    target, speculative = engine.target, engine.speculative_config
    if dtype is not None:
        target = target.model_copy(update={"dtype": dtype})
    if num_speculative_tokens == 0:
        speculative = SpeculativeConfig(method="none")
    elif num_speculative_tokens is not None:
        if speculative.method == "none":
            raise ConfigError("-k needs a drafter, but the configuration says method: none")
        speculative = _with_draft_tokens(speculative, num_speculative_tokens)
    return engine.model_copy(update={"target": target, "speculative_config": speculative})


def _with_draft_tokens(speculative: SpeculativeConfig, num_speculative_tokens: int) -> SpeculativeConfig:
    """Return the configuration with another k, checked as a file's is: other keys have to go with it."""
    values = {**speculative.model_dump(), "num_speculative_tokens": num_speculative_tokens}
    try:
        return SpeculativeConfig.model_validate(values)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"-k {num_speculative_tokens}: {reason}") from None


def read_prompts(file: Path | None) -> list[str]:
    """Return the prompts of a file, or a few built-in beginnings of Python code.

    Raises:
        ConfigError: the file cannot be read, or holds no prompt.
    """
    if file is None:
        return list(_DEMO_PROMPTS)
    try:
        # Editors of Windows begin files with a mark. Unicode has lines end at more than line feeds, and JSON
        # may hold those characters (U+2028) as they are.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--prompts: {file} cannot be read as text: {reason}") from None
    if file.suffix == ".json":
        raise ConfigError(
            f"--prompts: {file}: prompts are lines of text, or of JSON where the file's name ends in .jsonl"
        )
    if file.suffix == ".jsonl":
        prompts = [_prompt_of(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    else:
        prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts: {file} holds no prompt")
    return prompts


def _prompt_of(file: Path, number: int, line: str) -> str:
    try:
        prompt = from_json(line)["prompt"]
    except ValueError as error:  # for half of a surrogate pair, too, which could not be sent
        raise ConfigError(f"--prompts: {file}:{number}: is not JSON: {error}") from None
    except (KeyError, TypeError):
        raise ConfigError(f'--prompts: {file}:{number}: not a JSON object with a "prompt"') from None
    if not isinstance(prompt, str):
        raise ConfigError(f'--prompts: {file}:{number}: "prompt" must be a string')
    return prompt
