"""Where `batch_invariant` cannot be kept it is refused by name, before weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
import transformers

from specdec.attention.native import NativeUnavailable, load_library
from specdec.core.errors import CheckpointError, ConfigError, ResourceError
from specdec.engine.config import EngineConfig
from specdec.model import loader
from specdec.model.acceleration import attention_of
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.invariance import choose
from specdec.model.invariance.native import NativeOperations
from specdec.model.loader import load_model
from tests.architectures import VOCAB_SIZE, make_tokenizer, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return path


@pytest.fixture
def _reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(loader, "_read_weights", read)


def config(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig.model_validate({"model": str(folder), "batch_invariant": True, **settings})


def require_kernels() -> None:
    try:
        NativeOperations()
    except NativeUnavailable as error:
        pytest.skip(f"no C++ kernels here: {error}")


def test_off_unless_asked_for(folder: Path) -> None:
    assert load_model(ModelConfig(model=str(folder))).invariant is None


@pytest.mark.usefixtures("_reads_nothing")
def test_a_dtype_without_kernels(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"float16 on a CPU: set dtype to bfloat16 or float32"):
        load_model(config(folder, dtype="float16"))


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    load_library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    yield
    load_library.cache_clear()


@pytest.mark.usefixtures("_reads_nothing", "_no_compiler")
def test_no_compiler(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ResourceError, match=r"batch_invariant needs the C\+\+ kernels.*install a C\+\+ compiler"
    ):
        load_model(config(folder, compile={"cache_dir": str(tmp_path)}))


@pytest.mark.usefixtures("_reads_nothing")
def test_no_triton(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("importlib.import_module", lambda _: missing("triton"))
    with pytest.raises(ResourceError, match=r"pip install -e '\.\[cuda\]'.*leave batch_invariant out"):
        choose.invariant_forward(config(folder), torch.device("cuda"), torch.bfloat16)


@pytest.mark.usefixtures("_reads_nothing")
def test_what_has_no_such_form_is_found_on_paper(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_kernels()
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(norm, "forward", lambda self, x: self.weight * x.cumsum(-1))
    with pytest.raises(CheckpointError, match=r"llama cannot be served with batch_invariant: aten.cumsum"):
        load_model(config(folder))


@pytest.mark.usefixtures("_reads_nothing")
def test_heads_that_are_too_wide(tmp_path: Path) -> None:
    require_kernels()
    wide = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=512,
    )
    transformers.LlamaForCausalLM(wide).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"its heads are of 512, our attention kernels run up to 256"):
        load_model(config(tmp_path))


def test_attention_that_follows_the_batch(folder: Path) -> None:
    with pytest.raises(pydantic.ValidationError, match="batch_invariant does not go with attention_backend"):
        config(folder, attention_backend="sdpa")
    require_kernels()
    assert attention_of(load_model(config(folder)), "auto", CompileConfig()).name == "cpu"


@pytest.mark.parametrize("rule", ["rejection", "block", "multi_round"])
def test_rules_that_look_at_drafts(folder: Path, rule: str) -> None:
    settings = {
        "target": {"model": str(folder), "batch_invariant": True},
        "speculative_config": {"method": "ngram", "rejection_sample_method": rule},
    }
    with pytest.raises(pydantic.ValidationError, match=f"rejection_sample_method: {rule}"):
        EngineConfig.model_validate(settings)
    settings["speculative_config"]["method"] = "none"
    EngineConfig.model_validate(settings)
