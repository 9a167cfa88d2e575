"""A draft worker played by the test, at the other end of a real proposer."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.transport.base import PeerId
from specdec.transport.memory import Faults, MemoryChannel
from specdec.transport.messages import ProposeAnswer, ProposeReply, ProposeRequest, Release
from tests.specdec.engine.remote_cluster import Cluster


class Scripted:
    """A draft worker played by the test."""

    def __init__(self, cluster: Cluster, name: str = "scripted") -> None:
        self.channel: MemoryChannel = cluster.network.open(PeerId(name))
        self.channel.admit([cluster.proposer._channel.address])
        self.asked: list[ProposeRequest] = []
        self.released: list[Release] = []
        self.replies: list[Mapping[str, object]] = []
        """Changes to the right answer, one per answer to send."""
        self.draft_s = 0.0
        """What each of them has taken, as it says."""
        cluster.proposer.set_workers([self.channel.address])
        cluster.network.serve(PeerId(name), self.serve)

    def serve(self) -> None:
        envelope = self.channel.receive(0)
        if isinstance(envelope.message, Release):
            self.released.append(envelope.message)
            return
        assert isinstance(envelope.message, ProposeRequest)
        self.asked.append(envelope.message)
        for changes in self.replies:
            answers = []
            for entry in envelope.message.entries:
                fields: dict[str, object] = {
                    "request_id": entry.request_id,
                    "epoch": entry.epoch,
                    "committed_len": entry.committed_len,
                    "prefix_hash": entry.prefix_hash,
                    "token_ids": (1, 2, 3),
                    **changes,
                }
                answers.append(ProposeAnswer(**fields))  # type: ignore[arg-type]
            reply = ProposeReply(envelope.message.round_id, tuple(answers), self.draft_s)
            self.channel.send(envelope.sender, reply)


def scripted(*replies: Mapping[str, object]) -> tuple[Cluster, Scripted, RemoteProposer]:
    cluster = Cluster(Faults(), num_drafters=0)
    worker = Scripted(cluster)
    worker.replies = list(replies)
    return cluster, worker, cluster.proposer
