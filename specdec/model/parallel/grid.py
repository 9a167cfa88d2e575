"""Which of the ranks of a model holds what: stages one behind the other, tensor parallel ranks in each."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.model.parallel.group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """This rank's place among `num_stages` stages of equally many ranks each.

    Consecutive ranks make a stage, and ranks 0 .. are the last one: whoever commands has the logits, so that
    a round's tokens are where they are wanted without another message.
    """

    ranks: RankGroup
    """All of them."""
    tensor: RankGroup | None
    """Those of this rank's stage; None: it is alone in it."""
    stage: int
    """0 embeds the tokens."""
    num_stages: int

    @staticmethod
    def of(ranks: RankGroup, num_stages: int) -> RankGrid:
        """Find this rank's place; all ranks call it at the same time.

        Raises:
            TransportError: a rank is gone.
        """
        width = ranks.size // num_stages
        assert width * num_stages == ranks.size, "stages have equally many ranks"
        tensor: RankGroup | None = ranks
        if num_stages > 1:
            tensor = ranks.part(width) if width > 1 else None
        return RankGrid(
            ranks=ranks,
            tensor=tensor,
            stage=num_stages - 1 - ranks.rank // width,
            num_stages=num_stages,
        )

    @property
    def width(self) -> int:
        """Ranks of one stage."""
        return self.ranks.size // self.num_stages

    @property
    def sender(self) -> int:
        """Rank that holds the same part of the stage before."""
        return self.ranks.rank + self.width

    @property
    def receiver(self) -> int:
        """Rank that holds the same part of the stage behind."""
        return self.ranks.rank - self.width
