"""Run by test_live_faults.py: an ingress of another version of Drafthouse, which joins a cluster that runs.

Of the other version it has nothing but the number: what it sends says that it is of the next one.
Argument: Ray's address. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import sys

import ray

from cluster.client import ClusterService
from cluster.config import ClusterConfig
from specdec.transport import messages
from specdec.transport.config import ChannelConfig


async def join() -> None:
    service = ClusterService(ClusterConfig(channels=ChannelConfig(bind="loopback")))
    await service.start()
    await asyncio.to_thread(sys.stdin.read)
    await service.close()


def main(address: str) -> None:
    messages.PROTOCOL_VERSION += 1
    messages._HEADER = messages._MAGIC + bytes([messages.PROTOCOL_VERSION])
    ray.init(address, log_to_driver=False)
    asyncio.run(join())
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
