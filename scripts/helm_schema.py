"""Write the chart's values.schema.json: `.venv/bin/python scripts/helm_schema.py`.

The chart's own values are the pydantic models below; `config` is the configuration of `drafthouse serve`
without what the chart decides from the pools. Unknown keys fail, in both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel
from ray.serve.config import AutoscalingPolicy
from ray.serve.schema import DeploymentSchema

from deploy.config import DrafthouseConfig
from deploy.proxies import ProxyKind

SCHEMA = Path(__file__).resolve().parent.parent / "helm" / "drafthouse" / "values.schema.json"

Kubernetes = dict[str, Any]
"""Something of Kubernetes' own, which its API server checks."""
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]
NameOrNone = Annotated[str, Field(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")]
Strings = dict[str, str]

DECIDED_BY_THE_CHART = {
    "DrafthouseConfig": ("models",),  # there are pods for one
    "HttpConfig": ("host", "port", "api_keys_file", "tls", "proxy"),
    "TargetGroupsConfig": ("num_groups", "bundle", "strategy", "tensor_parallel_across_nodes"),
    "DraftPoolConfig": ("num_workers", "bundle", "own_nodes"),
    "ClusterConfig": ("check_resources",),
    "ChannelConfig": ("bind",),
}
"""Keys of `config` that follow from other values: giving them there too could only contradict."""


def keys_of_ray(block: type[BaseModel]) -> dict[str, Any]:
    """Return the keys of a block of Ray's, and of the blocks in it.

    Ray ignores keys that it does not know. Values are left to it: of these it says what is wrong.
    """
    keys: dict[str, Any] = {}
    for name, field in block.model_fields.items():
        kinds = get_args(field.annotation) if get_origin(field.annotation) is Union else (field.annotation,)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        keys[name] = keys_of_ray(inner[0]) if inner else {}
    return {"properties": keys, "additionalProperties": False}


Deployment = Annotated[dict[str, Any], WithJsonSchema({"type": "object", **keys_of_ray(DeploymentSchema)})]
Policy = Annotated[dict[str, Any], WithJsonSchema({"type": "object", **keys_of_ray(AutoscalingPolicy)})]


class Block(BaseModel):
    """A block of values; camelCase in the file, as Helm's users expect."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, use_attribute_docstrings=True, protected_namespaces=()
    )


class Image(Block):
    repository: str = Field(min_length=1)
    tag: str = ""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: list[Kubernetes] = []


class Download(Block):
    repository: str = Field(min_length=1)
    revision: str = Field(min_length=1)
    folder: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class Models(Block):
    mount_path: str = Field(pattern="^/")
    claim: NameOrNone = ""
    volume: Kubernetes = {}
    download: list[Download] = []


class CompileCache(Block):
    volume: Kubernetes = {}


class ApiKeys(Block):
    existing_secret: NameOrNone = ""
    key: str = Field(min_length=1)
    insecure: bool = False


class Tls(Block):
    existing_secret: NameOrNone = ""


class HuggingFace(Block):
    existing_secret: NameOrNone = ""
    key: str = Field(min_length=1)


class RayAuth(Block):
    enabled: bool = True
    existing_secret: NameOrNone = ""


class Probes(Block):
    liveness: Kubernetes = {}
    readiness: Kubernetes = {}
    startup: Kubernetes = {}


class DisruptionBudget(Block):
    enabled: bool = True
    max_unavailable: int = Field(default=1, ge=0)


class Pool(Block):
    """What every kind of pod has."""

    cpu: int = Field(ge=1)
    memory: Quantity
    ephemeral_storage: Quantity | Literal[""] = ""
    shm_size: Quantity
    drain_seconds: Annotated[int, Field(ge=0)] | Literal[""]
    node_selector: Strings = {}
    tolerations: list[Kubernetes] = []
    affinity: Kubernetes = {}
    topology_spread_constraints: list[Kubernetes] = []
    priority_class_name: str = ""
    runtime_class_name: str = ""
    pod_labels: Strings = {}
    pod_annotations: Strings = {}
    extra_env: list[Kubernetes] = []
    ray_start_params: Strings = {}
    probes: Probes
    pod_disruption_budget: DisruptionBudget


class IngressPool(Pool):
    enabled: bool = True
    replicas: int = Field(ge=1)
    proxy: ProxyKind = "python"


class GpuPool(Pool):
    gpu: int = Field(ge=0)
    gpu_resource: str = Field(min_length=1)


class TargetPool(GpuPool):
    groups: int = Field(ge=1)
    spare_groups: int = Field(ge=0)
    max_groups: int = Field(ge=0)
    nodes_per_group: int = Field(ge=1)
    multi_host: bool


class DraftPool(GpuPool):
    workers: int = Field(ge=1)
    max_workers: int = Field(ge=0)


class Autoscaling(Block):
    enabled: bool = False
    idle_timeout_seconds: int = Field(ge=1)
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"]
    resources: Kubernetes = {}


class Serve(Block):
    deployments: list[Deployment] = []
    autoscaling_policy: Policy = {}
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    host: Literal["0.0.0.0", "::"] = "0.0.0.0"


class Service(Block):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    annotations: Strings = {}


class Expose(Block):
    enabled: bool = False
    class_name: str = ""
    host: str = ""
    tls_secret: NameOrNone = ""
    annotations: Strings = {}


class GcsFaultTolerance(Block):
    enabled: bool = False
    redis_address: str = ""
    existing_secret: NameOrNone = ""
    key: str = Field(min_length=1)
    username: str = ""
    username_key: str = ""
    external_storage_namespace: str = ""


class NetworkPolicy(Block):
    enabled: bool = True
    clients: list[Kubernetes] = []
    monitoring: list[Kubernetes] = []
    operator: list[Kubernetes] = []
    dns: list[Kubernetes] = []
    dns_ports: list[Annotated[int, Field(ge=1, le=65535)]] = Field(min_length=1)
    extra_ingress: list[Kubernetes] = []
    extra_egress: list[Kubernetes] = []


class ServiceAccount(Block):
    create: bool = True
    name: NameOrNone = ""
    annotations: Strings = {}


class Monitor(Block):
    enabled: bool = False
    interval: str = Field(pattern=r"^[0-9]+(ms|s|m)$")
    labels: Strings = {}


class Rules(Block):
    enabled: bool = False
    labels: Strings = {}
    runbook_url: str = Field(default="", pattern=r"^(https?://[^\s#'\"]+)?$")


class Dashboards(Block):
    enabled: bool = False
    label: str = Field(min_length=1)
    label_value: str = Field(min_length=1)
    folder: str = Field(min_length=1)


class Monitoring(Block):
    pod_monitor: Monitor
    service_monitor: Monitor
    prometheus_rule: Rules
    dashboards: Dashboards


class Upgrade(Block):
    type: Literal["NewCluster", "None"] = "NewCluster"
    cluster_deletion_delay_seconds: int = Field(ge=0)


class Values(Block):
    """All values of the chart but `config`."""

    name_override: str = ""
    fullname_override: str = ""
    ray_version: str = Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$")
    image: Image
    models: Models
    compile_cache: CompileCache
    api_keys: ApiKeys
    tls: Tls
    hugging_face: HuggingFace
    ray_auth: RayAuth
    head: Pool
    ingress: IngressPool
    target: TargetPool
    draft: DraftPool
    autoscaling: Autoscaling
    serve: Serve
    log_format: Literal["text", "json"] = "text"
    logs_to_stderr: bool = True
    service: Service
    expose: Expose
    gcs_fault_tolerance: GcsFaultTolerance
    network_policy: NetworkPolicy
    service_account: ServiceAccount
    pod_security_context: Kubernetes
    security_context: Kubernetes
    monitoring: Monitoring
    upgrade: Upgrade
    extra_env: list[Kubernetes] = []
    extra_volumes: list[Kubernetes] = []
    extra_volume_mounts: list[Kubernetes] = []
    extra_objects: list[Kubernetes | str] = []
    global_: Kubernetes = Field(default={}, alias="global")
    """Helm's own, for charts that have this one as a part."""
    enabled: bool = True
    """Of charts that have this one as a part, where that depends on it (`condition`): Helm hands it on."""
    tags: Kubernetes = {}


def schema() -> dict[str, Any]:
    """Return the schema of all values."""
    values = Values.model_json_schema()
    config = DrafthouseConfig.model_json_schema()
    blocks = config.pop("$defs")
    for block, keys in DECIDED_BY_THE_CHART.items():
        place = config if block == "DrafthouseConfig" else blocks[block]
        for key in keys:
            del place["properties"][key]
        if place is not config:  # its target has to be given; their defaults hold what is left out here too
            place.pop("required", None)
    for block in (config, *blocks.values()):
        for field in block.get("properties", {}).values():
            field.pop("default", None)
    clash = blocks.keys() & values["$defs"].keys()
    if clash:
        raise ValueError(f"two blocks have the same name: {sorted(clash)}")
    values["$defs"] |= blocks | {"DrafthouseConfig": config}
    values["properties"]["config"] = {"$ref": "#/$defs/DrafthouseConfig"}
    values["required"] = sorted([*values["required"], "config"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **values}


def rendered() -> str:
    """Return the file's text."""
    return json.dumps(schema(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    SCHEMA.write_text(rendered(), encoding="utf-8")
    print(SCHEMA)


if __name__ == "__main__":
    main()
