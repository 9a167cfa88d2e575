"""Configuration files: the shipped ones load, and every mistake is named with its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deploy.config import DrafthouseConfig
from deploy.config_file import load_config, parse_config
from specdec.core.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def write(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.yaml")), ids=lambda file: file.name)
def test_shipped_configuration_loads(file: Path) -> None:
    config = load_config(file)
    assert Path(config.target.model).is_absolute()
    assert config.http.host == "127.0.0.1"


def test_demo_is_float32_and_bf16_differs_in_nothing_else() -> None:
    demo, fast = load_config(CONFIGS / "demo.yaml"), load_config(CONFIGS / "demo-bf16.yaml")
    assert (demo.target.dtype, fast.target.dtype) == ("float32", "bfloat16")
    target = fast.target.model_copy(update={"dtype": "float32"})
    assert fast.model_copy(update={"target": target}) == demo
    none = load_config(CONFIGS / "demo-none.yaml")
    assert none.model_copy(update={"speculative_config": demo.speculative_config}) == demo


def test_relative_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    file = write(folder, "target: {model: ../model}\nhttp: {api_keys_file: keys}\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(file.relative_to(tmp_path))
    assert config.target.model == str(tmp_path / "model")
    assert config.http.api_keys_file == str(folder / "keys")
    assert load_config(write(folder, "target: {model: ./a/../b}\n")).target.model == str(folder / "b")
    absolute = write(folder, "target: {model: /srv/model}\nspeculative_config: {method: none}\n")
    assert load_config(absolute).target.model == "/srv/model"


def test_links_stay_links(tmp_path: Path) -> None:
    """Who renews a certificate, or takes a key back, has one lead to another file."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "keys").write_text("")
    (tmp_path / "data").symlink_to("first")
    (tmp_path / "keys").symlink_to("data/keys")
    (tmp_path / "model").symlink_to("first")
    file = write(tmp_path, "target: {model: model}\nhttp: {api_keys_file: keys}\n")
    config = load_config(file)
    assert config.target.model == str(tmp_path / "model")
    assert config.http.api_keys_file == str(tmp_path / "keys")
    elsewhere = write(tmp_path, "target: {model: data/../model}\n")
    assert load_config(elsewhere).target.model == str(tmp_path.resolve() / "model")


def test_the_opposite_of_true_is_off(tmp_path: Path) -> None:
    """As YAML takes the word without quotes."""
    for written in ("off", '"off"'):
        file = write(tmp_path, f"target: {{model: m, compile: {{mode: {written}}}}}\n")
        assert load_config(file).target.compile.mode == "off"


CORPUS = """\
target: {model: m}
speculative_config: {method: retrieval, retrieval: {path: corpus, cache_dir: kept}, profile_dir: costs}
models:
  b:
    target: {model: m}
    speculative_config:
      method: several
      drafters:
      - {name: code, method: retrieval, retrieval: {path: ../code}}
      - {name: text, method: retrieval, retrieval: {path: ~/text, cache_dir: /kept}}
"""


def test_so_are_those_of_corpora_and_of_what_is_kept_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    first, second = load_config(write(tmp_path, CORPUS)).served_models()
    alone = first.engine.speculative_config
    assert alone.retrieval is not None
    assert alone.retrieval.path == str(tmp_path / "corpus")
    assert alone.retrieval.cache_dir == str(tmp_path / "kept")
    assert alone.profile_dir == str(tmp_path / "costs")
    drafters = second.engine.speculative_config.drafters
    corpora = [one.retrieval for one in drafters if one.method == "retrieval"]
    assert [(one.path, one.cache_dir) for one in corpora] == [
        (str(tmp_path.parent / "code"), None),
        (str(tmp_path / "text"), "/kept"),
    ]


@pytest.mark.parametrize(
    ("speculative", "key"),
    [
        ({"method": "retrieval", "retrieval": {"path": "corpus"}}, "retrieval.path"),
        ({"method": "retrieval", "retrieval": {"path": "/c", "cache_dir": "kept"}}, "retrieval.cache_dir"),
        ({"profile_dir": "costs"}, "profile_dir"),
        (
            {
                "method": "several",
                "drafters": [{"name": "a", "method": "retrieval", "retrieval": {"path": "corpus"}}],
            },
            "drafters[0].retrieval.path",
        ),
    ],
)
def test_values_have_no_folder_that_paths_could_be_relative_to(speculative: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"target": {"model": "/m"}, "speculative_config": speculative})
    assert f"speculative_config.{key}: must be absolute here, got " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("target:\n  model: m\n  dtyp: float32\n", ":3: target.dtyp: unknown key; did you mean dtype?"),
        ("target: {model: m}\nspeculative: {}\n", ":2: speculative: unknown key; did you mean speculative_"),
        ("target:\n  model: m\n  zzz: 1\n", ":3: target.zzz: unknown key; known here: model, dtype,"),
        ("target:\n  dtype: float32\n", ":1: target.model: is required"),
        ("http:\n  port: 80\n", "target: is required"),
        ("target: {model: m}\nhttp:\n  port: 99999\n", ":3: http.port: input should be less than or equal"),
        ("target: {model: m}\nhttp: {port: 9101, proxy: haproxy}\n", ":2: http: port: 9101 is taken"),
        ("target: {model: m}\nhttp: {request_timeout_s: .inf}\n", ":2: http.request_timeout_s: input"),
        (
            "target: {model: m}\ncluster: {channels: {heartbeat_interval_s: 3}}\n",
            ":2: cluster.channels: heartbeat_timeout_s: 4 s must be at least twice heartbeat_interval_s",
        ),
        (
            "target: {model: m}\ncluster: {draft_pool: {deadlines: {min_deadline_s: 2}}}\n",
            ":2: cluster.draft_pool.deadlines: min_deadline_s: 2 s must be at most max_deadline_s (1 s)",
        ),
        (
            "target: {model: m}\ncluster: {draft_pool: {deadlines: {first_retry_s: 3}}}\n",
            ":2: cluster.draft_pool.deadlines: first_retry_s: 3 s must be at most max_retry_s (2 s)",
        ),
        ("target: {model: m}\nhttp:\n  port: abc\n", ":3: http.port: input should be a valid integer"),
        ("target:\n  model: m\n  dtype: fp32\n", ":3: target.dtype: input should be 'auto', 'float32'"),
        ("target:\n  model: m\n  model: n\n", ":3: target.model: appears twice, first on line 2"),
        (
            "target: {model: m}\nspeculative_config:\n  method: draft_model\n",
            ":2: speculative_config: method draft_model needs `model`",
        ),
        (
            "target: {model: m}\nspeculative_config:\n  tensor_parallel_size: 2\n",
            ":2: speculative_config: tensor_parallel_size is not a key of speculative_config",
        ),
        ("target: [\n", "not valid YAML"),
        ("target: !!python/object:os.system {}\n", ":1: not valid YAML"),
        ("- a\n", "must hold keys and values"),
        ("", "is empty"),
        ("target: 5\n", ":1: target: input should be a valid dictionary"),
        ('target:\n  model: "a\\0b"\n', r":2: target.model: 'a\x00b' is no path: embedded null"),
        ('target:\n  <<: {model: "a\\0b"}\n', r":1: target.model: 'a\x00b' is no path: embedded null"),
        ("target:\n  model: ~nobody-at-all/m\n", ":2: target.model: '~nobody-at-all/m' is no path"),
        ("target: &itself {model: m, cache: *itself}\n", "its blocks and lists are too deep in each other"),
        ("target: " + 2000 * "[" + 2000 * "]" + "\n", "its blocks and lists are too deep in each other"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, expected: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(file) in str(caught.value)
    assert expected in str(caught.value)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "target: {model: m, x: 1}\nhttp: {port: 0}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert len(str(caught.value).splitlines()) == 2


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"target: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(binary)


def test_schema_describes_every_key() -> None:
    schema = DrafthouseConfig.model_json_schema()
    blocks = [schema, *schema["$defs"].values()]
    for block in blocks:
        assert block["additionalProperties"] is False
        for name, field in block["properties"].items():
            assert field.get("description"), f"{block['title']}.{name} has no description"


SEVERAL = """\
target: {model: models/first}
http: {served_model_name: first}
models:
  org/second:
    target: {model: models/second}
    speculative_config: {method: draft_model, model: models/draft}
    cluster: {target_groups: {num_groups: 2}}
"""


@pytest.mark.parametrize(
    ("cluster", "own", "message"),
    [
        ("check_resources: false", "draft_pool: {own_nodes: true}",
         "models.second.cluster.draft_pool.own_nodes: needs check_resources: true"),
        ("check_resources: true",
         "draft_pool: {own_nodes: true}\n      target_groups: {bundle: {labels: {ray.io/node-id: x}}}",
         "models.second.cluster.draft_pool.own_nodes: cannot be combined with target_groups.bundle.labels"),
        ("check_resources: true", "draft_pool: {own_nodes: true}", None),
    ],
)  # fmt: skip
def test_pools_of_further_models_go_with_the_cluster_that_all_share(
    tmp_path: Path, cluster: str, own: str, message: str | None
) -> None:
    """What the first model is refused must not come in by another: the nodes would not be looked at."""
    text = (
        "target: {model: first}\n"
        "models:\n  second:\n    target: {model: second}\n"
        f"    cluster:\n      {own}\n"
        f"cluster: {{{cluster}}}\n"
    )
    if message is None:
        assert load_config(write(tmp_path, text)).served_models()[1].cluster.draft_pool.own_nodes
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(write(tmp_path, text))


def test_what_a_further_model_does_not_say_stays_unsaid(tmp_path: Path) -> None:
    """With autoscaling, one group would contradict two at least, unless nobody has said one."""
    text = (
        "target: {model: first}\n"
        "models:\n  second:\n    target: {model: second}\n"
        "    cluster: {target_groups: {autoscaling: {min_groups: 2, max_groups: 3}}}\n"
        "cluster: {drain_timeout_s: 7}\n"
    )
    _, second = load_config(write(tmp_path, text)).served_models()
    assert second.cluster.target_groups.initial_groups == 2
    assert "num_groups" not in second.cluster.target_groups.model_fields_set
    assert second.cluster.drain_timeout_s == 7


def test_further_models_have_engines_and_pools_of_their_own(tmp_path: Path) -> None:
    first, second = load_config(write(tmp_path, SEVERAL)).served_models()
    assert (first.name, first.suffix, first.cluster.namespace) == ("first", "", "drafthouse")
    assert (second.name, second.suffix) == ("org/second", "-org--second")
    assert second.engine.target.model == str(tmp_path / "models/second")
    assert second.engine.speculative_config.model == str(tmp_path / "models/draft")
    assert second.cluster.target_groups.num_groups == 2
    assert second.cluster.namespace == "drafthouse-org--second"
    (alone,) = load_config(write(tmp_path, "target: {model: m}\n")).served_models()
    assert (alone.name, alone.suffix) == (None, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("models:\n  b:\n    target: {modelx: x}\n", ":4: models.b.target.modelx: unknown key; did you mean"),
        ("models:\n  b:\n    http: {}\n", ":4: models.b.http: unknown key"),
        ("models:\n  'b c':\n    target: {model: x}\n", "string should match pattern"),
        ("models:\n  m:\n    target: {model: x}\n", "models.m: is the name of another model too"),
        ("models:\n  a/b: {target: {model: x}}\n  a--b: {target: {model: x}}\n", "models.a--b: is the name"),
    ],
)  # fmt: skip
def test_mistakes_in_further_models_are_named(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "target: {model: m}\n" + text))
    assert expected in str(caught.value)


SHAPES = {
    "chain": ("widths", "shape"),
    "static": ("width", "widths"),
    "dynamic": ("topk", "top_k"),
    "entropy": ("least_confident", "least_confidence"),
}
METHODS = {
    "ngram": ("prompt_lookup_mx", "prompt_lookup_max"),
    "suffix": ("suffixes", "suffix"),
    "retrieval": ("retrieve", "retrieval"),
    "draft_model": ("max_model_length", "max_model_len"),
    "self": ("trees", "tree"),
    "layerskip": ("exit_layers", "exit_layer"),
    "quantized": ("quantisation", "quantization"),
    "hydra": ("caches", "cache"),
}
WRONG_KEYS = [
    *((f"tree: {{shape: {tag}, KEY: 1}}", "tree", *keys) for tag, keys in SHAPES.items()),
    *(
        (f"drafters: [{{method: ngram}}, {{method: {tag}, KEY: 1}}]", "drafters[1]", *keys)
        for tag, keys in METHODS.items()
    ),
    ("drafters: [{method: self, tree: {shape: static, KEY: 1}}]", "drafters[0].tree", "path", "paths"),
]
"""What is written, in which block, which key it is, and which one is meant."""


@pytest.mark.parametrize("place", ["", "models.b."])
@pytest.mark.parametrize(("text", "block", "key", "meant"), WRONG_KEYS)
def test_unknown_keys_in_blocks_of_several_kinds_are_named_as_in_the_file(
    tmp_path: Path, place: str, text: str, block: str, key: str, meant: str
) -> None:
    block_text = f"target: {{model: m}}, speculative_config: {{\n{text.replace('KEY', key)}}}"
    further = f", models: {{b: {{{block_text}}}}}" if place else ""
    before = "target: {model: m}" if place else block_text
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, f"{{{before}{further}}}\n"))
    name = f":2: {place}speculative_config.{block}.{key}: unknown key"
    suggestion = f"; known here: {meant}" if key == "widths" else f"; did you mean {meant}?"
    assert name + suggestion in str(caught.value).splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tree: {shape: dynamic, top_k: 99}", "tree.top_k: input should be less than or equal to 16, got 99"),
        ("tree: {shape: round}", "tree.shape: input should be one of 'chain', 'static', 'dynamic', 'entr"),
        ("tree: {top_k: 4}", "tree.shape: is required"),
        ("drafters: [{name: a, method: x}]", "drafters[0].method: input should be one of 'ngram', 'suffix'"),
        ("drafters: [{name: a}]", "drafters[0].method: is required"),
        ("drafters: [{name: a, method: draft_model}]", "drafters[0].model: is required"),
    ],
)
def test_other_mistakes_in_blocks_of_several_kinds_are_named_too(
    tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, f"target: {{model: m}}\nspeculative_config:\n  {text}\n"))
    assert f":3: speculative_config.{expected}" in str(caught.value)


ONLINE = (
    "target: {{model: m}}\nspeculative_config: {{method: draft_model, model: d, online: {online}}}\n{http}"
)


REMOTE_HEADS = """
target: {{model: {model}}}
speculative_config: {{method: medusa, model: {model}, heads_at: draft_pool, num_speculative_tokens: 2}}
cluster:
  channels: {{tensors: {tensors}}}
  target_groups: {{bundle: {{num_gpus: {target_gpus}}}}}
  draft_pool: {{bundle: {{num_gpus: {draft_gpus}}}}}
"""


def test_tensors_go_from_gpu_to_gpu_where_both_ends_have_one(tmp_path: Path) -> None:
    def load(tensors: str, target_gpus: int, draft_gpus: int) -> str:
        text = REMOTE_HEADS.format(
            model=tmp_path, tensors=tensors, target_gpus=target_gpus, draft_gpus=draft_gpus
        )
        return load_config(write(tmp_path, text)).cluster.channels.tensors

    assert load("nccl", 1, 1) == "nccl"
    assert load("auto", 0, 0) == "auto"
    assert load("gloo", 0, 0) == "gloo"
    with pytest.raises(
        ConfigError, match=r"tensors: nccl needs .*: set cluster\.draft_pool\.bundle\.num_gpus, or"
    ):
        load("nccl", 1, 0)
    with pytest.raises(ConfigError, match=r"workers of cluster\.target_groups have none"):
        load("nccl", 0, 1)
    with pytest.raises(ConfigError, match=r"tensors"):
        load("infiniband", 1, 1)


def test_tenants_that_are_learnt_from_have_keys(tmp_path: Path) -> None:
    digest = "a" * 64
    for online, http in (
        ("{allow_shared: true}", ""),
        (f"{{tenants: [{digest}]}}", "http: {api_keys_file: k}"),
    ):
        config = load_config(write(tmp_path, ONLINE.format(online=online, http=http)))
        assert config.speculative_config.online is not None
    alone = write(tmp_path, ONLINE.format(online=f"{{tenants: [{digest}]}}", http=""))
    with pytest.raises(ConfigError, match=r"online\.tenants names API keys, and there are none without"):
        load_config(alone)
