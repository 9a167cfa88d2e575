"""What a model's deployments ask of Serve, by what nodes have and what runs there already, without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cluster import application
from cluster.application import ModelPools, build_applications
from cluster.config import ClusterConfig
from cluster.directory import Member
from cluster.inventory import NodeSnapshot
from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig
from specdec.transport.base import PeerAddress, PeerId


class Nodes:
    """A cluster of nodes with GPUs, and what Ray and the directories say of it."""

    def __init__(self, **gpus: float) -> None:
        self.free = dict(gpus)
        self.groups: dict[str, dict[str, Any]] = {}
        self.members: dict[str, list[Member]] = {}
        self.applications: dict[str, str] = {}

    def run(
        self, deployment: str, *nodes: str, gpus: float = 1.0, app: str = "app", is_ready: bool = False
    ) -> None:
        """Have a replica there, with a bundle on each of these nodes; unless it is ready, it only starts."""
        group = f"group{len(self.groups)}"
        self.groups[group] = {
            "name": f"SERVE_REPLICA::{app}#{deployment}#{group}",
            "state": "CREATED",
            "bundles": {index: {"GPU": gpus} for index in range(len(nodes))},
            "bundles_to_node_id": dict(enumerate(nodes)),
        }
        for node in nodes:
            self.free[node] -= gpus
        if is_ready:
            address = PeerAddress(peer_id=PeerId(group), endpoint="tcp://127.0.0.1:1", public_key="")
            role: Any = "draft" if deployment.startswith("DraftPool") else "coordinator"
            self.members.setdefault("drafthouse", []).append(
                Member(address=address, role=role, placement_group=group)
            )

    def snapshot(self) -> list[NodeSnapshot]:
        return [
            NodeSnapshot(node_id=name, available={"GPU": gpus}, labels={}) for name, gpus in self.free.items()
        ]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """One node with a single GPU; tests may set others free."""
    cluster = Nodes(n0=1.0)
    monkeypatch.setattr(application, "snapshot_nodes", cluster.snapshot)
    monkeypatch.setattr(application, "placement_group_table", lambda: cluster.groups)
    monkeypatch.setattr(application, "current_members", lambda name: tuple(cluster.members.get(name, ())))
    monkeypatch.setattr(application, "application_of", lambda name: cluster.applications.get(name, ""))
    return cluster


def pools(*, gpus: float = 1.0, suffix: str = "", drafts: bool = False, **cluster: Any) -> ModelPools:
    bundle = {"num_cpus": 0, "num_gpus": gpus}
    target = cluster.pop("target_groups", {})
    target_parallel = cluster.pop("tensor_parallel_size", 1)
    speculative = {"method": "draft_model", "model": "d"} if drafts else {"method": "none"}
    return ModelPools(
        engine=EngineConfig.model_validate(
            {
                "target": {"model": "t", "tensor_parallel_size": target_parallel},
                "speculative_config": speculative,
            }
        ),
        cluster=ClusterConfig.model_validate(
            {
                "namespace": "drafthouse" + suffix,
                "target_groups": {"bundle": bundle, **target},
                "draft_pool": {"bundle": {"num_cpus": 0, "num_gpus": 1}, **cluster.pop("draft_pool", {})},
                **cluster,
            }
        ),
        suffix=suffix,
    )


def options(models: Sequence[ModelPools]) -> list[Any]:
    """What Serve is told of the coordinators of each model."""
    return [one._bound_deployment._deployment_config for one in build_applications(models)]


def pool_options(model: ModelPools) -> Any:
    (coordinator,) = build_applications([model])
    arguments: Any = coordinator._bound_deployment.init_args
    return arguments[2]._bound_deployment._deployment_config


class TestWhatRunsAlready:
    def test_what_is_only_starting_gives_its_place_to_the_version_that_follows(self, nodes: Nodes) -> None:
        """A checkpoint was wrong, or takes long to load: the next comes before it is in any directory."""
        nodes.run("Coordinator", "n0")
        with pytest.raises(ResourceError, match="target group 1 of 1 needs 1 GPU"):
            build_applications([pools()])
        nodes.applications["drafthouse"] = "app"
        assert options([pools()])[0].num_replicas == 1

    def test_one_that_serves_tells_of_all_that_are_of_its_application(self, nodes: Nodes) -> None:
        nodes.free = {"n0": 3.0}
        nodes.run("Coordinator", "n0", is_ready=True)
        nodes.run("Coordinator", "n0")
        nodes.run("Coordinator-former", "n0")
        assert options([pools(target_groups={"num_groups": 2}), pools(suffix="-new")])

    def test_what_others_hold_stays_theirs(self, nodes: Nodes) -> None:
        nodes.applications["drafthouse"] = "app"
        nodes.run("Coordinator", "n0", app="another")
        with pytest.raises(ResourceError, match="target group 1 of 1 needs 1 GPU"):
            build_applications([pools()])
        for name in ("somebody's own", "SERVE_REPLICA::an#odd#name#x"):
            nodes.groups = {"a": nodes.groups.popitem()[1] | {"name": name}}
            with pytest.raises(ResourceError, match="target group 1 of 1 needs 1 GPU"):
                build_applications([pools()])

    def test_what_has_been_removed_holds_nothing(self, nodes: Nodes) -> None:
        """Its member's lease may go on: its place must not count twice."""
        nodes.run("Coordinator", "n0", is_ready=True)
        nodes.groups["group0"]["state"] = "REMOVED"
        nodes.free["n0"] = 1.0
        with pytest.raises(ResourceError, match="target group 2 of 2"):
            build_applications([pools(target_groups={"num_groups": 2})])


class TestHowMany:
    def test_an_update_leaves_the_number_that_load_has_made(self, nodes: Nodes) -> None:
        nodes.free = {"n0": 6.0}
        model = pools(
            drafts=True,
            target_groups={"num_groups": 2, "autoscaling": {"min_groups": 1, "max_groups": 4}},
            draft_pool={"autoscaling": {"min_workers": 0, "max_workers": 2}},
        )
        assert options([model])[0].autoscaling_config.initial_replicas == 2
        assert pool_options(model).autoscaling_config.initial_replicas == 1
        for _ in range(4):
            nodes.run("Coordinator", "n0", is_ready=True)
        assert options([model])[0].autoscaling_config.initial_replicas is None
        assert pool_options(model).autoscaling_config.initial_replicas == 1, "there is none"
        nodes.run("DraftPool", "n0", is_ready=True)
        assert pool_options(model).autoscaling_config.initial_replicas is None

    def test_more_groups_start_before_an_update_ends_any(self, nodes: Nodes) -> None:
        """Serve would wait for ever: here for a group of half the size beside one that has all of a node."""
        nodes.free = {"n0": 2.0}
        nodes.run("Coordinator", "n0", gpus=2.0, is_ready=True)
        with pytest.raises(
            ResourceError, match=r"num_groups: 1 more than .* deploy with num_groups: 1 first"
        ):
            build_applications([pools(target_groups={"num_groups": 2})])
        assert options([pools(target_groups={"num_groups": 1})])[0].num_replicas == 1
        nodes.free["n0"] = 1.0
        assert options([pools(target_groups={"num_groups": 2})])[0].max_surge_percent == 0

    def test_what_ends_at_the_same_time_makes_room_for_more(self, nodes: Nodes) -> None:
        nodes.free = {"n0": 3.0}
        for deployment in ("Coordinator", "DraftPool", "Coordinator-former"):
            nodes.run(deployment, "n0", is_ready=deployment == "Coordinator")
        assert options([pools(target_groups={"num_groups": 3})])[0].num_replicas == 3


class TestBesideTheOld:
    def surge(self, *models: ModelPools) -> list[int]:
        return [one.max_surge_percent for one in options(models)]

    def test_where_there_is_room_for_one_more(self, nodes: Nodes) -> None:
        nodes.run("Coordinator", "n0", is_ready=True)
        assert self.surge(pools()) == [0]
        with pytest.raises(ResourceError, match="surge needs room for one target group more"):
            self.surge(pools(updates="surge"))
        nodes.free["n0"] = 1.0
        assert self.surge(pools()) == [100]
        assert self.surge(pools(updates="in_place")) == [0]
        with pytest.raises(ResourceError, match="surge needs room for 2 target groups more"):
            self.surge(pools(updates="surge", target_groups={"num_groups": 2}))
        nodes.free["n0"] = 2.0
        assert self.surge(pools(updates="surge", target_groups={"num_groups": 2})) == [100]

    def test_not_where_the_room_is_of_the_draft_workers(self, nodes: Nodes) -> None:
        """A group would fit there, and must not go there: Serve would wait for ever."""
        nodes.free = {"n0": 4.0, "n1": 3.0}
        groups = {"num_groups": 2}
        for deployment, node, gpus in (
            ("Coordinator", "n0", 2.0),
            ("Coordinator", "n0", 2.0),
            ("DraftPool", "n1", 1.0),
        ):
            nodes.run(deployment, node, gpus=gpus, is_ready=True)
        assert nodes.free == {"n0": 0.0, "n1": 2.0}
        apart = {"own_nodes": True}
        assert self.surge(pools(gpus=2.0, drafts=True, target_groups=groups, draft_pool=apart)) == [0]
        assert self.surge(pools(gpus=2.0, drafts=True, target_groups=groups)) == [100]

    def test_not_where_the_group_would_have_to_be_divided(self, nodes: Nodes) -> None:
        nodes.free = {"n0": 2.0, "n1": 1.0, "n2": 1.0}
        groups = {"tensor_parallel_across_nodes": True}
        nodes.run("Coordinator", "n0", "n0", is_ready=True)
        assert self.surge(pools(tensor_parallel_size=2, target_groups=groups)) == [0]
        nodes.free = {"n0": 0.0, "n1": 2.0}
        assert self.surge(pools(tensor_parallel_size=2, target_groups=groups)) == [100]

    def test_not_where_another_model_may_take_the_room_for_good(self, nodes: Nodes) -> None:
        """What the small one leaves behind is too small for the large one."""
        nodes.free = {"n0": 4.0, "n1": 1.0, "n2": 4.0}
        nodes.run("Coordinator", "n0", gpus=4.0, is_ready=True)
        nodes.run("Coordinator-small", "n1")
        assert self.surge(pools(gpus=4.0), pools(suffix="-small")) == [0, 100]
        # Of one size they wait for each other.
        nodes.groups.clear()
        nodes.free = {"n0": 1.0, "n1": 1.0, "n2": 1.0}
        nodes.run("Coordinator", "n0", is_ready=True)
        nodes.run("Coordinator-small", "n1")
        assert self.surge(pools(), pools(suffix="-small")) == [100, 100]


class TestWhoseNamespace:
    def test_one_of_another_application_is_refused(self, nodes: Nodes) -> None:
        """Its groups were taken for the version before, whose room is free: doors and groups would mix."""
        nodes.free = {"n0": 2.0}
        nodes.run("Coordinator", "n0", is_ready=True)
        assert build_applications([pools()], own={"app"})
        assert build_applications([pools()]), "nobody knows the own name"
        with pytest.raises(ResourceError, match=r"drafthouse belongs to the application app, .*\(new\)"):
            build_applications([pools()], own={"new"})
        apart = pools(namespace="another")
        assert build_applications([apart], own={"new"})

    def test_also_while_it_is_only_starting(self, nodes: Nodes) -> None:
        nodes.free = {"n0": 2.0}
        nodes.run("Coordinator", "n0")
        nodes.applications["drafthouse-b"] = "app"
        assert build_applications([pools()], own={"new"})
        with pytest.raises(ResourceError, match="drafthouse-b belongs to the application app"):
            build_applications([pools(), pools(suffix="-b")], own={"new"})

    def test_one_that_has_been_deleted_owns_nothing(self, nodes: Nodes) -> None:
        """Its directory remembers it until it ends itself."""
        nodes.free = {"n0": 2.0}
        nodes.run("Coordinator", "n0", app="third")
        nodes.applications["drafthouse"] = "app"
        assert build_applications([pools()], own={"new"})
        nodes.groups["group0"]["state"] = "REMOVED"
        assert build_applications([pools()], own={"new"})


class TestWhereRayMayPlace:
    def kept_off(self, *models: ModelPools) -> list[tuple[str | None, str | None]]:
        """The nodes that target groups and draft workers of each model keep off."""
        found = []
        for coordinator in build_applications(models):
            arguments: Any = coordinator._bound_deployment.init_args
            both = (coordinator, *arguments[2:])
            configs: list[Any] = [one._bound_deployment._replica_config for one in both]
            labels = [config.placement_group_bundle_label_selector for config in configs]
            selectors = [None if one is None else one[0].get("ray.io/node-id") for one in labels]
            found.append((selectors[0], selectors[1] if len(selectors) > 1 else None))
        return found

    def test_draft_workers_leave_the_room_that_a_target_needs(self, nodes: Nodes) -> None:
        nodes.free = {"n0": 4.0, "n1": 4.0}
        model = pools(drafts=True, tensor_parallel_size=4, draft_pool={"num_workers": 2})
        assert self.kept_off(model) == [(None, "!in(n1)")]
        roomy = pools(drafts=True, tensor_parallel_size=2, draft_pool={"num_workers": 2})
        assert self.kept_off(roomy) == [(None, None)]

    def test_what_labels_cannot_mend_is_told(self, nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
        nodes.free = {"n0": 8.0, "n1": 2.0}
        model = pools(drafts=True, tensor_parallel_size=4, draft_pool={"num_workers": 5}, suffix="-m")
        assert self.kept_off(model) == [(None, None)]
        (record,) = caplog.records
        assert record.message.startswith("model m: everything fits, but Ray")

    def test_models_with_nodes_of_their_own_share_sides(self, nodes: Nodes) -> None:
        nodes.free = {"n0": 2.0, "n1": 2.0, "n2": 2.0, "n3": 2.0}
        apart = {"own_nodes": True}
        first = pools(drafts=True, gpus=2.0, draft_pool=apart)
        second = pools(drafts=True, draft_pool=apart, suffix="-b")
        # Draft workers on n0, targets on n3 and n2; the spare n1 is for the large target, if it loses n3.
        expected = ("!in(n0)", "!in(n1,n2,n3)")
        assert self.kept_off(first, second) == [expected, expected]
        nodes.free.pop("n3")
        nodes.free.pop("n2")
        with pytest.raises(ResourceError, match=r"model b: target group 1 .*\n.*\n.*draft worker of another"):
            self.kept_off(first, second)
        others = self.kept_off(first, pools(suffix="-b"))
        assert others == [("!in(n0)", "!in(n1)"), (None, None)], "who does not ask for it keeps off nobody"


def test_what_waits_for_a_place_is_told_in_words(nodes: Nodes) -> None:
    nodes.free = {"n0": 9.0}
    for deployment, app in (("Coordinator", "app"), ("Coordinator", "app"), ("DraftPool", "other")):
        nodes.run(deployment, "n0", "n0", app=app)
    assert application.pending_groups("app") == ()
    for group in nodes.groups.values():
        group |= {"state": "PENDING", "strategy": "STRICT_PACK"}
    assert application.pending_groups("app") == (
        "Coordinator: 2 placement groups with 2 x (1 GPU), STRICT_PACK",
    )
    nodes.groups["group0"]["state"] = "CREATED"
    nodes.groups["group1"]["bundles"][0] = {"CPU": 2.0, "GPU": 1.0}
    assert application.pending_groups("app") == (
        "Coordinator: 1 placement group with 1 x (2 CPU + 1 GPU) and 1 x (1 GPU), STRICT_PACK",
    )
