"""Where the parts of a deployment run, how many of each, and how long they wait for each other."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from cluster.affinity import RoutingConfig
from cluster.autoscaling.config import DraftScalingConfig, TargetScalingConfig, initial_number
from cluster.inventory import ACCELERATOR_PREFIX, NODE_ID_LABEL
from specdec.core.config import StrictConfig
from specdec.engine.draft_pool.patience import DraftDeadlineConfig
from specdec.engine.draft_pool.placement import DraftPlacementConfig
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.transport.config import ChannelConfig

_ACCELERATOR_SHARE = 0.001
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_SELECTOR = re.compile(rf"!?(?:{_LABEL}|in\({_LABEL}(?:, ?{_LABEL})*\))")
"""What Ray takes; anything else it would refuse only when processes are to be started."""


class BundleConfig(StrictConfig):
    """What one worker takes of a node. It becomes one bundle of a Ray placement group."""

    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs (Ray's logical ones)."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources, such as `target_slot: 1`: they select nodes, and bound how many workers one
    takes."""
    accelerator_type: str | None = Field(default=None, min_length=1)
    """Kind of GPU that the node must have, by Ray's name for it, such as `H100`; None: any."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Ray node labels that the node must have, such as `pool: target`. Values may be `!value`, `in(a,b)` or
    `!in(a,b)`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any(amount > 0 for amount in self.amounts().values()):
            raise ValueError("a bundle must take something: give num_cpus, num_gpus or resources")
        if self.accelerator_type is not None and not self.num_gpus:
            raise ValueError(
                f"accelerator_type: {self.accelerator_type} is a kind of GPU, so num_gpus must be positive"
            )
        for name, amount in self.resources.items():
            if amount <= 0 or name in {"CPU", "GPU"}:
                raise ValueError(
                    f"resources.{name}: must be positive, and not CPU or GPU (num_cpus, num_gpus)"
                )
        for name, selector in self.labels.items():
            if not _SELECTOR.fullmatch(selector):
                raise ValueError(
                    f"labels.{name}: must be `value`, `!value`, `in(a,b)` or `!in(a,b)`, values of letters, "
                    f"digits and - _ . that begin and end with a letter or digit; got {selector!r}"
                )
        return self

    def amounts(self) -> dict[str, float]:
        """Resources by Ray's names, zeros left out."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        if self.accelerator_type is not None:
            # A node has one of it, for any number of GPUs; Ray's own option asks for this little of it, too.
            amounts[f"{ACCELERATOR_PREFIX}{self.accelerator_type}"] = _ACCELERATOR_SHARE
        return {name: amount for name, amount in amounts.items() if amount > 0}


class TargetGroupsConfig(StrictConfig):
    """The target groups: each is one copy of the target with a coordinator of its own."""

    num_groups: int = Field(default=1, ge=1)
    """Copies of the target; with `autoscaling`, those at first."""
    autoscaling: TargetScalingConfig | None = None
    """How many there are from then on; None: always `num_groups`."""
    bundle: BundleConfig = BundleConfig()
    """What one target worker takes."""
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """How the bundles of one group are placed. PACK: on one node where that fits (its ranks have a fast
    link), else stages over several nodes. STRICT_PACK: on one node or not at all. SPREAD: over several nodes
    if there are. STRICT_SPREAD: a node for each bundle."""
    tensor_parallel_across_nodes: bool = False
    """Let PACK place ranks of one layer on different nodes, where no node has room for all of them. Each
    layer then waits for the network twice; stages (`target.pipeline_parallel_size`) do not."""
    load_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest time (seconds) for a target worker to load its model."""
    step_timeout_s: float = Field(default=120.0, gt=0)
    """A target worker that does not answer a round for so many seconds counts as dead."""
    rank_silence_s: float = Field(default=20.0, ge=3, le=3600)
    """A rank of a target that runs no Python for so many seconds (a stopped process, a machine that is cut
    off) counts as dead, and its group is started anew. Ranks show once a second that they do; a file system
    that stands still, or memory that is swapped out, may keep one from it for longer than usual."""

    @model_validator(mode="after")
    def _check_scaling(self) -> Self:
        _ = self.initial_groups  # raises where it contradicts the bounds
        return self

    @property
    def initial_groups(self) -> int:
        """Target groups at first."""
        if self.autoscaling is None:
            return self.num_groups
        return initial_number(
            self.num_groups,
            is_given="num_groups" in self.model_fields_set,
            bounds=(self.autoscaling.min_groups, self.autoscaling.max_groups),
            names=("num_groups", "groups"),
        )

    @property
    def max_groups(self) -> int:
        """Most target groups that there ever are."""
        return self.num_groups if self.autoscaling is None else self.autoscaling.max_groups

    @property
    def may_be_none(self) -> bool:
        """Whether there may be no target group for a while."""
        return self.autoscaling is not None and self.autoscaling.min_groups == 0


class DraftPoolConfig(StrictConfig):
    """The draft workers. There are none when the method drafts without a model."""

    num_workers: int = Field(default=1, ge=1)
    """Draft workers; every coordinator may use all of them. With `autoscaling`, those at first."""
    autoscaling: DraftScalingConfig | None = None
    """How many there are from then on; None: always `num_workers`."""
    bundle: BundleConfig = BundleConfig()
    """What one draft worker takes. All of its ranks are on one node."""
    own_nodes: bool = False
    """Keep draft workers off nodes with a part of a target group, and target groups off theirs. Decided when
    the application is built; nodes that join later are open to both."""
    load_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest time (seconds) for a draft worker to load its model."""
    step_timeout_s: float = Field(default=120.0, gt=0)
    """A draft worker that is at one batch for so many seconds hangs, and is started anew. Nobody's stream
    waits for it: rounds go on without its drafts after the deadline."""
    rank_silence_s: float = Field(default=20.0, ge=3, le=3600)
    """The same as `target_groups.rank_silence_s` for a rank of a draft model: its draft worker is started
    anew. Nobody's stream waits for that."""
    deadlines: DraftDeadlineConfig = DraftDeadlineConfig()
    """How long a round waits for drafts."""
    shares: DraftShareConfig = DraftShareConfig()
    """What one draft worker takes on, and how coordinators share it."""
    placement: DraftPlacementConfig = DraftPlacementConfig()
    """How a coordinator spreads its requests over the draft workers."""

    @model_validator(mode="after")
    def _check_scaling(self) -> Self:
        _ = self.initial_workers  # raises where it contradicts the bounds
        return self

    @property
    def initial_workers(self) -> int:
        """Draft workers at first."""
        if self.autoscaling is None:
            return self.num_workers
        return initial_number(
            self.num_workers,
            is_given="num_workers" in self.model_fields_set,
            bounds=(self.autoscaling.min_workers, self.autoscaling.max_workers),
            names=("num_workers", "workers"),
        )

    @property
    def max_workers(self) -> int:
        """Most draft workers that there ever are."""
        return self.num_workers if self.autoscaling is None else self.autoscaling.max_workers

    @property
    def may_be_none(self) -> bool:
        """Whether there may be no draft worker for a while."""
        return self.autoscaling is not None and self.autoscaling.min_workers == 0


class MembershipConfig(StrictConfig):
    """How the processes find each other and notice each other's end."""

    lease_s: float = Field(default=6.0, gt=0)
    """A process that has not been heard of for so many seconds is taken for dead."""
    renew_s: float = Field(default=1.0, gt=0)
    """Seconds between renewals; also how late a change of membership may be noticed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lease_s < 3 * self.renew_s:
            raise ValueError(
                f"lease_s ({self.lease_s}) must be at least three times renew_s ({self.renew_s})"
            )
        return self


class HealthCheckConfig(StrictConfig):
    """How Ray Serve finds out that an ingress, a coordinator, or who looks after a draft worker, hangs."""

    period_s: float = Field(default=2.0, gt=0)
    """Seconds between checks of a replica that answers."""
    timeout_s: float = Field(default=30.0, gt=0)
    """A check that has no answer after so many seconds has failed. A replica that fails three in a row is
    replaced; one that has ended is replaced at the next check."""


class ClusterConfig(StrictConfig):
    """Everything about the cluster that is not the engine's own business."""

    namespace: str = Field(default="drafthouse", min_length=1)
    """Ray namespace of the directory; two deployments in one cluster need two."""
    target_groups: TargetGroupsConfig = TargetGroupsConfig()
    """Copies of the target."""
    draft_pool: DraftPoolConfig = DraftPoolConfig()
    """Draft workers."""
    membership: MembershipConfig = MembershipConfig()
    """Leases."""
    health_checks: HealthCheckConfig = HealthCheckConfig()
    """Serve's looks at its replicas."""
    channels: ChannelConfig = ChannelConfig()
    """Sockets."""
    routing: RoutingConfig = RoutingConfig()
    """How doors choose among several target groups."""
    failover_timeout_s: float = Field(default=300.0, gt=0)
    """How long (seconds) a stream whose coordinator was lost waits for another before it ends in an error."""
    drain_timeout_s: float = Field(default=60.0, ge=0)
    """How long (seconds) a coordinator, or a door, that is shut down goes on serving the streams it has. With
    none left, it ends at once."""
    updates: Literal["auto", "in_place", "surge"] = "auto"
    """How a changed deployment replaces target groups. in_place: one after the other, each ends before its
    successor begins; with one group nothing serves meanwhile. surge: each ends when its successor serves,
    which takes room for at least one more. auto: surge, if there is that room when the application is
    built."""
    check_resources: bool = True
    """Refuse at once to deploy what does not fit the nodes that are there; false where an autoscaler adds
    nodes."""
    startup_timeout_s: float = Field(default=1800.0, gt=0)
    """How long (seconds) `serve` waits for the application to become healthy."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.draft_pool.own_nodes:
            if not self.check_resources:
                raise ValueError(
                    "draft_pool.own_nodes: needs check_resources: true, since it goes by the nodes that are "
                    "there; give target_groups.bundle and draft_pool.bundle different labels instead"
                )
            for name, bundle in (
                ("target_groups", self.target_groups.bundle),
                ("draft_pool", self.draft_pool.bundle),
            ):
                if NODE_ID_LABEL in bundle.labels:
                    raise ValueError(
                        f"draft_pool.own_nodes: cannot be combined with {name}.bundle.labels {NODE_ID_LABEL}"
                    )
        return self

    def at_most(self) -> ClusterConfig:
        """Return the cluster with as many of everything as there may ever be: all of it has to fit."""
        groups = self.target_groups.model_copy(update={"num_groups": self.target_groups.max_groups})
        pool = self.draft_pool.model_copy(update={"num_workers": self.draft_pool.max_workers})
        return self.model_copy(update={"target_groups": groups, "draft_pool": pool})

    def draft_shares(self, max_num_seqs: int) -> DraftShareConfig:
        """Return what one draft worker takes on, where each coordinator runs `max_num_seqs` at most."""
        shares = self.draft_pool.shares
        if shares.max_sequences is not None:
            return shares
        return shares.model_copy(update={"max_sequences": max_num_seqs * self.target_groups.max_groups})
