"""What is deployed without Helm: files for `ray up`, `serve deploy`, docker and docker compose.

There is neither a cloud nor a Docker engine in the tests: files are checked against Ray's schemas, against
each other and against our rules.
"""

from __future__ import annotations

import copy
import fnmatch
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.sdk import get_docker_host_mount_location
from ray.serve.schema import ServeDeploySchema

from cluster.inventory import NodeSnapshot
from cluster.placement import RanksPerModel, plan_placement, require_plan
from deploy.config_file import load_config
from deploy.preflight import check_exposure
from deploy.serve_config import build, parse_arguments
from specdec.core.errors import ConfigError, ResourceError

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"


def load(*path: str) -> dict[str, Any]:
    values = yaml.safe_load((ROOT / "deploy").joinpath(*path).read_text())
    assert isinstance(values, dict)
    return values


# -------------------------------------------------------------------------------------- ray up and serve


@pytest.fixture
def ray_cluster() -> dict[str, Any]:
    return load("ray", "cluster.yaml")


@pytest.fixture
def serve_file() -> dict[str, Any]:
    return load("ray", "serve.yaml")


def test_ray_takes_the_cluster_file(ray_cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(ray_cluster))


def test_ray_refuses_typos_in_it(ray_cluster: dict[str, Any]) -> None:
    ray_cluster["head_start_ray_command"] = ray_cluster.pop("head_start_ray_commands")
    with pytest.raises(jsonschema.ValidationError, match="head_start_ray_command"):
        validate_config(prepare_config(ray_cluster))


def test_rays_processes_ask_for_a_token_and_the_dashboard_stays_inside(ray_cluster: dict[str, Any]) -> None:
    starts = [
        command
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in ray_cluster[key]
        if "ray start" in command
    ]
    assert len(starts) == 2
    for command in starts:
        token = re.search(r"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=(\S+)", command)
        assert token is not None
        assert str(Path(token[1]).parent) in ray_cluster["file_mounts"]
    assert "--dashboard-host=127.0.0.1" in starts[0]


def test_the_secret_of_the_cluster_is_for_the_containers_group_alone(ray_cluster: dict[str, Any]) -> None:
    """`ray up` copies it with the mode that it has and mounts what it has copied."""
    place = get_docker_host_mount_location(ray_cluster["cluster_name"])
    (mounted,) = ray_cluster["file_mounts"]
    (command,) = ray_cluster["initialization_commands"]
    folder, *changes = [step.split() for step in command.split(" && ")]
    assert folder == ["cd", f"{place}{mounted}"]
    assert changes == [
        ["sudo", "chgrp", "10001", ".", "ray-token"],
        ["sudo", "chmod", "0750", "."],
        ["sudo", "chmod", "0440", "ray-token"],
    ]
    assert ("USER", "10001:10001") in stages()["cuda"]


def test_api_keys_of_the_cluster_are_where_all_nodes_see_changes(
    ray_cluster: dict[str, Any], serve_file: dict[str, Any]
) -> None:
    """What `ray up` has copied to a node stays as it was: a revoked key would be accepted for ever."""
    config = parse_arguments(serve_file["applications"][0]["args"]).config
    assert config.http.api_keys_file is not None
    folder = str(Path(config.http.api_keys_file).parent)
    mounted = [value.split(":")[1:] for value in ray_cluster["docker"]["run_options"] if "--volume=" in value]
    assert [folder, "ro"] in mounted
    assert folder not in ray_cluster["file_mounts"]


def test_containers_of_the_cluster_can_do_no_more_than_those_of_compose(
    ray_cluster: dict[str, Any], compose: dict[str, Any]
) -> None:
    options = {}
    for option in ray_cluster["docker"]["run_options"]:
        name, _, value = option.removeprefix("--").partition("=")
        options.setdefault(name, []).append(value)
    service = compose["services"]["drafthouse"]
    assert ("read-only" in options) == service["read_only"]
    assert options["cap-drop"] == service["cap_drop"]
    assert options["security-opt"] == ["no-new-privileges"]
    assert options["tmpfs"] == service["tmpfs"]
    writable = {value.split(":")[1] for value in options["volume"] if not value.endswith(":ro")}
    assert writable == {"/home/drafthouse"}, "and no folder of the node"
    # What `ray up` writes into the container: by its own rsync, but for what it mounts.
    mounted = ("/home/drafthouse/", "~/")
    assert all(target.startswith(mounted) for target in ray_cluster["file_mounts"])


def test_serve_and_the_builder_take_the_serve_file(serve_file: dict[str, Any]) -> None:
    parsed = ServeDeploySchema.model_validate(serve_file)
    (application,) = parsed.applications
    for model, values in (
        (ServeDeploySchema, serve_file),
        (type(application), serve_file["applications"][0]),
        (type(application.deployments[0]), serve_file["applications"][0]["deployments"][0]),
    ):
        assert values.keys() <= model.model_fields.keys(), "Serve would ignore it"
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    assert parse_arguments(application.args).config.target.num_ranks == 4


def test_the_builder_refuses_typos_that_serve_would_pass_on(serve_file: dict[str, Any]) -> None:
    serve_file["applications"][0]["args"]["config"]["target"]["dtyp"] = "bfloat16"
    (application,) = ServeDeploySchema.model_validate(serve_file).applications
    with pytest.raises(ConfigError, match=r"target\.dtyp: unknown key"):
        parse_arguments(application.args)


def test_the_application_fits_the_cluster(ray_cluster: dict[str, Any], serve_file: dict[str, Any]) -> None:
    kinds = ray_cluster["available_node_types"]
    nodes = [
        NodeSnapshot(
            node_id=f"{name}-{index}",
            available={resource: float(amount) for resource, amount in kind["resources"].items()},
            labels=kind["labels"],
        )
        for name, kind in kinds.items()
        for index in range(kind.get("min_workers", 1))
    ]
    config = parse_arguments(serve_file["applications"][0]["args"]).config
    ranks = RanksPerModel.of(config.engine())
    require_plan(plan_placement(config.cluster, nodes, has_drafter=True, ranks=ranks))
    with pytest.raises(ResourceError, match="pool=draft"):
        require_plan(plan_placement(config.cluster, nodes[:-1], has_drafter=True, ranks=ranks))
    door = serve_file["applications"][0]["deployments"][0]["ray_actor_options"]["label_selector"]
    assert door["pool"] in kinds


# ----------------------------------------------------------------------------------------------- images

INSTRUCTION = re.compile(r"^([A-Z]+) (.*)$")


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, comments and continuations resolved."""
    lines = [
        line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    text = "\n".join(lines).replace("\\\n", " ")
    found = [INSTRUCTION.match(line) for line in text.splitlines() if line.strip()]
    assert all(found), "a line is no instruction"
    return [(match[1], match[2]) for match in found if match]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Stage -> its instructions, those of the stages that it is built on first."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for kind, rest in instructions():
        if kind == "FROM":
            base, _, name = rest.partition(" AS ")
            assert name, "a stage without a name"
            found[name] = list(found.get(base, [("FROM", base)]))
        elif name:
            found[name].append((kind, rest))
    return found


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_image_runs_as_nobody_and_has_what_kuberay_needs(image: str) -> None:
    steps = stages()[image]
    assert steps[0] == ("FROM", "${PYTHON_IMAGE}")
    assert [rest for kind, rest in steps if kind == "USER"][-1] == "10001:10001"
    assert any(kind == "RUN" and "bash g++ procps tini wget" in rest for kind, rest in steps)
    assert any("openssh-client rsync" in rest for kind, rest in steps if kind == "RUN"), "`ray up` needs them"
    copied = [rest.split()[0] for kind, rest in steps if kind == "COPY"]
    assert f"--from={image}-packages" in copied
    environment = " ".join(rest for kind, rest in steps if kind == "ENV")
    assert "PATH=/opt/venv/bin:$PATH" in environment
    assert "HOME=/home/drafthouse" in environment


def test_what_the_dockerfile_copies_is_there_and_reaches_the_builder() -> None:
    known: set[str] = set()
    for kind, rest in instructions():
        if kind == "FROM":
            known.add(rest.partition(" AS ")[2])
        if kind != "COPY":
            continue
        *sources, _ = rest.split()
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in known
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert reaches_the_builder(source), source


def test_mirrors_can_stand_in_for_all_that_the_images_are_built_from(compose: dict[str, Any]) -> None:
    """Base image, PyPI and PyTorch's index; an argument is known in the stage that names it alone."""
    named: set[str] = set()
    every: set[str] = set()
    for kind, rest in instructions():
        if kind == "FROM":
            named = set()
        elif kind == "ARG":
            named.add(rest.partition("=")[0])
            every |= named
        else:
            assert "://" not in rest, f"an address that cannot be changed: {rest}"
            used = set(re.findall(r"\$\{(\w+)\}", rest))
            if "pip install" in rest and "--no-deps" not in rest:
                used.add("PIP_INDEX_URL")  # pip reads it by itself
            assert used <= named, rest
    assert every == set(compose["services"]["drafthouse"]["build"]["args"])


def test_images_have_what_a_configuration_can_ask_for() -> None:
    """A pod can install nothing: traces and quantized weights have to work in it."""
    (command,) = [rest for kind, rest in stages()["cpu-packages"] if kind == "RUN" and "tomllib" in rest]
    script = command.partition('"')[2].partition('"')[0]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = {canonicalize_name(Requirement(line).name) for line in done.stdout.splitlines() if line}
    assert {"ray", "torch", "torchao", "opentelemetry-exporter-otlp-proto-http"} <= names


def test_images_user_is_the_charts() -> None:
    values = yaml.safe_load((ROOT / "helm" / "drafthouse" / "values.yaml").read_text())
    user = values["podSecurityContext"]["runAsUser"]
    assert ("USER", f"{user}:{user}") in stages()["cpu"]


# ---------------------------------------------------------------------------------------------- compose


@pytest.fixture
def compose() -> dict[str, Any]:
    return load("docker", "compose.yaml")


def faults(compose: dict[str, Any]) -> list[str]:
    """What is wrong with a compose file by our rules."""
    found = []
    for name, service in compose["services"].items():
        if not service.get("read_only"):
            found.append(f"{name}: root can be written")
        if service.get("cap_drop") != ["ALL"] or service.get("privileged") or service.get("cap_add"):
            found.append(f"{name}: has capabilities")
        if not re.search(r":v?\d+\.\d+\.\d+", service["image"]):
            found.append(f"{name}: image without a version")
        found += [
            f"{name}: {port} is open to others" for port in service["ports"] if "127.0.0.1:" not in port
        ]
        for mount in service.get("volumes", ()):
            source, _, rest = mount.partition(":")
            if source.startswith("."):
                if not (DOCKER / source).exists():
                    found.append(f"{name}: {source} is not there")
                if not rest.endswith(":ro"):
                    found.append(f"{name}: {source} can be written")
            elif source not in compose["volumes"]:
                found.append(f"{name}: volume {source} is not declared")
        found += [
            f"{name}: no secret {one}" for one in service.get("secrets", ()) if one not in compose["secrets"]
        ]
        found += [
            f"{name}: no {one}" for one in service.get("depends_on", ()) if one not in compose["services"]
        ]
    return found


def test_compose_file_keeps_our_rules(compose: dict[str, Any]) -> None:
    assert faults(compose) == []
    assert compose["services"].keys() == {"drafthouse", "prometheus", "grafana"}


def test_faults_of_a_compose_file_are_found(compose: dict[str, Any]) -> None:
    bad = copy.deepcopy(compose)
    service = bad["services"]["drafthouse"]
    service |= {
        "read_only": False,
        "image": "drafthouse:latest",
        "ports": ["8000:8000"],
        "depends_on": ["redis"],
    }
    service["volumes"] += ["./nowhere:/x:ro", "unknown:/y"]
    assert len(faults(bad)) == 6


def test_compose_builds_a_stage_that_there_is(compose: dict[str, Any]) -> None:
    service = compose["services"]["drafthouse"]
    assert (DOCKER / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).samefile(DOCKER / "Dockerfile")
    assert service["build"]["target"] in stages()


def test_compose_serves_the_images_models_with_keys(compose: dict[str, Any]) -> None:
    config = load_config(DOCKER / "config.yaml")
    check_exposure(config.http, is_insecure_allowed=False)
    assert config.http.api_keys_file == "/run/secrets/api-keys"
    assert compose["services"]["drafthouse"]["secrets"] == ["api-keys"]
    for model in (config.target.model, config.speculative_config.model):
        assert model is not None
        assert (ROOT / Path(model).relative_to("/opt/drafthouse")).is_dir()


def reaches_the_builder(path: str) -> bool:
    """Whether a file is sent to Docker's builder: the last line that fits it, or a folder of it, decides."""
    allowed = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if not line or line.startswith("#"):
            continue
        names = [path, *map(str, Path(path).parents)][:-1]
        if any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for name in names):
            allowed = line.startswith("!")
    return allowed


def test_what_reaches_the_builder_is_told_apart() -> None:
    for path, wanted in (
        ("deploy/config.py", True),
        ("models/demo/target/config.json", True),
        ("models/mine/model.safetensors", False),
        ("docs/operations.md", False),
        ("deploy/docker/prometheus.yaml", False),
        ("deploy/__pycache__/config.pyc", False),
    ):
        assert reaches_the_builder(path) == wanted, path


def test_secrets_for_compose_stay_out_of_the_image_and_of_git(compose: dict[str, Any]) -> None:
    """What the steps in its header write: the plain key, too."""
    text = (DOCKER / "compose.yaml").read_text().partition("\nname:")[0]
    written = set(re.findall(r"> ([\w-]+)", text))
    assert written == {"my-key", "api-keys", "grafana-password"}
    assert {Path(one["file"]).name for one in compose["secrets"].values()} <= written
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    for name in written:
        path = f"deploy/docker/{name}"
        assert not reaches_the_builder(path), path
        assert f"/{path}" in ignored


def test_prometheus_asks_the_door_and_grafana_prometheus(compose: dict[str, Any]) -> None:
    prometheus = load("docker", "prometheus.yaml")
    (job,) = prometheus["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert host in compose["services"]
    assert int(port) == load_config(DOCKER / "config.yaml").http.port
    (source,) = load("docker", "grafana", "datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    mounts = [mount.split(":") for mount in compose["services"]["grafana"]["volumes"]]
    (provider,) = load("docker", "grafana", "dashboards.yaml")["providers"]
    assert provider["options"]["path"] in {mount[1] for mount in mounts}
