"""Which target group a request goes to: the one that has read its prompt's beginning before, or the idlest.

K/V of a prefix are in one group's cache, so who sends a conversation's next turn to another group has all of
it read again. `PrefixRoutes` remembers which groups were sent which prefixes, by name (the chain of digests
by which prefix caches find blocks, salts included), and forgets what was used least recently. `choose` is a
pure decision over that and the groups' loads: the group with the longest part of the prompt, unless it is
much busier than the idlest one, or full while another is not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from specdec.core.config import StrictConfig
from specdec.core.request import Request
from specdec.kv.caching_allocator import BlockKey
from specdec.kv.prefix_cache import PrefixTrail
from specdec.transport.base import PeerId

_MAX_GROUPS_PER_PREFIX = 4
"""Groups that one prefix is remembered for. A prompt that everybody sends comes to be in all of them."""

RouteReason = Literal["prefix", "new", "balance"]
"""prefix: the group has read a part of the prompt; new: no group has; balance: one has, but is too busy."""


class RoutingConfig(StrictConfig):
    """Which target group a request goes to, where there are several."""

    prefix_affinity: bool = True
    """Prefer the group that has read the beginning of a prompt before. False: always the least loaded one."""
    imbalance: float = Field(default=0.25, ge=0)
    """How much busier than the least loaded group that one may be, as a share of `scheduler.max_num_seqs`."""
    block_tokens: int = Field(default=64, ge=1)
    """Tokens in which prefixes are told apart; shorter ones are not remembered."""
    max_blocks: int = Field(default=1 << 16, ge=1)
    """Blocks of prompts that one door remembers, about 300 bytes each."""
    max_prompt_blocks: int = Field(default=256, ge=1)
    """Blocks at the beginning of one prompt that are looked at."""


class Load(NamedTuple):
    """How busy a group is: running and waiting requests as a share of what runs at once."""

    group: PeerId
    share: float


class Route(NamedTuple):
    """A decision."""

    group: PeerId
    reason: RouteReason
    num_known_blocks: int
    """Leading blocks of the prompt that the group has been sent before."""


def choose(loads: Sequence[Load], known: Mapping[PeerId, int], imbalance: float) -> Route:
    """Decide between groups, of which there is at least one.

    Args:
        loads: of the groups that may serve the request; of equals the first is taken.
        known: how many leading blocks of the prompt a group has, where it has any.
        imbalance: how much larger than the least load that of the preferred group may be.
    """
    idlest = min(loads, key=lambda load: load.share)
    best = max(loads, key=lambda load: (known.get(load.group, 0), -load.share))
    num_known = known.get(best.group, 0)
    if not num_known:
        return Route(idlest.group, "new", 0)
    would_wait = best.share >= 1.0 > idlest.share
    if would_wait or best.share > idlest.share + imbalance:
        return Route(idlest.group, "balance", known.get(idlest.group, 0))
    return Route(best.group, "prefix", num_known)


class PrefixRoutes:
    """Which groups were sent which prefixes lately."""

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._groups: OrderedDict[BlockKey, tuple[PeerId, ...]] = OrderedDict()
        """By the name of a prompt's block; whoever was sent it last comes first."""

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return len(self._groups)

    def names(self, request: Request) -> Sequence[BlockKey]:
        """Return the names of the blocks at the beginning of a prompt."""
        size, most = self._config.block_tokens, self._config.max_prompt_blocks
        prompt = request.prompt_token_ids[: size * most]
        return PrefixTrail(request.cache_salt).keys(prompt, len(prompt), size)

    def known(self, names: Sequence[BlockKey]) -> dict[PeerId, int]:
        """Return how many leading blocks each group was sent."""
        counts: dict[PeerId, int] = {}
        for index, name in enumerate(names):
            groups = self._groups.get(name, ())
            current = {group for group in groups if counts.get(group, 0) == index}
            if not current:
                break
            counts.update(dict.fromkeys(current, index + 1))
        return counts

    def note(self, names: Sequence[BlockKey], group: PeerId) -> None:
        """A request with these blocks goes to a group."""
        # The last block first, so that a prefix is never forgotten before what follows it.
        for name in reversed(names):
            others = [other for other in self._groups.pop(name, ()) if other != group]
            self._groups[name] = (group, *others[: _MAX_GROUPS_PER_PREFIX - 1])
        while len(self._groups) > self._config.max_blocks:
            self._groups.popitem(last=False)

    def forget(self, group: PeerId) -> None:
        """A group is gone, with its cache."""
        for name, groups in list(self._groups.items()):
            if group in groups:
                left = tuple(other for other in groups if other != group)
                if left:
                    self._groups[name] = left
                else:
                    del self._groups[name]
