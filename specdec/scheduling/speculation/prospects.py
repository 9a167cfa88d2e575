"""What a decision of the goodput controller is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.decision import Region
from specdec.scheduling.speculation.goodput import AheadOutlook, Batch, Evaluation, Kind, Option
from specdec.scheduling.state import Schedulable


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospects:
    """What each kind of rounds should draft of a batch, and what that would bring.

    To work it out is most of a decision's time, and can be done a round before: sequences are a few tokens
    longer then, which makes no difference.
    """

    index: Mapping[RequestId, int]
    """Sequences by their places."""
    num_here: int
    """The first ones, which are to be in the next round."""
    batch: Batch
    region: Region
    evaluation: Evaluation
    outlook: AheadOutlook
    options: Mapping[Kind, Option]
    prices: Mapping[Kind, float]
    """See `Decision.prices`."""

    def are_of(self, sequences: Sequence[Schedulable], num_here: int) -> bool:
        """Whether they are those of exactly these sequences, in this order."""
        return (
            num_here == self.num_here
            and len(sequences) == len(self.index)
            and all(self.index.get(one.request_id) == at for at, one in enumerate(sequences))
        )
