"""The command line: output where it belongs, one readable message per mistake, exit code 2."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from deploy.api_keys import read_api_keys
from deploy.config import DrafthouseConfig
from deploy.openai.keys import digest_api_key
from tests.architectures import make_model, make_tokenizer
from tests.deploy.cli.invocation import invoke, user_error


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["serve"],
        ["status"],
        ["generate"],
        ["bench", "offline"],
        ["bench", "online"],
        ["config", "validate"],
        ["keys", "new"],
        ["batch"],
        ["train"],
    ],
)
def test_help_has_examples(command: list[str]) -> None:
    code, stdout, _ = invoke(*command, "--help")
    assert code == 0
    assert "Usage" in stdout
    if command:
        assert f"drafthouse {' '.join(command)}" in stdout


def test_help_loads_neither_torch_nor_ray() -> None:
    script = (
        "import sys; from deploy.cli.main import app\n"
        "try: app(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version() -> None:
    code, stdout, _ = invoke("--version")
    assert (code, stdout.split()) == (0, ["drafthouse", metadata.version("drafthouse")])


def test_generate_prints_what_transformers_generates_without_ray(config: Path) -> None:
    script = (
        "import sys; from deploy.cli.main import app\n"
        f"try: app(['generate', 'def f(x):', '--config', {str(config)!r}, '--max-tokens', '20'])\n"
        "except SystemExit as done: assert not done.code\n"
        "assert 'ray' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    prompt = make_tokenizer()("def f(x):", return_tensors="pt").input_ids
    with torch.no_grad():
        output = make_model("llama", seed=1).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
        )
    expected = make_tokenizer().decode(output[0][prompt.shape[1] :], skip_special_tokens=True)
    assert done.stdout == expected + "\n"
    assert "tokens/s" in done.stderr
    assert "mean acceptance length" in done.stderr


def test_generate_with_folders_and_a_seed(models: Path) -> None:
    def sampled(seed: int, *options: object) -> str:
        code, stdout, stderr = invoke(
            "generate", "abc", "--model", models / "target", "--temperature", 1, "--seed", seed,
            "--max-tokens", 12, *options,
        )  # fmt: skip
        assert code == 0, stderr
        return stdout

    assert sampled(1) == sampled(1, "--draft", models / "draft", "-k", 2) == sampled(1, "-k", 0)
    assert sampled(1) != sampled(2)


def test_bench_offline(config: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "def"}\n')
    code, stdout, stderr = invoke(
        "bench", "offline", "-c", config, "-b", 2, "--max-tokens", 8, "--repeats", 1, "--json", results,
        "--prompts", prompts,
    )  # fmt: skip
    assert code == 0, stderr
    assert "speculative" in stdout
    plain, speculative = json.loads(results.read_text())["measurements"]
    assert (plain["is_speculative"], speculative["is_speculative"]) == (False, True)
    assert plain["num_tokens"] == speculative["num_tokens"] == 16
    assert plain["mean_acceptance_length"] == 1.0
    assert speculative["mean_acceptance_length"] == pytest.approx(3.5, abs=0.51)
    assert speculative["num_rounds"] < plain["num_rounds"]


def test_config_validate_and_schema(config: Path) -> None:
    code, stdout, _ = invoke("config", "validate", config)
    assert code == 0
    assert "ok" in stdout
    code, stdout, _ = invoke("config", "schema")
    assert json.loads(stdout) == DrafthouseConfig.model_json_schema()


@pytest.mark.parametrize(
    ("speculative", "drafter"),
    [
        ("{method: draft_model, model: MODELS/draft}", "drafter draft_model {draft}, k = 4"),
        (
            "{method: draft_model, model: MODELS/draft, quantization: int4}",
            "drafter draft_model {draft} in int4, k = 4",
        ),
        ("{method: ngram, num_speculative_tokens: 2}", "drafter ngram, k = 2"),
        ("{method: none}", "no drafter"),
    ],
)
def test_the_summary_names_folders_as_one_types_them(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculative: str, drafter: str
) -> None:
    file = tmp_path / "config.yaml"
    speculative = speculative.replace("MODELS", str(models))
    file.write_text(f"target: {{model: {models}/target}}\nspeculative_config: {speculative}\n")
    for folder, prefix in ((models.parent, f"{models.name}/"), (tmp_path, f"{models}/")):
        monkeypatch.chdir(folder)
        _, stdout, _ = invoke("config", "validate", file)
        shown = drafter.format(draft=f"{prefix}draft")
        assert f"ok (target {prefix}target in auto, {shown})" in stdout


def test_quantization_is_checked_and_summed_up(config: Path) -> None:
    text = config.read_text()
    config.write_text(text.replace("{model:", "{quantization: int4-32, model:", 1))
    code, stdout, _ = invoke("config", "validate", config)
    assert code == 0
    assert "in float32, weights in int4-32, " in stdout
    config.write_text(text.replace("{model:", "{quantization: int4-64, model:", 1))
    assert "groups of 64 do not divide" in user_error("config", "validate", config)
    config.write_text(text.replace("{model:", "{quantization: int5, model:", 1))
    message = user_error("config", "validate", config)
    assert "target.quantization" in message
    assert "'int8'" in message
    config.write_text(text.replace("{model:", "{quantization: int8, tensor_parallel_size: 2, model:", 1))
    assert "does not go with tensor_parallel_size: 2" in user_error("config", "validate", config)


def test_more_context_than_the_checkpoint_has_is_refused_before_anything_starts(config: Path) -> None:
    text = config.read_text()
    config.write_text(text.replace("{model:", "{max_model_len: 257, model:"))
    for command in (["config", "validate"], ["serve"]):
        message = user_error(*command, config)
        assert "target.max_model_len: 257 is more than the 256 positions" in message
    config.write_text(text.replace("{model:", "{max_model_len: 256, model:"))
    assert invoke("config", "validate", config)[0] == 0


def test_made_up_output_is_for_bench_alone(config: Path) -> None:
    """And refused before anything starts."""
    text = config.read_text()
    line = "  num_speculative_tokens: 3\n"
    config.write_text(text.replace(line, line + "  synthetic_acceptance: {acceptance: [0.8]}\n"))
    for command in (["config", "validate", config], ["serve", config], ["generate", "a", "-c", config]):
        assert "synthetic_acceptance: what comes out is made up" in user_error(*command)


def test_bench_widens_a_narrow_configuration_and_checks_it_again(config: Path) -> None:
    config.write_text(config.read_text() + "scheduler: {max_num_seqs: 1, max_num_batched_tokens: 2}\n")
    code, stdout, stderr = invoke(
        "bench", "offline", "-c", config, "-b", 3, "--max-tokens", 2, "--repeats", 1, "--json", "-"
    )
    assert code == 0, stderr
    scheduler = json.loads(stdout)["environment"]["config"]["scheduler"]
    assert (scheduler["max_num_seqs"], scheduler["max_num_batched_tokens"]) == (3, 3)
    assert "--batch-size: 5000" in user_error("bench", "offline", "-c", config, "-b", 5000)


def test_config_validate_looks_at_what_serve_looks_at(
    config: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = config.read_text()
    config.write_text(text.replace(f"{models}/draft", f"{models}/foreign"))
    assert "another tokenizer" in user_error("config", "validate", config)
    config.write_text(text + "http: {api_keys_file: /nowhere/keys}\n")
    assert "/nowhere/keys cannot be read" in user_error("config", "validate", config)
    config.write_text(text + "http: {tls: {certificate_file: /nowhere/cert, key_file: /nowhere/key}}\n")
    assert "/nowhere/cert cannot be read" in user_error("config", "validate", config)
    config.write_text(text + "http: {tracing: {endpoint: 'http://collector:4318/v1/traces'}}\n")
    with monkeypatch.context() as patch:
        patch.setattr("deploy.openai.tracing._EXPORTER", "nowhere.to.be.found")
        assert "http.tracing: needs more packages" in user_error("config", "validate", config)
    assert invoke("config", "validate", config)[0] == 0


def test_two_draft_models_are_refused_before_draft_workers_are_to_hold_them(
    config: Path, models: Path
) -> None:
    target = config.read_text().partition("speculative_config:")[0]
    draft = f"method: draft_model, model: {models}/draft"

    def write(other: str) -> None:
        drafters = f"[{{name: one, {draft}}}, {{name: other, {other}}}]"
        config.write_text(f"{target}speculative_config: {{method: several, drafters: {drafters}}}\n")

    write(draft)
    for command in (["config", "validate"], ["serve"]):
        message = " ".join(user_error(*command, config).split())
        assert "drafters: 2 of them are draft models, and draft workers hold one" in message
    write("method: ngram")
    assert invoke("config", "validate", config)[0] == 0


def test_mistakes_in_options(
    config: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "temperature" in user_error("generate", "a", "-c", config, "--temperature", -1)
    assert "temperature" in user_error("generate", "a", "-c", config, "--temperature", "nan")
    assert "max_tokens" in user_error("generate", "a", "-c", config, "--max-tokens", -5)
    assert "PROMPT" in user_error("generate", "", "-c", config)
    assert "either --config or --model" in user_error(
        "generate", "a", "-c", config, "--model", models / "target"
    )
    assert "--draft needs --model" in user_error("generate", "a", "--draft", models / "draft")
    assert "PROMPT is not UTF-8" in user_error("generate", "a\udcff", "-c", config)
    assert "holds no prompt" in user_error("bench", "offline", "-c", config, "--prompts", _empty(tmp_path))
    unwritable = user_error("bench", "offline", "-c", config, "--json", tmp_path / "no" / "results.json")
    assert "cannot be written" in unwritable
    folder = user_error("bench", "offline", "-c", config, "--json", tmp_path)
    assert f"--json: {tmp_path} is a folder" in folder
    assert "loading" not in unwritable, "it is said before anything is measured"
    assert "nowhere.yaml does not exist" in user_error("generate", "a", "-c", "nowhere.yaml")
    monkeypatch.chdir(tmp_path)
    assert "configs/demo.yaml" in user_error("generate", "a")


def _empty(folder: Path) -> Path:
    file = folder / "empty.txt"
    file.write_text("\n")
    return file


def test_unknown_key_names_file_line_and_key(config: Path) -> None:
    config.write_text(config.read_text() + "http:\n  prot: 80\n")
    lines = config.read_text().splitlines()
    message = user_error("config", "validate", config)
    assert f"{config}:{len(lines)}: http.prot: unknown key; did you mean port?" in message
    assert "http.prot" in user_error("serve", config)


def test_broken_checkpoints_are_named(config: Path, models: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models / "target", broken)
    text = config.read_text()
    config.write_text(text.replace(f"{models}/target", str(broken)))
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[:-100])
    assert str(weights) in user_error("config", "validate", config)
    assert str(weights) in user_error("serve", config)
    weights.unlink()
    assert "no weights" in user_error("serve", config)
    described = (broken / "config.json").read_text()
    (broken / "config.json").write_text('{"model_type": "mamba"}')
    assert "mamba cannot be served" in user_error("serve", config)
    (broken / "config.json").write_text(described)
    weights.write_bytes(whole)
    (broken / "tokenizer.json").write_text("{")
    assert "tokenizer.json" in user_error("serve", config)
    (broken / "config.json").unlink()
    assert "config.json" in user_error("serve", config)
    shutil.rmtree(broken)
    assert "does not exist" in user_error("serve", config)


def test_foreign_tokenizer_is_refused_before_anything_starts(config: Path, models: Path) -> None:
    config.write_text(config.read_text().replace(f"{models}/draft", f"{models}/foreign"))
    message = user_error("serve", config)
    assert "tokenizer" in message
    assert "token id 128" in message


def test_port_in_use(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = user_error("serve", config, "--port", port)
    assert f"port {port}" in message
    assert "--port" in message


def test_open_address_needs_keys(config: Path, tmp_path: Path) -> None:
    assert "--insecure" in user_error("serve", config, "--host", "0.0.0.0")
    assert "--insecure" in user_error("serve", config, "--host", "192.0.2.7")
    keys = tmp_path / "keys"
    config.write_text(config.read_text() + f"http: {{host: 0.0.0.0, api_keys_file: {keys}}}\n")
    assert "cannot be read" in user_error("serve", config)
    keys.write_text("# none\n")
    assert "holds no key" in user_error("serve", config)


def test_a_new_key_is_one_that_the_file_accepts(tmp_path: Path) -> None:
    code, stdout, stderr = invoke("keys", "new", "alice", "--max-concurrency", 4, "--tokens-per-minute", 1000)
    assert code == 0
    text, line = stdout.splitlines()
    assert text not in stderr
    assert text not in line
    keys = tmp_path / "keys"
    keys.write_text(f"# of the team\n{line}\n")
    (key,) = read_api_keys(keys)
    assert (key.name, key.max_concurrency, key.tokens_per_minute) == ("alice", 4, 1000)
    assert key.digest == digest_api_key(text)
    assert invoke("keys", "new", "alice")[1].splitlines()[0] != text
    assert "NAME must be" in user_error("keys", "new", "two words")
    too_long = ("keys", "new", "alice", "--tokens-per-minute", 10**12)
    assert "--tokens-per-minute: give a number of at most 12 digits" in user_error(*too_long)
    longest = invoke("keys", "new", "alice", "--tokens-per-minute", 10**12 - 1)[1].splitlines()[1]
    keys.write_text(f"{longest}\n")
    assert read_api_keys(keys)[0].tokens_per_minute == 10**12 - 1


def test_the_line_of_a_new_key_goes_into_a_file_and_the_key_to_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    code, stdout, stderr = invoke("keys", "new", "alice", "--file", file, "--max-concurrency", 4)
    assert code == 0
    (text,) = stdout.splitlines()
    assert text not in stderr
    assert f"{file} has its line now" in stderr
    code, stdout, _ = invoke("keys", "new", "bob", "--file", file)
    assert code == 0
    alice, bob = read_api_keys(file)
    assert (alice.name, alice.max_concurrency, bob.name) == ("alice", 4, "bob")
    assert [alice.digest, bob.digest] == [digest_api_key(text), digest_api_key(stdout.strip())]
    code, stdout, stderr = invoke("keys", "new", "alice", "--file", file)
    assert code == 2
    assert "has a key named alice" in stderr
    assert not stdout
    assert read_api_keys(file) == (alice, bob)


def test_no_cluster_at_the_address(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert f"127.0.0.1:{port}" in user_error("serve", config, "--address", f"127.0.0.1:{port}")
    assert "HOST:PORT" in user_error("serve", config, "--address", "ray://head:10001/x")


def test_too_few_cpus(config: Path) -> None:
    message = user_error("serve", config, "--num-cpus", 1)
    assert "draft worker" in message
    assert "1 CPU" in message


def test_bug_is_reported_without_traceback_unless_asked(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("deploy.cli.generate.generate_text", broken)
    code, _, stderr = invoke("generate", "a", "-c", config)
    assert code == 1
    assert "ZeroDivisionError: oops" in stderr
    assert "Traceback" not in stderr
    monkeypatch.setattr("deploy.cli.border._Tracebacks.are_shown", False)
    code, _, stderr = invoke("generate", "a", "-c", config, "--debug")
    assert "Traceback" in stderr
