"""The chart: rendered and linted by Helm, checked against KubeRay, Serve and our own builder."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private import services
from ray.scripts.scripts import cli as ray_cli
from ray.serve.schema import ServeDeploySchema
from typer.core import TyperGroup
from typer.main import get_command

from cluster.application import COORDINATOR, DRAFT_POOL
from cluster.config import ClusterConfig
from cluster.inventory import NodeSnapshot
from cluster.placement import RanksPerModel, plan_placement, require_plan, unchecked_placement
from deploy.application import APPLICATION, INGRESS
from deploy.cli.main import app
from deploy.config import DrafthouseConfig
from deploy.config_file import _PATH_KEYS, parse_config
from deploy.monitoring.dashboards import ALL_DASHBOARDS
from deploy.monitoring.grafana import grafana_json
from deploy.monitoring.rules import rules_yaml
from deploy.proxies import ProxyKind, proxy_environment
from deploy.serve_config import build, parse_arguments
from scripts import helm_monitoring, helm_schema
from specdec.core.errors import ConfigError, ResourceError
from workers.logs import FORMAT_VARIABLE

pytest.importorskip("helm_python", reason="helm-python-sdk, Helm's engine, is there for Linux x86-64 only")

import helm_python

from tests.helm import kuberay
from tests.helm.chart import (
    CHART,
    FLAVOURS,
    Values,
    groups_of,
    merged,
    of_kind,
    ray_service,
    render,
    render_texts,
    values_of,
)

GOLDEN = Path(__file__).parent / "golden"
VERSION = metadata.version("drafthouse")
UPDATE = os.environ.get("DRAFTHOUSE_UPDATE_GOLDEN") == "1"
DRAFTED: Values = {"config": {"speculative_config": {"method": "draft_model", "model": "/models/draft"}}}
SCALED: Values = {"autoscaling": {"enabled": True}}
EVERYTHING: Values = DRAFTED | {
    "ingress": {"replicas": 2},
    "target": {"maxGroups": 3, "priorityClassName": "high", "runtimeClassName": "nvidia"},
    "autoscaling": {"enabled": True, "resources": {"limits": {"cpu": "500m"}}},
    "gcsFaultTolerance": {
        "enabled": True, "redisAddress": "redis:6379", "existingSecret": "redis", "username": "ray"
    },
    "expose": {"enabled": True, "host": "llm.example", "tlsSecret": "tls", "className": "nginx"},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "models": {
        "volume": {"emptyDir": {}},
        "download": [{"repository": "org/m", "revision": "abc", "folder": "Target_1.0"}],
    },
    "huggingFace": {"existingSecret": "hf"},
    "rayAuth": {"existingSecret": "ray-token"},
    "tls": {"existingSecret": "tls"},
    "monitoring": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
    "draft": {
        "probes": {"readiness": {"exec": {"command": ["true"]}}},
        "podLabels": {"team": "llm"},
        "extraEnv": [{"name": "A", "value": "c"}],
    },
    "extraEnv": [{"name": "A", "value": "b"}, {"name": "HF_HUB_OFFLINE", "value": "0"}],
    "extraVolumes": [{"name": "v", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}},
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-y'}\n",
    ],
}  # fmt: skip


def overriding(name: str, least: int = 1, most: int = 1) -> Values:
    """An override of one deployment, with bounds for its replicas."""
    bounds = {"min_replicas": least, "max_replicas": most}
    return {"serve": {"deployments": [{"name": name, "autoscaling_config": bounds}]}}


def with_options(name: str, **options: Any) -> Values:
    """An override of one deployment, with other options."""
    return {"serve": {"deployments": [{"name": name, **options}]}}


def fixed_and_scaled(name: str) -> Values:
    """An override that says how many there are, and how many there may be."""
    values = overriding(name)
    values["serve"]["deployments"][0]["num_replicas"] = 1
    return values


def redis(**more: str) -> Values:
    """The head's state in Redis."""
    return {"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379", **more}}


def scaling(pool: str, **bounds: int) -> Values:
    """Bounds for a pool, as `drafthouse serve` has them."""
    return {"config": {"cluster": {pool: {"autoscaling": bounds}}}}


def several(model: str) -> Values:
    """Two drafters, of which one has a draft model."""
    lookup = {"name": "a", "method": "ngram"}
    small = {"name": "b", "method": "draft_model", "model": model}
    return {"config": {"speculative_config": {"method": "several", "drafters": [lookup, small]}}}


def updating(how: str) -> Values:
    """How a changed config replaces target groups."""
    return {"config": {"cluster": {"updates": how}}}


ROOM: Values = {"target": {"groups": 1, "maxGroups": 2}} | SCALED
SPARE: Values = {"target": {"spareGroups": 1}}
TENSOR_PARALLEL_OVER_PODS: Values = {
    "config": {"target": {"tensor_parallel_size": 8}},
    "target": {"nodesPerGroup": 2, "gpu": 4, "groups": 2},
}
SITUATIONS = [
    *(
        pytest.param(values_of(flavour), id=flavour or "defaults")
        for flavour in (None, *FLAVOURS, "monitoring")
    ),
    pytest.param(EVERYTHING, id="everything"),
    pytest.param(TENSOR_PARALLEL_OVER_PODS, id="tensor parallel over pods"),
]


@pytest.fixture(scope="module")
def kuberay_schema() -> dict[str, Any]:
    place = kuberay.folder()
    if place is None:
        pytest.skip(
            f"no {kuberay.FILE}: set DRAFTHOUSE_KUBERAY_CRDS to helm-chart/kuberay-operator/crds of KubeRay"
        )
    return kuberay.load_schema(place)


# ------------------------------------------------------------------------------------------------ values


def test_schema_is_what_the_code_says() -> None:
    assert helm_schema.SCHEMA.read_text() == helm_schema.rendered(), "run scripts/helm_schema.py"


def test_every_key_of_the_configuration_is_a_value_or_decided_by_the_chart() -> None:
    blocks = helm_schema.schema()["$defs"]
    described = DrafthouseConfig.model_json_schema()
    for name, block in {"DrafthouseConfig": described, **described["$defs"]}.items():
        missing = block.get("properties", {}).keys() - blocks[name].get("properties", {}).keys()
        assert missing == set(helm_schema.DECIDED_BY_THE_CHART.get(name, ())), name


def test_values_file_shows_every_key() -> None:
    """What is not in values.yaml nobody finds."""
    schema = helm_schema.schema()
    for name in ("enabled", "tags"):  # Helm's own, of charts that have this one as a part
        del schema["properties"][name]

    def missing(block: dict[str, Any], values: Any, at: str) -> list[str]:
        found = []
        for name, part in block["properties"].items():
            if name not in values:
                found.append(f"{at}{name}")
            elif "$ref" in part and name != "config":
                found += missing(schema["$defs"][part["$ref"].split("/")[-1]], values[name], f"{at}{name}.")
        return found

    assert missing(schema, yaml.safe_load((CHART / "values.yaml").read_text()), "") == []


@pytest.mark.parametrize(
    "values",
    [
        {"targetz": {}},
        {"target": {"groupz": 2}},
        {"target": {"probes": {"livness": {}}}},
        {"target": {"groups": 0}},
        {"target": {"spareGroups": -1}},
        {"target": {"groups": "two"}},
        {"target": {"memory": "32 GB"}},
        {"target": {"podDisruptionBudget": {"maxUnavailable": "50%"}}},
        {"target": {"podDisruptionBudget": {"maxUnavailable": -1}}},
        {"ingress": {"drainSeconds": "30s"}},
        {"monitoring": {"prometheusRule": {"runbookUrl": "docs/operations/alerts.md"}}},
        {"head": {"gpu": 1}},
        {"config": {"target": {"dtyp": "float32"}}},
        {"config": {"target": {"dtype": "fp32"}}},
        {"config": {"speculative_config": {"method": "magic"}}},
        {"config": {"speculative_config": {"num_speculative_tokens": 65}}},
        {"config": {"http": {"host": "0.0.0.0"}}},
        {"config": {"http": {"proxy": "haproxy"}}},
        {"ingress": {"proxy": "nginx"}},
        {"config": {"http": {"tls": {"certificate_file": "/a", "key_file": "/b"}}}},
        {"config": {"cluster": {"target_groups": {"num_groups": 2}}}},
        {"config": {"cluster": {"check_resources": True}}},
        {"config": {"models": {"small": {"target": {"model": "/models/small"}}}}},
        {"upgrade": {"type": "Sometimes"}},
        {"networkPolicy": {"dnsPorts": []}},
        {"networkPolicy": {"dnsPorts": [0]}},
        {"serve": {"deployments": [{"name": "Ingress", "max_ongoing_request": 5}]}},
        {"serve": {"deployments": [{"name": "Ingress", "autoscaling_config": {"max_replica": 2}}]}},
        {"serve": {"deployments": [{"name": "Ingress", "ray_actor_options": {"num_cpu": 1}}]}},
        {"serve": {"autoscalingPolicy": {"policy_func": "module:function"}}},
    ],
    ids=json.dumps,
)
def test_mistakes_in_values_are_refused_by_the_schema(values: Values) -> None:
    import helm_python

    with pytest.raises(
        helm_python.HelmError, match=r"not allowed|got|must be|does not match|minimum|maximum"
    ):
        helm_python.Chart.load(CHART).validate_schema(
            merged(yaml.safe_load((CHART / "values.yaml").read_text()), values)
        )


@pytest.mark.parametrize(
    ("flavour", "values", "message"),
    [
        (None, {"target": {"gpu": 2}}, "target.gpu: each pod holds 1 of the 1 ranks"),
        ("multi-host", {"target": {"nodesPerGroup": 3}}, "3 pods cannot share the 16 ranks"),
        ("multi-host", {"target": {"nodesPerGroup": 4}}, "4 pods cannot share 2 pipeline stages"),
        ("multi-host", {"target": {"gpu": 4}}, "give 8, or 0"),
        ("gpu", {"draft": {"gpu": 2}}, "draft.gpu: a draft worker has 1 ranks"),
        (None, {"target": {"groups": 3, "maxGroups": 2}} | SCALED, "2 is less than target.groups, 3"),
        ("gpu", {"draft": {"workers": 3, "maxWorkers": 2}} | SCALED, "2 is less than draft.workers, 3"),
        (None, {"target": {"maxGroups": 2}}, "needs autoscaling.enabled"),
        (None, {"apiKeys": {"existingSecret": ""}}, "apiKeys.existingSecret: name a Secret"),
        (None, {"apiKeys": {"insecure": True}}, "insecure contradicts existingSecret"),
        (None, {"models": {"claim": ""}}, "models.claim"),
        (None, {"models": {"download": EVERYTHING["models"]["download"]}}, "models.download: every pod"),
        (None, {"head": {"shmSize": "0.5Gi"}}, "head.shmSize: 0.5Gi does not hold Ray's object store"),
        ("gpu", {"draft": {"shmSize": "536M"}}, "draft.shmSize: 536M does not hold"),
        (None, {"target": {"rayStartParams": {"object-store-memory": "9000000000"}}}, "of 9000000000 bytes"),
        (None, {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}, "extraVolumes: there is a volume tmp"),
        (None, {"extraVolumes": [{"name": "a", "emptyDir": {}}] * 2}, "a volume a already"),
        ("gpu", {"draft": {"podLabels": {"app.kubernetes.io/component": "x"}}}, "draft.podLabels: app.kub"),
        (None, {"fullnameOverride": "1st"}, "fullnameOverride: 1st is no name for a RayService"),
        (None, {"nameOverride": "Llm"}, "fullnameOverride: llm-Llm is no name"),
        (
            None,
            {"ingress": {"replicas": 2}, "serve": {"deployments": [{"name": "Ingress", "num_replicas": 3}]}},
            "Ingress: num_replicas 3, but there are pods for 2: raise ingress.replicas",
        ),
        (None, {"gcsFaultTolerance": {"enabled": True}}, "gcsFaultTolerance.redisAddress: is required"),
        (
            None,
            {"gcsFaultTolerance": {"enabled": True, "redisAddress": "r:1", "externalStorageNamespace": "x"}},
            "gcsFaultTolerance.externalStorageNamespace: a second cluster",
        ),
        (None, redis(username="ray"), "gcsFaultTolerance.existingSecret: name a Secret with the user's"),
        (None, redis(usernameKey="user"), "gcsFaultTolerance.existingSecret: name a Secret with the user's"),
        (None, redis(existingSecret="r", username="ray", usernameKey="user"), "contradicts usernameKey"),
        (None, {"config": {"http": {"num_replicas": 2}}}, "so their number is ingress.replicas"),
        (None, {"extraEnv": [{"name": "HOME", "value": "/"}]}, "extraEnv: HOME is where compileCache is"),
        ("gpu", {"draft": {"extraEnv": [{"name": "RAY_ADDRESS"}]}}, "draft.extraEnv: RAY_ADDRESS is KubeRay"),
        (
            "gpu",
            {"extraEnv": [{"name": "RAY_enable_autoscaler_v2", "value": "1"}]},
            "extraEnv: RAY_enable_autoscaler_v2 follows from autoscaling.enabled",
        ),
        (
            "gpu",
            {"target": {"rayStartParams": {"labels": "a=b"}}},
            "target.rayStartParams.labels: KubeRay refuses it",
        ),
        (
            "gpu",
            {"head": {"rayStartParams": {"redis-password": "x"}}},
            "head.rayStartParams.redis-password: comes from gcsFaultTolerance",
        ),
        (None, {"head": {"extraEnv": [{"value": "x"}]}}, "head.extraEnv: an entry has no name"),
        (None, {"expose": {"enabled": True}}, "expose.host: is required"),
        ("cpu-dev", {"tls": {"existingSecret": "x"}, "ingress": {"enabled": False}}, "needs ingress.enabled"),
        (None, {"tls": {"existingSecret": "x"}, "ingress": {"proxy": "haproxy"}}, "haproxy does not end TLS"),
        ("gpu", {"config": {"speculative_config": {"model": ""}}}, "needs the folder of a draft model"),
        (None, fixed_and_scaled("Ingress"), "Ingress: num_replicas 1 contradicts autoscaling_config"),
        ("gpu", fixed_and_scaled("DraftPool"), "DraftPool: num_replicas 1 contradicts autoscaling_config"),
        (None, overriding("Router"), "no deployment Router here; known: Coordinator, Ingress"),
        (None, overriding("DraftPool"), "no deployment DraftPool here"),
        (None, overriding("Coordinator", 0, 1), "config.cluster.target_groups.autoscaling.min_groups: 0"),
        ("gpu", overriding("DraftPool", 0, 1), "config.cluster.draft_pool.autoscaling.min_workers: 0"),
        (None, overriding("Coordinator", 3, 2), "Coordinator: min_replicas 3 is more than max_replicas 2"),
        ("gpu", overriding("Coordinator", 1, 2), "2, but there are pods for 1: raise target.maxGroups"),
        ("gpu", overriding("DraftPool", 1, 3), "3, but there are pods for 2: raise draft.maxWorkers"),
        (None, {"config": {"target": {"model": ""}}}, "config.target.model: is required"),
        (None, {"serve": {"deployments": [{"name": "Coordinator", "num_replicas": 2}]}}, "num_replicas 2"),
        (None, scaling("target_groups", min_groups=2, max_groups=1), "2 is more than max_groups 1"),
        (None, scaling("target_groups", min_groups=2, max_groups=2) | ROOM, "target.groups: 1 are there"),
        (None, scaling("target_groups", max_groups=1) | {"target": {"groups": 2}}, "not from 1 to 1"),
        ("gpu", scaling("draft_pool", max_workers=1), "draft.workers: 2 are there at first"),
        (None, merged(TENSOR_PARALLEL_OVER_PODS, SCALED), "target.multiHost: for each pod that the"),
        ("multi-host", merged(SPARE, {"target": {"groups": 1}} | SCALED), "and 2 groups at most (spare"),
        ("gpu", {"draft": {"maxWorkers": 3}} | SCALED, "the 2 of draft.workers: give config.cluster.dra"),
        (None, {"config": {"target": {"model": "Qwen/Qwen3-8B"}}}, "folder's path, such as /models/Qwen3-8B"),
        (None, several("models/b"), "config.speculative_config.drafters[1].model: "),
        (None, {"huggingFace": {"existingSecret": "hf"}}, "huggingFace.existingSecret: is for models"),
        (None, {"rayAuth": {"enabled": False, "existingSecret": "t"}}, "rayAuth.existingSecret: Ray asks"),
        ("cpu-dev", {"ingress": {"replicas": 2}}, "write config.http.num_replicas: 2 instead"),
    ],
)  # fmt: skip
def test_contradictions_are_named(flavour: str | None, values: Values, message: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError) as caught:
        render(merged(values_of(flavour), values))
    assert message in str(caught.value)


@pytest.mark.parametrize("keys", [keys for keys in _PATH_KEYS if keys[0] != "http"], ids=str)
def test_paths_that_the_application_would_refuse_are_refused(keys: tuple[str, ...]) -> None:
    """It would in the status of the RayService, where nobody looks."""
    given: Any = "models/x"
    for key in reversed(keys):
        given = {key: given}
    rest = {"target": {"model": "/models/target"}, "speculative_config": {"retrieval": {"path": "/texts"}}}
    config = merged(rest, given)
    with pytest.raises(ConfigError, match="must be absolute"):
        parse_config(config)
    with pytest.raises(helm_python.HelmError) as caught:
        render({"config": config})
    assert f'config.{".".join(keys)}: "models/x" does not begin with /' in str(caught.value)
    assert render({"config": rest})


def test_draft_workers_may_become_more_by_what_serve_is_told() -> None:
    pods: Values = {"draft": {"workers": 1, "maxWorkers": 3}} | SCALED
    for told in (
        scaling("draft_pool", max_workers=2),
        overriding("DraftPool", 1, 3),
        with_options("DraftPool", num_replicas=3),
    ):
        draft = groups_of(ray_service(merged(merged(DRAFTED, pods), told)))["draft"]
        assert (draft["replicas"], draft["maxReplicas"]) == (1, 3)


@pytest.mark.parametrize("values", SITUATIONS)
def test_lint(values: Values) -> None:
    import helm_python

    report = helm_python.lint(CHART, values, strict=True)
    serious = [message for message in report["messages"] if message["severity"] > 1]
    assert serious == []
    assert report["errors"] == []


# ----------------------------------------------------------------------------------------------- KubeRay


@pytest.mark.parametrize("values", SITUATIONS)
def test_kuberay_would_take_it(values: Values, kuberay_schema: dict[str, Any]) -> None:
    assert kuberay.problems(ray_service(values), kuberay_schema) == []


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (("rayClusterConfig", "workerGroupSpecs", 0), "numOfHosts", "numOfHost"),
        (
            ("rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0),
            "resources",
            "resourcez",
        ),
        (("rayClusterConfig",), "authOptions", "authOption"),
        ((), "upgradeStrategy", "upgradeStrategie"),
    ],
)
def test_kuberay_would_refuse_typos(
    path: tuple[str | int, ...], old: str, new: str, kuberay_schema: dict[str, Any]
) -> None:
    service = copy.deepcopy(ray_service(EVERYTHING))
    block: Any = service["spec"]
    for key in path:
        block = block[key]
    block[new] = block.pop(old)
    assert any(new in problem for problem in kuberay.problems(service, kuberay_schema))


@pytest.mark.parametrize(
    ("place", "twice"),
    [
        ("env", {"name": "HF_HUB_OFFLINE", "value": "0"}),
        ("volumeMounts", {"name": "v", "mountPath": "/tmp"}),
        ("ports", {"containerPort": 8265}),
    ],
)
def test_kuberay_would_refuse_what_is_there_twice(
    place: str, twice: Values, kuberay_schema: dict[str, Any]
) -> None:
    service = copy.deepcopy(ray_service({}))
    (container,) = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    container[place].append(twice)
    (problem,) = kuberay.problems(service, kuberay_schema)
    assert f"containers.0.{place}" in problem
    assert "2 times" in problem


def test_defaults_of_kuberay_count_before_what_it_requires(kuberay_schema: dict[str, Any]) -> None:
    service = copy.deepcopy(ray_service({}))
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    del group["minReplicas"], group["maxReplicas"]
    assert kuberay.problems(service, kuberay_schema) == []
    del group["groupName"]
    assert kuberay.problems(service, kuberay_schema) != []


# ------------------------------------------------------------------------------------- Serve and ourselves


def serve_config(values: Values) -> dict[str, Any]:
    config = yaml.safe_load(ray_service(values)["spec"]["serveConfigV2"])
    assert isinstance(config, dict)
    return config


def check_keys(model: Any, values: dict[str, Any], at: str) -> None:
    """Serve itself ignores keys that it does not know."""
    assert values.keys() <= model.model_fields.keys(), f"{at}: {values.keys() - model.model_fields.keys()}"


def nodes_of(service: dict[str, Any]) -> list[NodeSnapshot]:
    """The Ray nodes that the pods become."""
    return [
        NodeSnapshot(
            node_id=f"{name}-{index}",
            available={
                "CPU": float(group["rayStartParams"]["num-cpus"]),
                "GPU": float(group["rayStartParams"]["num-gpus"]),
            },
            labels=group["labels"],
        )
        for name, group in groups_of(service).items()
        for index in range(group.get("replicas", 1) * group.get("numOfHosts", 1))
    ]


@pytest.mark.parametrize("values", SITUATIONS)
def test_the_builder_takes_the_serve_config(values: Values) -> None:
    raw = serve_config(values)
    parsed = ServeDeploySchema.model_validate(raw)
    check_keys(ServeDeploySchema, raw, "serveConfigV2")
    (application,) = parsed.applications
    check_keys(type(application), raw["applications"][0], "applications[0]")
    for deployment, keys in zip(
        application.deployments, raw["applications"][0].get("deployments", []), strict=True
    ):
        check_keys(type(deployment), keys, deployment.name)
        assert deployment.name in {INGRESS, COORDINATOR, DRAFT_POOL}
    assert application.name == APPLICATION
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    arguments = parse_arguments(application.args)
    assert arguments.config.cluster.channels.bind == "node"
    assert arguments.insecure == (arguments.config.http.api_keys_file is None)


@pytest.mark.parametrize("values", SITUATIONS)
def test_the_pools_hold_what_is_to_be_placed(values: Values) -> None:
    """And not a pod more: without the last target pod, or the last draft pod, it does not fit."""
    service = ray_service(values)
    config = parse_arguments(serve_config(values)["applications"][0]["args"]).config
    has_drafter = config.speculative_config.drafts_in_pool
    assert ("draft" in groups_of(service)) == has_drafter

    def place(nodes: list[NodeSnapshot]) -> None:
        ranks = RanksPerModel.of(config.engine())
        require_plan(plan_placement(config.cluster, nodes, has_drafter=has_drafter, ranks=ranks))

    nodes = nodes_of(service)
    place(nodes)
    for pool in ("target", "draft") if has_drafter else ("target",):
        fewer = list(nodes)
        fewer.remove([node for node in nodes if node.labels["pool"] == pool][-1])
        with pytest.raises(ResourceError, match=f"pool={pool}"):
            place(fewer)


def test_ranks_of_a_layer_may_leave_a_pod_where_a_group_has_more_pods_than_stages() -> None:
    """Nobody looks at nodes here: what Ray is asked for must not be a node that no pod is."""
    for values, strategy in ((TENSOR_PARALLEL_OVER_PODS, "PACK"), (values_of("gpu"), "STRICT_PACK")):
        config = parse_arguments(serve_config(values)["applications"][0]["args"]).config
        ranks = RanksPerModel.of(config.engine())
        plan = unchecked_placement(config.cluster, has_drafter=False, ranks=ranks)
        assert plan.target.strategy == strategy


@pytest.mark.parametrize(
    ("values", "fewest"),
    [
        pytest.param({}, (2, 3), id="no bounds"),
        pytest.param(scaling("target_groups", min_groups=0, max_groups=4), (0, 3), id="groups to zero"),
        pytest.param(scaling("draft_pool", max_workers=3), (2, 1), id="default of the bounds"),
        pytest.param(
            {
                "serve": {
                    "deployments": [
                        {"name": "Coordinator", "autoscaling_config": {"min_replicas": 1, "max_replicas": 3}},
                        {"name": "DraftPool", "autoscaling_config": {"min_replicas": 2, "max_replicas": 3}},
                    ]
                }
            },
            (1, 2),
            id="of Serve alone",
        ),
        pytest.param(with_options("Coordinator", num_replicas=1), (1, 3), id="a number"),
    ],
)
def test_pods_are_as_few_as_replicas_may_be(values: Values, fewest: tuple[int, int]) -> None:
    pools = {"target": {"groups": 2, "maxGroups": 4}, "draft": {"workers": 3}}
    groups = groups_of(ray_service(merged(DRAFTED | pools | SCALED, values)))
    assert tuple(groups[pool]["minReplicas"] for pool in ("target", "draft")) == fewest
    assert [groups[pool]["replicas"] for pool in ("target", "draft")] == [2, 3]


def test_models_whose_folders_are_spelled_alike_are_fetched_by_containers_of_their_own() -> None:
    folders = ("T.1", "t-1", "long" * 20 + "a", "long" * 20 + "b")
    models = [{"repository": "org/m", "revision": "abc", "folder": folder} for folder in folders]
    for pod in pods_of(render({"models": {"volume": {"emptyDir": {}}, "download": models}})):
        names = [one["name"] for one in pod.get("initContainers", ())]
        assert len(set(names)) == len(names)
        assert all(len(name) <= 63 for name in names)


def fetching(**more: Any) -> Values:
    """Each pod fetches a model into a volume of its own."""
    return {"models": EVERYTHING["models"], **more}


@pytest.mark.parametrize(("node_type", "is_fetched"), [("head", True), ("redis-cleanup", False)])
def test_redis_is_emptied_without_fetching_models(node_type: str, is_fetched: bool, tmp_path: Path) -> None:
    """KubeRay does so in a pod like the head's, and gives it five minutes."""
    (fetch,) = groups_of(ray_service(fetching()))["head"]["template"]["spec"]["initContainers"]
    (told,) = [one for one in fetch["env"] if one["name"] == "NODE_TYPE"]
    assert told["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.labels['ray.io/node-type']"}}
    double = tmp_path / "hf"
    double.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$CALLS"\nexit 7\n')
    double.chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "NODE_TYPE": node_type,
    }
    done = subprocess.run(fetch["command"], env=environment, check=False, timeout=60)
    assert done.returncode == (7 if is_fetched else 0), "that of hf"
    assert calls.exists() == is_fetched
    if is_fetched:
        wanted = ["download", "org/m", "--revision", "abc", "--local-dir", "/models/Target_1.0"]
        assert calls.read_text().splitlines() == wanted


def test_models_are_fetched_through_what_all_containers_get() -> None:
    """A proxy, a mirror of the hub, a certificate authority."""
    mirror = {"name": "HF_ENDPOINT", "value": "https://hub.example"}
    token = {"name": "HF_TOKEN", "value": "x"}
    mount = {"name": "v", "mountPath": "/v"}
    values = fetching(
        huggingFace={"existingSecret": "hf"},
        extraEnv=[mirror, token, {"name": "NODE_TYPE", "value": "x"}],
        extraVolumes=[{"name": "v", "emptyDir": {}}],
        extraVolumeMounts=[mount],
    )
    for group in groups_of(ray_service(values)).values():
        (fetch,) = group["template"]["spec"]["initContainers"]
        assert [one["name"] for one in fetch["env"]] == ["HOME", "HF_TOKEN", "HF_ENDPOINT", "NODE_TYPE"]
        assert fetch["env"][1:3] == [token, mirror]
        assert "valueFrom" in fetch["env"][-1]
        assert mount in fetch["volumeMounts"]


def test_of_each_environment_variable_there_is_the_last(kuberay_schema: dict[str, Any]) -> None:
    """Kubernetes refuses a list that has one twice."""
    values = merged(
        DRAFTED | SCALED,
        {
            "extraEnv": [
                {"name": "A", "value": "1"},
                {"name": "RAY_worker_niceness", "value": "5"},
                {"name": "A", "value": "2"},
            ],
            "target": {
                "extraEnv": [
                    {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    {"name": "HF_HUB_OFFLINE", "value": "0"},
                ]
            },
        },
    )
    service = ray_service(values)
    assert kuberay.problems(service, kuberay_schema) == []
    before = groups_of(ray_service(DRAFTED | SCALED))
    for name, group in groups_of(service).items():
        (container,), (plain,) = (one["template"]["spec"]["containers"] for one in (group, before[name]))
        names = [one["name"] for one in container["env"]]
        assert names == [*(one["name"] for one in plain["env"]), "A"]
        found = {one["name"]: one for one in container["env"]}
        assert found["RAY_worker_niceness"]["value"] == "5"
        assert found["HF_HUB_OFFLINE"]["value"] == ("0" if name == "target" else "1")
        assert found["A"].get("value") == (None if name == "target" else "2")
    scaler = service["spec"]["rayClusterConfig"]["autoscalerOptions"]["env"]
    assert [one["name"] for one in scaler] == ["HOME", "A", "RAY_worker_niceness"]


def test_pods_stay_where_nothing_moves_them() -> None:
    values = {"target": {"groups": 2}} | scaling("target_groups", max_groups=2)
    assert groups_of(ray_service(values))["target"]["minReplicas"] == 2


def test_a_draft_model_among_several_drafters_has_pods_of_its_own() -> None:
    lookup = {"name": "a", "method": "ngram"}
    small = {"name": "b", "method": "draft_model", "model": "/models/b"}
    for drafters, has_pool in (([lookup], False), ([lookup, small], True)):
        values = {"config": {"speculative_config": {"method": "several", "drafters": drafters}}}
        assert ("draft" in groups_of(ray_service(values))) == has_pool
        config = parse_arguments(serve_config(values)["applications"][0]["args"]).config
        assert len(config.speculative_config.drafters) == len(drafters)


@pytest.mark.parametrize("kind", ["python", "haproxy"])
def test_every_pod_knows_which_proxy_runs(kind: ProxyKind) -> None:
    service = ray_service({"ingress": {"proxy": kind}})
    pools = service["spec"]["rayClusterConfig"]
    for pool in (pools["headGroupSpec"], *pools["workerGroupSpecs"]):
        (container,) = pool["template"]["spec"]["containers"]
        told = {one["name"]: one["value"] for one in container["env"] if one["name"].startswith("RAY_SERVE")}
        del told["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"]  # not of proxies
        assert told == proxy_environment(kind)


def test_a_null_takes_back_what_another_file_gave() -> None:
    config = {"cluster": {"target_groups": {"autoscaling": None}}, "http": {"served_model_name": None}}
    assert serve_config({"config": config})["applications"][0]["name"] == "drafthouse"
    override = {"name": "Coordinator", "autoscaling_config": None, "max_ongoing_requests": 100}
    assert serve_config({"serve": {"deployments": [override]}})


def test_pools_may_be_empty_where_the_doors_know_it() -> None:
    values = merged(overriding("Coordinator", 0, 1), scaling("target_groups", min_groups=0, max_groups=1))
    (_, override) = serve_config(merged(values, {"autoscaling": {"enabled": True}}))["applications"][0][
        "deployments"
    ]
    assert override["autoscaling_config"]["min_replicas"] == 0


def test_doors_and_dashboard_listen_where_pods_have_addresses() -> None:
    for host in ("0.0.0.0", "::"):
        values = {"serve": {"host": host}}
        assert serve_config(values)["http_options"]["host"] == host
        head = ray_service(values)["spec"]["rayClusterConfig"]["headGroupSpec"]
        assert head["rayStartParams"]["dashboard-host"] == host


def test_a_chart_that_has_this_one_as_a_part_may_depend_on_a_condition() -> None:
    assert serve_config({"enabled": True, "tags": {"llm": True}})


def test_overrides_of_deployments_reach_serve() -> None:
    autoscaling = {"min_replicas": 1, "max_replicas": 3}
    values = {
        "autoscaling": {"enabled": True},
        "target": {"maxGroups": 3},
        "serve": {
            "deployments": [
                {"name": "Coordinator", "num_replicas": "auto", "autoscaling_config": autoscaling},
                {"name": "Ingress", "max_ongoing_requests": 500},
            ]
        },
    }
    deployments = {item["name"]: item for item in serve_config(values)["applications"][0]["deployments"]}
    ServeDeploySchema.model_validate(serve_config(values))
    assert deployments["Coordinator"]["autoscaling_config"] == autoscaling
    assert deployments["Ingress"]["max_ongoing_requests"] == 500
    assert deployments["Ingress"]["ray_actor_options"]["label_selector"] == {"pool": "ingress"}


def test_overrides_may_have_all_that_ray_knows() -> None:
    policy = {"policy_function": "module:function", "policy_kwargs": {"any": 1}}
    override = {
        "name": "Coordinator",
        "autoscaling_config": {"max_replicas": 1, "policy": policy},
        "backpressure_config": {"status_code": 429},
        "logging_config": None,
        "ray_actor_options": {"runtime_env": {"env_vars": {"A": "b"}}},
        "user_config": {"any": "thing"},
    }
    values: Values = {"serve": {"deployments": [override], "autoscalingPolicy": policy}}
    application = serve_config(values)["applications"][0]
    assert application["deployments"][1] == override
    assert application["autoscaling_policy"] == policy


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("number", [{}, {"num_replicas": None}, {"num_replicas": "auto"}], ids=json.dumps)
def test_doors_may_scale_between_bounds(replicas: int, number: Values) -> None:
    """Serve takes no number of replicas beside them."""
    values = merged(overriding("Ingress", 1, 2), {"ingress": {"replicas": replicas}})
    values["serve"]["deployments"][0] |= number
    config = serve_config(values)
    ServeDeploySchema.model_validate(config)
    (door,) = config["applications"][0]["deployments"]
    assert door["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 2}
    assert door.get("num_replicas") == number.get("num_replicas")
    assert door["ray_actor_options"]["label_selector"] == {"pool": "ingress"}


@pytest.mark.parametrize(
    ("values", "tag"),
    [
        pytest.param({}, f"{VERSION}-cuda", id="defaults"),
        pytest.param({"target": {"gpu": 0}}, VERSION, id="no draft pods"),
        pytest.param(
            merged(fetching(**DRAFTED), {"target": {"gpu": 0}}), f"{VERSION}-cuda", id="drafts on GPUs"
        ),
        pytest.param(values_of("cpu-dev"), VERSION, id="CPUs alone"),
        pytest.param({"image": {"tag": "mine"}}, "mine", id="given"),
    ],
)
def test_all_pods_have_the_image_that_those_with_gpus_need(values: Values, tag: str) -> None:
    """A Ray cluster is of one Python and one Ray."""
    images = {
        container["image"]
        for pod in pods_of(render(values))
        for container in (*pod["containers"], *pod.get("initContainers", ()))
    }
    assert images == {f"drafthouse:{tag}"}
    built = (CHART.parents[1] / "deploy" / "docker" / "Dockerfile").read_text()
    assert tag == "mine" or f" -t drafthouse:{tag} ." in built


def test_ray_is_the_one_that_the_tests_run_with() -> None:
    cluster = ray_service({})["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == metadata.version("ray")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == VERSION


# ----------------------------------------------------------------------------------------------- security


def pods_of(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (service,) = of_kind(manifests, "RayService")
    pods = [group["template"]["spec"] for group in groups_of(service).values()]
    return pods + [pod["spec"] for pod in of_kind(manifests, "Pod")]


@pytest.mark.parametrize("values", SITUATIONS)
def test_containers_can_do_nothing_that_they_need_not(values: Values) -> None:
    for pod in pods_of(render(values)):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            written = {mount["mountPath"] for mount in container.get("volumeMounts", ())}
            if container["name"].startswith("ray-"):
                assert {"/tmp", "/dev/shm", "/home/drafthouse"} <= written
        mounted = {m["name"] for c in pod["containers"] for m in c.get("volumeMounts", ())}
        assert mounted <= {volume["name"] for volume in pod.get("volumes", ())}


def test_ids_may_be_left_to_the_cluster() -> None:
    """OpenShift gives each namespace its own, and admits no pod that asks for others."""
    ids = ("runAsUser", "runAsGroup", "fsGroup")
    for pod in pods_of(render({"podSecurityContext": dict.fromkeys(ids)})):
        assert not pod["securityContext"].keys() & set(ids)
        assert pod["securityContext"]["runAsNonRoot"] is True
    assert all(pod["securityContext"].keys() > set(ids) for pod in pods_of(render({})))


def test_only_the_head_has_a_token_and_only_with_the_autoscaler() -> None:
    for values in ({}, EVERYTHING):
        for name, group in groups_of(ray_service(values)).items():
            has_token = group["template"]["spec"].get("automountServiceAccountToken", True)
            assert has_token == (name == "head" and values is EVERYTHING)


def test_ray_asks_for_a_token_unless_told_otherwise() -> None:
    assert ray_service({})["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    off = ray_service({"rayAuth": {"enabled": False}})["spec"]["rayClusterConfig"]["authOptions"]
    assert off == {"mode": "disabled"}
    assert "rayAuth.enabled" in render_texts({"rayAuth": {"enabled": False}})["NOTES.txt"]


def test_network_policy_lets_in_requests_metrics_and_the_operator_and_out_dns() -> None:
    (policy,) = of_kind(render({}), "NetworkPolicy")
    inside, *others = policy["spec"]["ingress"]
    assert inside == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}
    ports = [{port["port"] for port in rule["ports"]} for rule in others]
    assert ports == [{8000}, {8000, 8080}, {8265, 8000}]
    assert all("from" in rule for rule in others[1:])
    egress = policy["spec"]["egress"]
    resolvers = egress[1]
    assert {(port["port"], port["protocol"]) for port in resolvers["ports"]} == {
        (port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")
    }
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in resolvers["to"], "of nodes, not of a pod"
    namespaces = [one["namespaceSelector"]["matchLabels"] for one in resolvers["to"] if "ipBlock" not in one]
    assert [one["kubernetes.io/metadata.name"] for one in namespaces] == ["kube-system", "openshift-dns"]
    own = {"networkPolicy": {"dns": [{"ipBlock": {"cidr": "10.0.0.10/32"}}], "dnsPorts": [5300]}}
    (policy_of_mine,) = of_kind(render(own), "NetworkPolicy")
    assert policy_of_mine["spec"]["egress"][1] == {
        "ports": [{"port": 5300, "protocol": "UDP"}, {"port": 5300, "protocol": "TCP"}],
        "to": own["networkPolicy"]["dns"],
    }
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    for group in groups_of(ray_service({})).values():
        assert selected <= group["template"]["metadata"]["labels"].items()


# ------------------------------------------------------------------------------------------------- others


def test_what_looks_like_yaml_is_text() -> None:
    values: Values = {
        "expose": {"enabled": True, "host": "*.llm.example", "tlsSecret": "123", "className": "1e3"},
        "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379", "existingSecret": "1"},
        "apiKeys": {"existingSecret": "42", "key": "0x10"},
        "models": {"mountPath": "/my: models", "claim": "13"},
        "rayAuth": {"existingSecret": "9"},
        "tls": {"existingSecret": "10"},
        "head": {"priorityClassName": "11", "runtimeClassName": "12"},
    }  # fmt: skip
    merged_values = merged(
        values,
        {
            "gcsFaultTolerance": {"key": "2", "externalStorageNamespace": "3", "username": "4"},
            "upgrade": {"type": "None"},
            "fullnameOverride": "llm",
        },
    )

    def texts(node: Any) -> set[str]:
        if isinstance(node, dict):
            return set().union(*(texts(part) for part in node.values()))
        if isinstance(node, list):
            return set().union(*(texts(part) for part in node))
        return {node} if isinstance(node, str) else set()

    rendered = texts(render(merged_values, name="5"))
    assert texts(merged_values) | {"5"} <= rendered


@pytest.mark.parametrize("name", ["llm", "drafthouse", "a" * 53])
def test_names_leave_room_for_kuberays_suffixes(name: str) -> None:
    """KubeRay takes 47 characters."""
    (service,) = of_kind(render({}, name=name), "RayService")
    assert "drafthouse" in service["metadata"]["name"] or len(name) > 40
    assert len(service["metadata"]["name"]) <= 47


def test_names_that_kuberay_would_refuse_are_refused() -> None:
    """It takes DNS labels that begin with a letter; Helm takes releases that begin with a digit."""
    with pytest.raises(helm_python.HelmError, match="1llm-drafthouse is no name"):
        render({}, name="1llm")
    assert render({"fullnameOverride": "llm"}, name="1llm")


@pytest.mark.parametrize(
    ("size", "is_enough"),
    [("513Mi", True), ("0.6Gi", True), ("537M", True), ("1T", True), ("512Mi", False), ("536870k", False)],
)
def test_shared_memory_holds_rays_object_store(size: str, is_enough: bool) -> None:
    """What does not fit, Ray puts into a file."""
    values: Values = {"ingress": {"shmSize": size}}
    if is_enough:
        assert render(values)
        return
    with pytest.raises(helm_python.HelmError, match=rf"ingress\.shmSize: {size} does not hold"):
        render(values)


def budgets(values: Values) -> dict[str, Any]:
    found = of_kind(render(values), "PodDisruptionBudget")
    assert all(item["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for item in found)
    return {item["metadata"]["name"].rpartition("-")[2]: item["spec"]["minAvailable"] for item in found}


def test_budgets_follow_the_pools() -> None:
    heads = {"method": "eagle3", "model": "/models/heads", "heads_at": "draft_pool"}
    many: Values = {"ingress": {"replicas": 2}, "target": {"groups": 3}, "draft": {"workers": 4}}
    for drafted in (DRAFTED, {"config": {"speculative_config": heads}}):
        assert budgets(drafted) == {"head": 1}, "a single pod that may go needs no budget"
        assert budgets(merged(drafted, many)) == {"head": 1, "ingress": 1, "target": 2, "draft": 3}
    all_of_two = {"target": {"groups": 2, "podDisruptionBudget": {"maxUnavailable": 0}}}
    assert budgets(all_of_two) == {"head": 1, "target": 2}
    assert budgets(merged(TENSOR_PARALLEL_OVER_PODS, all_of_two)) == {"head": 1, "target": 4}
    assert budgets(values_of("magicdec")).keys() == {"head", "target"}
    assert budgets(values_of("cpu-dev")) == {}


def test_budgets_count_the_pods_that_scaling_leaves() -> None:
    scaled = merged(
        {"target": {"groups": 3, "maxGroups": 4}} | SCALED,
        scaling("target_groups", min_groups=2, max_groups=4),
    )
    found = {
        item["metadata"]["name"]: item["spec"] for item in of_kind(render(scaled), "PodDisruptionBudget")
    }
    assert found["llm-drafthouse-target"]["minAvailable"] == 1


THREE_GROUPS: Values = {"target": {"groups": 3}}
THREE_DOORS: Values = {"ingress": {"replicas": 3}}
THREE_WORKERS: Values = merged(DRAFTED, {"draft": {"workers": 3}})


@pytest.mark.parametrize(
    ("values", "least"),
    [
        pytest.param(
            merged(THREE_GROUPS, scaling("target_groups", min_groups=1, max_groups=3)), {}, id="one group"
        ),
        pytest.param(
            merged(THREE_GROUPS, scaling("target_groups", min_groups=2, max_groups=3)),
            {"target": 1},
            id="two groups",
        ),
        pytest.param(merged(THREE_GROUPS, overriding("Coordinator", 2, 3)), {"target": 1}, id="of Serve's"),
        pytest.param(
            merged(THREE_GROUPS, with_options("Coordinator", num_replicas=1)), {}, id="one group, told"
        ),
        pytest.param(merged(THREE_GROUPS, with_options("Coordinator", num_replicas="auto")), {}, id="auto"),
        pytest.param(
            merged(THREE_GROUPS, with_options("Coordinator", max_ongoing_requests=9)),
            {"target": 2},
            id="no number",
        ),
        pytest.param(merged(THREE_WORKERS, scaling("draft_pool", max_workers=3)), {}, id="one worker"),
        pytest.param(
            merged(THREE_WORKERS, scaling("draft_pool", min_workers=2, max_workers=3)),
            {"draft": 1},
            id="two workers",
        ),
        pytest.param(merged(THREE_DOORS, overriding("Ingress", 1, 3)), {}, id="one door"),
        pytest.param(
            merged(THREE_DOORS, with_options("Ingress", num_replicas=2)), {"ingress": 1}, id="two doors"
        ),
        pytest.param(
            merged(THREE_DOORS, with_options("Ingress", max_replicas_per_node=2)),
            {"ingress": 1},
            id="doors together",
        ),
        pytest.param(
            merged(TENSOR_PARALLEL_OVER_PODS, {"ingress": {"enabled": False}}),
            {"target": 1},
            id="ranks without a proxy",
        ),
        pytest.param(
            merged(TENSOR_PARALLEL_OVER_PODS, scaling("target_groups", min_groups=1, max_groups=2)),
            {"target": 3},
            id="ranks that need none",
        ),
    ],
)
def test_budgets_count_pods_that_are_ready_however_few_replicas_there_are(
    values: Values, least: dict[str, int]
) -> None:
    """Pods stay without the autoscaler, but those without a replica are not ready: none could be evicted."""
    assert budgets(values) == {"head": 1, **least}


def test_budgets_count_spare_pods_where_these_are_ready() -> None:
    """Of groups of one pod they are not: KubeRay asks for a proxy, which is where a coordinator is."""
    for values, least in (({"target": {"groups": 3}}, 2), (TENSOR_PARALLEL_OVER_PODS, 5)):
        found = of_kind(render(merged(values, SPARE)), "PodDisruptionBudget")
        (budget,) = [item for item in found if item["metadata"]["name"].endswith("-target")]
        assert budget["spec"]["minAvailable"] == least


def test_clients_come_through_the_pods_for_the_door_alone() -> None:
    """KubeRay's Service has all workers of one cluster behind it: the port leaves out those without it."""
    values = merged(EVERYTHING, {"tls": {"existingSecret": ""}})
    manifests = render(values)
    assert "llm-drafthouse" not in {one["metadata"]["name"] for one in of_kind(manifests, "Service")}
    spec = ray_service(values)["spec"]
    assert spec["excludeHeadPodFromServeSvc"] is True
    service = spec["serveService"]
    assert (service["metadata"]["name"], service["metadata"]["annotations"]) == ("llm-drafthouse", {"a": "b"})
    assert service["spec"]["type"] == "LoadBalancer"
    assert "selector" not in service["spec"], "KubeRay's own, by which it goes from one cluster to the next"
    (port,) = service["spec"]["ports"]
    reached = {}
    for name, group in groups_of({"spec": spec}).items():
        (container,) = group["template"]["spec"]["containers"]
        named = {one["name"]: one["containerPort"] for one in container["ports"]}
        # KubeRay takes a Service's port from the head's container and replaces it by ours of the same name.
        assert named.get("serve") == (None if name == "ingress" else 8000)
        if port["targetPort"] in named:
            reached[name] = named[port["targetPort"]]
    assert reached == {"ingress": 8000}
    assert (port["name"], port["port"]) == ("serve", 8000)
    texts = render_texts(values)
    (rule,) = of_kind(manifests, "Ingress")[0]["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == "llm-drafthouse"
    assert "http://llm-drafthouse:8000/health" in texts["tests/health.yaml"]
    notes = " ".join(texts["NOTES.txt"].replace("\\\n", " ").split())
    (forwarded,) = re.findall(r"port-forward \$\((.*?)\) 8000", notes)
    # Of a Service kubectl takes any of its pods, and most of these have no port of that name.
    assert "-l app.kubernetes.io/instance=llm,app.kubernetes.io/component=ingress" in forwarded
    assert "port-forward svc/" not in notes


def test_the_heads_pod_keeps_the_name_by_which_kuberay_looks_for_it() -> None:
    """RELEASE-head-svc selects it by app.kubernetes.io/name: kuberay, which a label of ours would replace."""
    for name, group in groups_of(ray_service(EVERYTHING)).items():
        labels = group["template"]["metadata"]["labels"]
        assert ("app.kubernetes.io/name" in labels) == (name != "head")
        assert labels["app.kubernetes.io/component"] == name


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_door_has_a_pod_of_its_own(replicas: int) -> None:
    """A pod whose door came back on another one would never be ready."""
    (door,) = serve_config({"ingress": {"replicas": replicas}})["applications"][0]["deployments"]
    assert door["num_replicas"] == replicas
    limits = (door.get("max_replicas_per_node"), door.get("max_surge_percent"))
    # With no pod to spare there is no room for the next one beside it.
    assert limits == ((1, 0) if replicas > 1 else (None, None))


def test_limits_of_doors_can_be_overridden() -> None:
    values: Values = {
        "ingress": {"replicas": 2},
        "serve": {"deployments": [{"name": "Ingress", "max_replicas_per_node": 2}]},
    }
    (door,) = serve_config(values)["applications"][0]["deployments"]
    assert (door["max_replicas_per_node"], door["max_surge_percent"]) == (2, 0)


@pytest.mark.parametrize(
    "values", [values_of("multi-host"), TENSOR_PARALLEL_OVER_PODS], ids=["stages", "ranks"]
)
def test_kuberay_has_the_pods_of_a_group_together_unless_told_otherwise(values: Values) -> None:
    """Ray makes groups of whichever pods are free; KubeRay ends those of a replica together."""
    groups, nodes = values["target"]["groups"], values["target"]["nodesPerGroup"]
    for is_together, replicas, hosts in ((True, groups, nodes), (False, groups * nodes, 1)):
        target = groups_of(ray_service(merged(values, {"target": {"multiHost": is_together}})))["target"]
        assert target["numOfHosts"] == hosts
        assert (target["minReplicas"], target["replicas"], target["maxReplicas"]) == (replicas,) * 3


def test_pods_of_target_groups_scale_by_whole_groups() -> None:
    by_pods = merged(
        TENSOR_PARALLEL_OVER_PODS,
        {"target": {"multiHost": False, "maxGroups": 4}}
        | SCALED
        | scaling("target_groups", min_groups=1, max_groups=4),
    )
    one_set = merged(
        TENSOR_PARALLEL_OVER_PODS,
        {"target": {"groups": 1}} | SCALED | scaling("target_groups", min_groups=0, max_groups=1),
    )
    for values, sizes in ((by_pods, (2, 4, 8)), (one_set, (0, 1, 1))):
        target = groups_of(ray_service(values))["target"]
        assert (target["minReplicas"], target["replicas"], target["maxReplicas"]) == sizes


def test_spare_pods_are_those_of_one_group_more() -> None:
    for values in ({"target": {"groups": 2}}, TENSOR_PARALLEL_OVER_PODS, values_of("multi-host")):
        spared = merged(values, SPARE)
        config = parse_arguments(serve_config(spared)["applications"][0]["args"]).config
        groups = config.cluster.target_groups
        for is_together in (True, False):
            service = ray_service(merged(spared, {"target": {"multiHost": is_together}}))
            target = groups_of(service)["target"]
            assert target["minReplicas"] == target["replicas"] == target["maxReplicas"]
            for num_more, fits in ((1, True), (2, False)):
                more = groups.model_copy(update={"num_groups": groups.num_groups + num_more})
                cluster = config.cluster.model_copy(update={"target_groups": more})
                plan = plan_placement(
                    cluster,
                    nodes_of(service),
                    has_drafter=config.speculative_config.drafts_in_pool,
                    ranks=RanksPerModel.of(config.engine()),
                )
                if fits:
                    require_plan(plan)
                else:
                    with pytest.raises(ResourceError, match="pool=target"):
                        require_plan(plan)


def test_spare_pods_are_beside_those_that_scaling_may_want() -> None:
    values = merged(ROOM, SPARE) | scaling("target_groups", min_groups=0, max_groups=2)
    target = groups_of(ray_service(values))["target"]
    assert (target["minReplicas"], target["replicas"], target["maxReplicas"]) == (1, 2, 3)


def test_more_or_fewer_pods_are_the_same_pods() -> None:
    """Where anything else differs, KubeRay makes another cluster beside the first."""

    def without_numbers(values: Values) -> dict[str, Any]:
        cluster = copy.deepcopy(ray_service(values)["spec"]["rayClusterConfig"])
        for group in cluster["workerGroupSpecs"]:
            for key in ("replicas", "minReplicas", "maxReplicas"):
                del group[key]
        return cluster

    doors: Values = {"ingress": {"replicas": 2}}
    more: Values = {"target": {"groups": 3, "spareGroups": 1}, "draft": {"workers": 2}}
    for values, changed in (
        (DRAFTED, more | doors),
        (values_of("cpu-dev"), more),
        (merged(DRAFTED, TENSOR_PARALLEL_OVER_PODS), more | doors),
    ):
        assert without_numbers(merged(values, changed)) == without_numbers(values)


def test_without_pods_for_the_door_it_is_behind_kuberays_service() -> None:
    values: Values = {"ingress": {"enabled": False}, "service": {"type": "NodePort"}}
    assert of_kind(render(values), "Service") == []
    assert ray_service(values)["spec"]["serveService"]["spec"] == {"type": "NodePort"}
    texts = render_texts(values)
    assert "http://llm-drafthouse-serve-svc:8000/health" in texts["tests/health.yaml"]
    assert "svc/llm-drafthouse-serve-svc 8000" in texts["NOTES.txt"]


def test_a_new_version_of_the_chart_alone_makes_no_new_cluster(tmp_path: Path) -> None:
    """KubeRay takes pods with other labels for another cluster."""
    chart = shutil.copytree(CHART, tmp_path / "drafthouse")
    file = chart / "Chart.yaml"
    file.write_text(file.read_text().replace("version: 0.1.0", "version: 0.1.1", 1))
    pinned: Values = {"image": {"tag": "1"}}
    (now,), (then,) = (of_kind(render(pinned, one), "RayService") for one in (CHART, chart))
    assert now["metadata"]["labels"] != then["metadata"]["labels"]
    assert now["spec"] == then["spec"]


def scale_commands(values: Values) -> str:
    """The commands that the notes of an upgrade print, with which pods become more or fewer."""
    loaded = helm_python.Chart.load(CHART)
    notes = loaded.render(values, name="llm", is_upgrade=True)["drafthouse/templates/NOTES.txt"].splitlines()
    (first,) = [index for index, line in enumerate(notes) if line.startswith("  cluster=")]
    (last,) = [index for index, line in enumerate(notes) if "patch raycluster" in line]
    return textwrap.dedent("\n".join(notes[first : last + 1]))


KUBECTL = """
    case "$*" in
      *"get rayservice llm-drafthouse"*) printf llm-drafthouse-x ;;
      *"get pods"*)
        [[ "$*" = *"ray.io/cluster=llm-drafthouse-x,ray.io/group="* ]] || exit 1
        all="$*"
        group=${all#*ray.io/group=}
        cat "$STATE/${group%% *}" ;;
      *"patch raycluster llm-drafthouse-x --type json -p "*) printf %s "${@: -1}" > "$STATE/patch" ;;
      *) exit 1 ;;
    esac"""


def scaled(
    values: Values, pods: dict[str, dict[str, bool]], folder: Path, **named: str
) -> tuple[dict[str, Any] | None, str]:
    """Run the commands beside such pods, by group and name, and whether they are ready.

    Return the patch by path (None: nothing is patched), and what else is said.
    """
    double = folder / "kubectl"
    double.write_text(f"#!/bin/bash\n{textwrap.dedent(KUBECTL)}\n")
    double.chmod(0o755)
    for group in ("ingress", "target", "draft"):
        its = pods.get(group, {})
        lines = [f"{name} {'True' if is_ready else 'False'}\n" for name, is_ready in its.items()]
        (folder / group).write_text("".join(lines))
    (folder / "patch").unlink(missing_ok=True)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "STATE": str(folder), **named}
    done = subprocess.run(
        ["sh", "-c", scale_commands(values)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    patched = (folder / "patch").read_text() if (folder / "patch").exists() else None
    assert (done.returncode == 0) == (patched is not None), done
    paths = None if patched is None else {one["path"]: one["value"] for one in json.loads(patched)}
    return paths, done.stderr


def test_notes_of_an_upgrade_say_how_pods_become_more(tmp_path: Path) -> None:
    many: Values = {"ingress": {"replicas": 2}, "target": {"groups": 3}, "draft": {"workers": 4}}
    for values in (
        merged(DRAFTED, many),
        values_of("cpu-dev"),
        merged(ROOM, scaling("target_groups", max_groups=2)),
        merged(TENSOR_PARALLEL_OVER_PODS, SPARE),
    ):
        assert "patch raycluster" not in render_texts(values)["NOTES.txt"], "it is not an upgrade"
        groups = ray_service(values)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        paths, _ = scaled(values, {}, tmp_path)
        assert paths is not None
        for index, group in enumerate(groups):
            path = f"/spec/workerGroupSpecs/{index}"
            assert paths[f"{path}/minReplicas"] == group["minReplicas"]
            assert paths[f"{path}/maxReplicas"] == group["maxReplicas"]
            is_scaled = values.get("autoscaling", {}).get("enabled", False)
            assert paths.get(f"{path}/replicas") == (None if is_scaled else group["replicas"])
            # With the autoscaler it is that which names pods.
            named: Values = {"workersToDelete": []}
            assert paths.get(f"{path}/scaleStrategy") == (None if is_scaled else named)


def test_pods_that_are_too_many_are_ended_where_nothing_runs(tmp_path: Path) -> None:
    """KubeRay would end the first ones of its list."""
    values = merged(DRAFTED, {"target": {"groups": 2}, "draft": {"workers": 1}})
    pods = {
        "ingress": {"i-1": False},
        "target": {"t-1": True, "t-2": False, "t-3": True, "t-4": False},
        "draft": {"d-1": True, "d-2": False},
    }
    patched, _ = scaled(values, pods, tmp_path)
    assert patched is not None
    ended = [
        patched[f"/spec/workerGroupSpecs/{index}/scaleStrategy"]["workersToDelete"] for index in range(3)
    ]
    assert ended == [[], ["t-2", "t-4"], ["d-2"]], "a door that starts anew stays"
    more, _ = scaled(merged(values, {"target": {"groups": 3}}), pods, tmp_path)
    assert more is not None
    assert more["/spec/workerGroupSpecs/1/scaleStrategy"] == {"workersToDelete": ["t-2"]}, (
        "and no more than that"
    )


def test_no_pod_is_ended_while_groups_that_are_too_many_still_run(tmp_path: Path) -> None:
    pods = {"ingress": {"i-1": True}, "target": {"t-1": True, "t-2": False, "t-3": True}}
    patched, said = scaled({}, pods, tmp_path)
    assert patched is None
    assert (
        said
        == "2 pods of target are too many, and nothing runs on 1, as far as is known: nothing is changed\n"
    )


@pytest.mark.parametrize(
    ("values", "pool"),
    [
        pytest.param(TENSOR_PARALLEL_OVER_PODS, "target", id="sets"),
        pytest.param(
            merged(TENSOR_PARALLEL_OVER_PODS, {"target": {"multiHost": False}}), "target", id="pods"
        ),
        pytest.param(
            merged(DRAFTED, {"draft": {"workers": 4, "probes": {"readiness": {"tcpSocket": {"port": 1}}}}}),
            "draft",
            id="a probe of one's own",
        ),
    ],
)
def test_pods_that_are_ready_whatever_runs_there_are_named_by_hand(
    values: Values, pool: str, tmp_path: Path
) -> None:
    names = [f"p-{number}" for number in range(6)]  # four are wanted
    pods = {pool: dict.fromkeys(names, True) | {"p-5": False}}  # not ready, whyever
    assert scaled(values, pods, tmp_path)[0] is None
    assert scaled(values, pods, tmp_path, **{f"IDLE_{pool.upper()}": "p-1"})[0] is None
    patched, _ = scaled(values, pods, tmp_path, **{f"IDLE_{pool.upper()}": "p-1 p-3"})
    assert patched is not None
    (ended,) = [
        patched[f"/spec/workerGroupSpecs/{index}/scaleStrategy"]["workersToDelete"]
        for index, group in enumerate(ray_service(values)["spec"]["rayClusterConfig"]["workerGroupSpecs"])
        if group["groupName"] == pool
    ]
    assert ended == ["p-1", "p-3"]


def test_changed_tolerations_make_other_pods() -> None:
    """KubeRay leaves them out where it looks for changes, so something else has to differ."""

    def seen_by_kuberay(key: str | None) -> dict[str, Any]:
        one = [] if key is None else [{"key": key, "operator": "Exists"}]
        values = {pool: {"tolerations": one} for pool in ("head", "ingress", "target", "draft")}
        groups = groups_of(ray_service(merged(DRAFTED, values)))
        for group in groups.values():
            assert group["template"]["spec"].pop("tolerations", []) == one
        return groups

    first, second, none = (seen_by_kuberay(key) for key in ("gpu", "spot", None))
    assert seen_by_kuberay("gpu") == first
    for name in first:
        assert first[name] != second[name] != none[name]
        assert "annotations" not in none[name]["template"]["metadata"]
    given = merged({"target": {"podAnnotations": {"a": "b"}}}, {"target": {"tolerations": [{"key": "gpu"}]}})
    annotations = groups_of(ray_service(given))["target"]["template"]["metadata"]["annotations"]
    assert annotations.pop("a") == "b"
    assert len(annotations) == 1


SERVE_FILE = CHART.parents[1] / "deploy" / "ray" / "serve.yaml"


@pytest.mark.parametrize(
    "file", [*sorted(CHART.glob("values-*.yaml")), SERVE_FILE], ids=lambda file: file.stem
)
def test_examples_give_a_draft_model_that_has_a_gpu_memory_of_it(file: Path) -> None:
    """Left out it is 256 MiB, whatever the GPU has: requests beyond that would go without drafts."""
    raw = yaml.safe_load(file.read_text())
    serve = raw if file == SERVE_FILE else serve_config(raw)
    arguments = serve["applications"][0]["args"]
    config = parse_arguments(arguments).config
    has_gpu = config.speculative_config.drafts_in_pool and config.cluster.draft_pool.bundle.num_gpus > 0
    assert has_gpu == (file.stem in {"values-gpu", "values-multi-host", "serve"})
    if has_gpu:
        assert config.speculative_config.cache.memory_fraction == 0.9


def test_pods_without_gpus_see_none() -> None:
    values = merged(DRAFTED, {"draft": {"gpu": 0}})
    service = ray_service(values)
    pods = {name: group["template"] for name, group in groups_of(service).items()}
    pods["head"] = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
    hidden = {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": ""}
    for name, pod in pods.items():
        found = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
        assert (hidden.items() <= found.items()) == (name != "target"), name
        assert name == "target" or "CUDA_VISIBLE_DEVICES" in found


@pytest.mark.parametrize(("cpus", "ranks"), [(8, 3), (2, 3), (7, 6), (8, 2), (1, 7)])
def test_ranks_never_ask_for_more_cpus_than_their_pod_has(cpus: int, ranks: int) -> None:
    """Ray counts in parts of 1/10000: three times 2.6667 would never be placed on 8."""
    values: Values = {
        "config": {"target": {"tensor_parallel_size": ranks}},
        "target": {"cpu": cpus, "gpu": 0},
    }
    config = yaml.safe_load(ray_service(values)["spec"]["serveConfigV2"])["applications"][0]["args"]["config"]
    each = config["cluster"]["target_groups"]["bundle"]["num_cpus"]
    parts = round(each * 10_000)
    assert parts == pytest.approx(each * 10_000, abs=1e-6)
    assert cpus * 10_000 - ranks < parts * ranks <= cpus * 10_000


def test_the_autoscaler_gets_what_every_ray_container_gets() -> None:
    options = ray_service(EVERYTHING)["spec"]["rayClusterConfig"]["autoscalerOptions"]
    assert EVERYTHING["extraEnv"][0] in options["env"]
    assert EVERYTHING["extraVolumeMounts"][0] in options["volumeMounts"]
    assert options["imagePullPolicy"] == "IfNotPresent"


def test_the_account_outlives_the_release_where_redis_is_emptied_by_it() -> None:
    (kept,) = of_kind(render(EVERYTHING), "ServiceAccount")
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (plain,) = of_kind(render({}), "ServiceAccount")
    assert "annotations" not in plain["metadata"]


def test_redis_may_have_users() -> None:
    secret = {"name": "redis", "key": "password"}
    for more, user in (
        ({}, None),
        ({"username": "ray"}, {"value": "ray"}),
        ({"usernameKey": "user"}, {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "user"}}}),
    ):
        cluster = ray_service(redis(existingSecret="redis", **more))["spec"]["rayClusterConfig"]
        options = cluster["gcsFaultToleranceOptions"]
        assert options.get("redisUsername") == user
        assert options["redisPassword"] == {"valueFrom": {"secretKeyRef": secret}}


def test_models_are_mounted_from_a_volume_that_is_not_written_to() -> None:
    def claim(values: Values) -> dict[str, Any]:
        volumes = groups_of(ray_service(values))["target"]["template"]["spec"]["volumes"]
        (source,) = [one["persistentVolumeClaim"] for one in volumes if one["name"] == "models"]
        return source

    assert claim({}) == {"claimName": "drafthouse-models", "readOnly": True}


@pytest.mark.parametrize(
    ("values", "everywhere"),
    [
        ({}, True),
        ({"config": {"speculative_config": {"method": "draft_model", "model": "/models/draft"}}}, True),
        ({"models": {"volume": {"hostPath": {"path": "/srv/models"}}}}, False),
        ({"config": {"target": {"model": "/nvme/target"}}}, False),
        ({"config": {"speculative_config": {"method": "draft_model", "model": "/nvme/draft"}}}, False),
    ],
)
def test_a_model_that_is_not_on_the_common_claim_is_said_to_be_nowhere(
    values: Values, everywhere: bool
) -> None:
    """Else a wrong path would be found out by workers, when the group before has ended."""
    arguments = serve_config(values)["applications"][0]["args"]
    assert arguments.get("models_everywhere", False) == everywhere


def test_the_test_pod_runs_where_the_door_may() -> None:
    values: Values = {
        "image": {"pullSecrets": [{"name": "registry"}]},
        "ingress": {"nodeSelector": {"kind": "cpu"}, "tolerations": [{"key": "cpu", "operator": "Exists"}]},
    }
    (pod,) = of_kind(render(values), "Pod")
    assert pod["spec"]["imagePullSecrets"] == values["image"]["pullSecrets"]
    assert pod["spec"]["nodeSelector"] == values["ingress"]["nodeSelector"]
    assert pod["spec"]["tolerations"] == values["ingress"]["tolerations"]


def probes_of(values: Values) -> dict[str, Values]:
    """Probes by pool."""
    probes = {}
    for name, group in groups_of(ray_service(values)).items():
        (container,) = group["template"]["spec"]["containers"]
        probes[name] = {key: probe for key, probe in container.items() if key.endswith("Probe")}
    return probes


def test_probes_are_kuberays_unless_given() -> None:
    """It has its own only where there are none."""
    for values in (DRAFTED, merged(DRAFTED, SPARE), merged(DRAFTED, {"ingress": {"enabled": False}})):
        assert not any(probes_of(values).values())
    given = {"readinessProbe": {"exec": {"command": ["true"]}}}
    values = merged(EVERYTHING, {"tls": {"existingSecret": ""}})
    assert probes_of(values) == {"head": {}, "ingress": {}, "target": {}, "draft": given}


def test_pods_with_ranks_alone_are_ready_without_a_proxy() -> None:
    """KubeRay's probe asks for one: of a group's pods that of the coordinator has it."""
    for values in (values_of("multi-host"), merged(DRAFTED, TENSOR_PARALLEL_OVER_PODS)):
        probes = probes_of(values)
        (command,) = [probe["exec"]["command"][-1] for probe in probes.pop("target").values()]
        assert "local_raylet_healthz" in command
        assert ":8000" not in command
        assert not any(probes.values())
    doorless = merged(TENSOR_PARALLEL_OVER_PODS, {"ingress": {"enabled": False}})
    assert probes_of(doorless)["target"] == {}, "clients would be sent to where nobody answers"


def test_dashboards_and_rules_are_taken_as_they_are(tmp_path: Path) -> None:
    """Grafana's own braces are not Helm's."""
    chart = shutil.copytree(CHART, tmp_path / "drafthouse")
    dashboard = {"uid": "x", "panels": [{"targets": [{"legendFormat": "{{pool}}"}]}]}
    rules = {
        "groups": [
            {"name": "g", "rules": [{"alert": "A", "expr": "up == 0", "annotations": {"s": "{{ $value }}"}}]}
        ]
    }
    for folder in ("dashboards", "rules"):
        (chart / folder).mkdir(exist_ok=True)
    (chart / "dashboards" / "some_board.json").write_text(json.dumps(dashboard, indent=1))
    (chart / "rules" / "some.yaml").write_text(yaml.safe_dump(rules))
    manifests = render(EVERYTHING, chart)
    boards = {item["metadata"]["name"]: item for item in of_kind(manifests, "ConfigMap")}
    board = boards["llm-drafthouse-dashboard-some-board"]
    assert json.loads(board["data"]["some_board.json"]) == dashboard
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    found = {item["metadata"]["name"]: item["spec"] for item in of_kind(manifests, "PrometheusRule")}
    assert found["llm-drafthouse-some"] == rules
    assert {"llm-x", "llm-y"} <= boards.keys()


def test_dashboards_and_rules_are_what_the_code_says() -> None:
    there = {
        file: file.read_text() for folder in helm_monitoring.FOLDERS for file in (CHART / folder).iterdir()
    }
    assert there == helm_monitoring.rendered(), "run scripts/helm_monitoring.py"


def test_every_dashboard_and_alert_is_rendered() -> None:
    manifests = render(EVERYTHING)
    files = {
        name: text for item in of_kind(manifests, "ConfigMap") for name, text in item.get("data", {}).items()
    }
    pages = [grafana_json(page) for page in ALL_DASHBOARDS]
    assert {name: json.loads(text) for name, text in files.items()} == {
        f"{page['uid']}.json": page for page in pages
    }
    (rules,) = of_kind(manifests, "PrometheusRule")
    without_links = yaml.safe_load(rules_yaml())
    for rule in itertools.chain.from_iterable(group["rules"] for group in without_links["groups"]):
        rule.get("annotations", {}).pop("runbook_url", None)
    assert rules["spec"] == without_links
    url = "https://example.com/docs/operations"
    published = merged(EVERYTHING, {"monitoring": {"prometheusRule": {"runbookUrl": url}}})
    (rules,) = of_kind(render(published), "PrometheusRule")
    assert rules["spec"] == yaml.safe_load(rules_yaml(runbook=url))
    off = render(
        merged(
            EVERYTHING,
            {"monitoring": {name: {"enabled": False} for name in ("dashboards", "prometheusRule")}},
        )
    )
    assert of_kind(off, "PrometheusRule") == []
    assert not any("dashboard" in item["metadata"]["name"] for item in of_kind(off, "ConfigMap"))


def test_the_door_is_scraped_once() -> None:
    manifests = render(EVERYTHING)
    (service,) = [
        one for one in of_kind(manifests, "Service") if one["metadata"]["name"].endswith("-metrics")
    ]
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "ingress", "they outlive the head"
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["door"]
    without: Values = {"ingress": {"enabled": False, "replicas": 1}, "tls": {"existingSecret": ""}}
    doorless = merged(EVERYTHING, without)
    (other,) = of_kind(render(doorless), "Service")
    assert other["spec"]["selector"]["app.kubernetes.io/component"] == "head"
    assert [port["targetPort"] for port in other["spec"]["ports"]] == ["serve"]
    (monitor,) = of_kind(manifests, "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (pods,) = of_kind(manifests, "PodMonitor")
    assert pods["metadata"]["labels"]["release"] == "prometheus"
    (dropped,) = pods["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    assert (dropped["action"], dropped["regex"]) == ("drop", "ray_drafthouse_.*")
    (alone,) = of_kind(render({"monitoring": {"podMonitor": {"enabled": True}}}), "PodMonitor")
    assert "metricRelabelings" not in alone["spec"]["podMetricsEndpoints"][0]


def test_releases_of_one_name_in_two_namespaces_are_two_jobs() -> None:
    """Prometheus has what the operator gives: `namespace`, and as `job` the name of the Service."""
    (monitor,) = of_kind(render(EVERYTHING), "ServiceMonitor")
    (relabeling,) = monitor["spec"]["endpoints"][0]["relabelings"]
    found = set()
    for namespace in ("staging", "production"):
        labels = {"namespace": namespace, "job": "llm-drafthouse-metrics"}
        value = relabeling["separator"].join(labels[name] for name in relabeling["sourceLabels"])
        found.add((labels | {relabeling["targetLabel"]: value})["job"])
    assert found == {"staging/llm-drafthouse-metrics", "production/llm-drafthouse-metrics"}


def test_releases_of_several_models_share_a_namespace() -> None:
    """Each serves one: nothing of the one is the other's, and no selector of it finds the other's pods."""
    values = merged(EVERYTHING, {"tls": {"existingSecret": ""}})
    first, second = (render(values, name=name) for name in ("large", "small"))
    names = [{(item["kind"], item["metadata"]["name"]) for item in both} for both in (first, second)]
    assert names[0].isdisjoint(names[1])
    (service,) = of_kind(second, "RayService")
    labels = [group["template"]["metadata"]["labels"] for group in groups_of(service).values()]
    labels += [item["metadata"]["labels"] for kind in ("Service", "Pod") for item in of_kind(second, kind)]
    selectors = [item["spec"]["selector"] for item in of_kind(first, "Service")]
    selectors += [item["spec"]["podSelector"]["matchLabels"] for item in of_kind(first, "NetworkPolicy")]
    for kind in ("PodDisruptionBudget", "PodMonitor", "ServiceMonitor"):
        selectors += [item["spec"]["selector"]["matchLabels"] for item in of_kind(first, kind)]
    assert len(selectors) >= 5
    assert not any(selector.items() <= found.items() for selector in selectors for found in labels)


def test_tls_reaches_everything_that_speaks_with_the_door() -> None:
    values = {"tls": {"existingSecret": "my-tls"}, "monitoring": {"serviceMonitor": {"enabled": True}}}
    manifests = render(values)
    options = ServeDeploySchema.model_validate(serve_config(values)).http_options
    for name, group in groups_of(ray_service(values)).items():
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "tls"]
        assert volume["secret"]["secretName"] == "my-tls"
        (place,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "tls"]
        assert (options.ssl_certfile, options.ssl_keyfile) == (f"{place}/tls.crt", f"{place}/tls.key")
        probe = container.get("readinessProbe", {}).get("exec", {}).get("command", [""])[-1]
        assert ("https://localhost:8000/-/healthz" in probe) == (name != "head")
    (pod,) = of_kind(manifests, "Pod")
    assert pod["spec"]["containers"][0]["command"][-1].startswith("https://")
    (monitor,) = of_kind(manifests, "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["scheme"] == "https"
    assert "curl -k https://127.0.0.1:8000/health" in render_texts(values)["NOTES.txt"]
    plain = ServeDeploySchema.model_validate(serve_config({})).http_options
    assert (plain.ssl_certfile, plain.ssl_keyfile) == (None, None)


def test_log_lines_are_json_where_that_is_asked_for() -> None:
    for values, wanted in (({}, None), ({"logFormat": "json"}, "json")):
        for group in groups_of(ray_service(values)).values():
            (container,) = group["template"]["spec"]["containers"]
            given = {variable["name"]: variable.get("value") for variable in container["env"]}
            assert given.get(FORMAT_VARIABLE) == wanted
        config = serve_config(values)
        assert config["logging_config"].get("encoding") == (wanted and wanted.upper())
        ServeDeploySchema.model_validate(config)


def test_notes_say_how_to_see_whether_a_door_is_there() -> None:
    """KubeRay's READY counts pods of target groups and draft workers, which have none."""
    lines = render_texts({})["NOTES.txt"].splitlines()
    (line,) = [line for line in lines if "get pods -l" in line and "component=ingress" in line]
    selector = dict(part.split("=") for part in line.split(" -l ")[1].split(","))
    for name, group in groups_of(ray_service({})).items():
        is_door = selector.items() <= group["template"]["metadata"]["labels"].items()
        assert is_door == (name == "ingress")
    assert "component=ingress" not in render_texts({"ingress": {"enabled": False}})["NOTES.txt"]


def test_notes_say_how_to_look_and_ask() -> None:
    notes = render_texts({})["NOTES.txt"]
    assert "kubectl -n serving get rayservice llm-drafthouse" in notes
    assert "Authorization: Bearer" in notes
    assert "WARNING: no API key" not in notes
    insecure = render_texts(values_of("cpu-dev"))["NOTES.txt"]
    assert "WARNING: no API key" in insecure
    assert "Authorization" not in insecure


@pytest.mark.parametrize("values", [{}, values_of("cpu-dev"), {"tls": {"existingSecret": "tls"}}])
def test_the_command_in_the_notes_is_one(values: Values) -> None:
    notes = render_texts(values)["NOTES.txt"]
    (line,) = [line for line in notes.splitlines() if "drafthouse status" in line]
    variables, _, arguments = line.partition("#")[0].partition("drafthouse status")
    commands = get_command(app)
    assert isinstance(commands, TyperGroup)
    context = commands.commands["status"].make_context("status", arguments.split())
    assert context.params["url"] == f"{'https' if values.get('tls') else 'http'}://127.0.0.1:8000"
    assert context.params["insecure"] == bool(values.get("tls")), "no certificate is of 127.0.0.1"
    assert ("DRAFTHOUSE_API_KEY" in variables) == ("Authorization: Bearer" in notes)


@pytest.mark.parametrize(
    ("values", "updates", "told"),
    [
        pytest.param({}, "auto", "an outage", id="one group"),
        pytest.param({"target": {"groups": 2}}, "auto", None, id="two"),
        pytest.param(SPARE, "surge", None, id="a spare one"),
        pytest.param(merged(SPARE, updating("auto")), "surge", None, id="a spare one, auto"),
        pytest.param(merged(SPARE, updating("in_place")), "in_place", "an outage", id="not for updates"),
        pytest.param(updating("surge"), "surge", "no pod for it", id="nothing to spare"),
        pytest.param(ROOM, "surge", None, id="what the autoscaler may add"),
        pytest.param(ROOM | scaling("target_groups", max_groups=1), "surge", None, id="more than wanted"),
        pytest.param(ROOM | scaling("target_groups", max_groups=2), "auto", "an outage", id="all wanted"),
        pytest.param(ROOM | overriding("Coordinator", 1, 2), "auto", "an outage", id="all wanted of Serve"),
        pytest.param(
            merged(ROOM, SPARE) | scaling("target_groups", max_groups=2),
            "surge",
            None,
            id="spare beside what is wanted",
        ),
        pytest.param(
            {"target": {"groups": 2}, "serve": {"deployments": [{"name": "Coordinator", "num_replicas": 1}]}},
            "surge",
            None,
            id="fewer than pods",
        ),
    ],
)
def test_updates_start_the_next_group_first_where_there_are_pods_for_it(
    values: Values, updates: str, told: str | None
) -> None:
    """The application sees only pods that are there: told `auto`, it replaces groups in place."""
    arguments = parse_arguments(serve_config(values)["applications"][0]["args"])
    assert arguments.config.cluster.updates == updates
    assert not arguments.config.cluster.check_resources
    notes = render_texts(values)["NOTES.txt"]
    for warning in ("an outage", "no pod for it"):
        assert (warning in notes) == (warning == told)
    assert ("target.spareGroups: 1 " in notes) == ((updates, told) == ("auto", "an outage")), "what helps"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        pytest.param(ROOM, "added for updates alone", id="for updates"),
        pytest.param(merged(ROOM, updating("in_place")), "never added", id="for nothing"),
        pytest.param(ROOM | scaling("target_groups", max_groups=2), None, id="bounds"),
        pytest.param(ROOM | overriding("Coordinator", 1, 2), None, id="bounds of Serve's"),
        pytest.param(ROOM | with_options("Coordinator", num_replicas=2), None, id="a number of Serve's"),
        pytest.param(SCALED, None, id="no more pods"),
    ],
)
def test_notes_say_that_nobody_asks_for_more_target_groups(values: Values, told: str | None) -> None:
    notes = " ".join(render_texts(values)["NOTES.txt"].split())
    assert ("config.cluster.target_groups.autoscaling is not given" in notes) == (told is not None)
    assert told is None or f"up to target.maxGroups, are {told}." in notes


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gcsFaultTolerance", {"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"}}),
        ("autoscaling", {"autoscaling": {"enabled": True}}),
        (
            "models.download",
            {"models": EVERYTHING["models"]},
        ),
        (
            "config.http.tracing",
            {"config": {"http": {"tracing": {"endpoint": "http://collector:4318/v1/traces"}}}},
        ),
    ],
)
def test_notes_say_what_the_network_policy_keeps_pods_from(name: str, values: Values) -> None:
    """What cannot be reached is waited for: nothing else would say why."""
    (warning,) = [line for line in render_texts(values)["NOTES.txt"].splitlines() if "extraEgress" in line]
    assert name in warning
    for policy in ({"enabled": False}, {"extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]}):
        assert "extraEgress" not in render_texts({**values, "networkPolicy": policy})["NOTES.txt"]
    assert "extraEgress" not in render_texts({})["NOTES.txt"]


def test_notes_say_what_pods_wait_for_that_cannot_look_up_the_heads_name() -> None:
    assert "networkPolicy.dnsPorts" in render_texts({})["NOTES.txt"]
    assert "networkPolicy.dnsPorts" not in render_texts({"networkPolicy": {"enabled": False}})["NOTES.txt"]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({}, "whoever reaches the cluster's network can read it (networkPolicy.clients is empty)"),
        (
            {"enabled": False},
            "whoever reaches the cluster's network can read it (networkPolicy.enabled is false)",
        ),
        (
            {"clients": [{"namespaceSelector": {}}]},
            "networkPolicy.clients and networkPolicy.monitoring let in",
        ),
    ],
)
def test_notes_say_who_can_read_metrics(policy: Values, told: str) -> None:
    notes = " ".join(render_texts({"networkPolicy": policy})["NOTES.txt"].split())
    assert "/metrics asks for no API key" in notes
    assert told in notes
    assert ("who has Ray's token runs code" in notes) == (policy.get("enabled") is False)


def test_pods_of_one_kind_are_spread_over_nodes_unless_told_otherwise() -> None:
    own = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    groups = groups_of(ray_service(merged(DRAFTED, {"draft": {"topologySpreadConstraints": own}})))
    for name, group in groups.items():
        pod = group["template"]
        constraints = pod["spec"].get("topologySpreadConstraints", [])
        if name == "draft":
            assert constraints == own
            continue
        if name == "head":
            assert constraints == []
            continue
        (constraint,) = constraints
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
        selected = constraint["labelSelector"]["matchLabels"]
        assert selected.items() <= pod["metadata"]["labels"].items()
        others = [one for other, one in groups.items() if other != name]
        assert not any(selected.items() <= one["template"]["metadata"]["labels"].items() for one in others)


def pre_stop(group: dict[str, Any]) -> list[str]:
    (container,) = group["template"]["spec"]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["bash", "-c"]
    return command


@pytest.mark.parametrize("values", [{}, {"config": {"cluster": {"drain_timeout_s": 119.5}}}])
def test_pods_outlive_the_drain(values: Values) -> None:
    cluster = ClusterConfig.model_validate(values.get("config", {}).get("cluster", {}))
    for name, group in groups_of(ray_service(merged(DRAFTED, values))).items():
        found = re.search(r"^ *sleep (\d+)$", pre_stop(group)[-1], re.MULTILINE)
        assert found is not None
        seconds = int(found[1])
        # Serve's own patience with a replica that serves its streams to the end.
        fewest = {"ingress": cluster.drain_timeout_s + 5, "target": cluster.drain_timeout_s + 10}
        assert seconds >= fewest.get(name, 5), name
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= seconds + 20 + 30, name


@pytest.mark.parametrize("flavour", ["gpu", "multi-host", "magicdec"])
def test_on_gpus_requests_of_minutes_outlast_an_update(flavour: str) -> None:
    """An answer that is not streamed cannot be gone on with: what is cut is lost."""
    values = values_of(flavour)
    config = parse_arguments(serve_config(values)["applications"][0]["args"]).config
    drain_s = config.cluster.drain_timeout_s
    assert drain_s >= 600
    service = ray_service(values)
    assert service["spec"]["rayClusterDeletionDelaySeconds"] >= drain_s
    for name in ("ingress", "target"):
        grace_s = groups_of(service)[name]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= drain_s + 10, name
    notes = render_texts(values)["NOTES.txt"]
    assert f"have {drain_s:g} s to end" in notes
    assert ("update waits for a target group that is alone" in notes) == (flavour == "gpu")


FAKES = {
    "pgrep": """
        if [ "$1" = -a ]; then
          [ -e "$STATE/raylet" ] && cat "$STATE/raylet"
        else
          echo . >> "$STATE/looks"
          [ "$(wc -l < "$STATE/looks")" -lt "$LOOKS" ]
        fi""",
    "ray": 'echo "ray $*" >> "$STATE/calls"; [ "$1" != drain-node ] || exit "$DRAIN_RC"',
    "sleep": 'echo "sleep $*" >> "$STATE/calls"',
    "timeout": 'shift; exec "$@"',
}
NODE = "0a1b" * 14
RAYLET = (
    f"7 /opt/venv/raylet --node_manager_port=0 --node_id={NODE} --node_ip_address=10.0.0.1 --labels={{}}\n"
)


@pytest.mark.parametrize(
    ("pool", "seconds", "raylet", "drain_rc", "told", "slept"),
    [
        ("target", 9, RAYLET, 0, True, ["1", "1"]),
        ("draft", "", RAYLET, 0, True, ["1", "1"]),
        ("ingress", 9, RAYLET, 1, True, ["9"]),  # the head is gone, say
        ("ingress", 9, None, 0, False, ["9"]),  # the raylet is
        ("target", 0, RAYLET, 0, False, ["0"]),
        ("head", 9, RAYLET, 0, False, ["9"]),
    ],
)
def test_ray_is_told_that_a_pod_goes(
    pool: str,
    seconds: int | str,
    raylet: str | None,
    drain_rc: int,
    told: bool,
    slept: list[str],
    tmp_path: Path,
) -> None:
    """The command, run with doubles of what it calls. They end the raylet after its third look."""
    group = groups_of(ray_service(merged(DRAFTED, {pool: {"drainSeconds": seconds}})))[pool]
    for name, body in FAKES.items():
        file = tmp_path / name
        file.write_text(f"#!/bin/bash\n{textwrap.dedent(body)}\n")
        file.chmod(0o755)
    if raylet is not None:
        (tmp_path / "raylet").write_text(raylet)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "STATE": str(tmp_path),
        "LOOKS": "3",
        "DRAIN_RC": str(drain_rc),
        "RAY_ADDRESS": "head-svc.serving.svc:6379",
    }
    subprocess.run(pre_stop(group), env=environment, check=True, timeout=60)
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls[-1] == ["ray", "stop"]
    assert [call[1] for call in calls if call[0] == "sleep"] == slept
    drains = [call for call in calls if call[1] == "drain-node"]
    assert bool(drains) == told
    for call in drains:
        assert call[call.index("--node-id") + 1] == NODE
        assert call[call.index("--address") + 1] == "head-svc.serving.svc:6379"


def test_ray_has_the_command_that_drains_a_node() -> None:
    """It is hidden: nobody would tell us that it changed."""
    script = pre_stop(groups_of(ray_service({}))["target"])[-1].replace("\\\n", " ")
    (line,) = [line for line in script.splitlines() if "drain-node" in line]
    words = shlex.split(line.partition("timeout 20 ")[2].partition(";")[0])
    node = {"$node": NODE, "$RAY_ADDRESS": "10.0.0.1:6379"}
    assert words[:2] == ["ray", "drain-node"]
    command = ray_cli.commands[words[1]]
    context = command.make_context("drain-node", [node.get(word, word) for word in words[2:]])
    assert context.params["node_id"] == NODE
    assert context.params["deadline_remaining_seconds"] == 70


def test_the_raylets_command_line_says_which_node_it_is() -> None:
    source = inspect.getsource(services.start_raylet)
    assert 'f"--node_id={node_id}"' in source
    assert Path(services.RAYLET_EXECUTABLE).stem == "raylet"


def test_the_network_policy_lets_pods_out_to_redis() -> None:
    """A peer without a namespace is one of the pods' own."""
    values = values_of("multi-host")
    namespace = values["gcsFaultTolerance"]["redisAddress"].split(".")[1]
    (policy,) = of_kind(render(values), "NetworkPolicy")
    (rule,) = [
        one for one in policy["spec"]["egress"] if {"port": 6379, "protocol": "TCP"} in one.get("ports", ())
    ]
    (peer,) = rule["to"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": namespace}
    assert "podSelector" in peer


@pytest.mark.parametrize("flavour", [None, *FLAVOURS])
def test_the_prometheus_operator_is_needed_only_where_that_is_asked_for(flavour: str | None) -> None:
    """Without its definitions Kubernetes would refuse the whole release."""

    def monitored(values: Values) -> set[str]:
        return {
            item["kind"] for item in render(values) if item["apiVersion"].startswith("monitoring.coreos.com/")
        }

    assert monitored(values_of(flavour)) == set()
    both = merged(values_of(flavour), values_of("monitoring"))
    assert monitored(both) == {"PodMonitor", "ServiceMonitor", "PrometheusRule"}


def test_the_test_pod_waits_until_models_are_loaded() -> None:
    (pod,) = of_kind(render({}), "Pod")
    command = pod["spec"]["containers"][0]["command"]
    assert {"--retry-connrefused", "--retry-on-host-error"} <= set(command), "there is no Service before"
    (codes,) = [word for word in command if word.startswith("--retry-on-http-error=")]
    assert "503" in codes.partition("=")[2].split(",")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_render_is_the_reviewed_one(flavour: str) -> None:
    """DRAFTHOUSE_UPDATE_GOLDEN=1 writes it anew; then read the difference."""
    file = GOLDEN / f"{flavour}.yaml"
    # Nobody reviews generated dashboards here: they are compared with their source above.
    values = merged(values_of(flavour), values_of("monitoring") if flavour == "multi-host" else {})
    written = [item for item in render(values) if item["kind"] not in ("ConfigMap", "PrometheusRule")]
    text = yaml.safe_dump_all(written, sort_keys=False, width=110)
    if UPDATE:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.read_text() == text
