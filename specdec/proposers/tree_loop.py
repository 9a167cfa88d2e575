"""From committed prefixes to trees of draft tokens: a forward for each level, of all sequences together.

Nodes that children are looked up behind are read: they lie behind the committed tokens, in the order in
which that was wished for. Where a level is one native call, it reads its own nodes alone; else it reads those
before it once more, since rows of a batch see the cached prefix as a whole. Leaves are not read.
`DraftedTree.read` says what lies where then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from specdec.core.distributions import TokenDistribution
from specdec.core.proposal import NoiseStream
from specdec.model.batch import GeneratingRunner, NativeChooser, Runner, SequenceSlice
from specdec.proposers.draft_loop import ChainStart, shape_rows
from specdec.proposers.draft_sampling import DraftSampling
from specdec.sampling.noise_rows import gumbel_tokens, row_keys
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import TokenChooser
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.tree.growth import Child, GrowingTree, TokenTree
from specdec.tree.topology import ROOT
from specdec.verification.draft_rows import pack_rows

_MIN_RANKED = 8
"""So many of the likeliest tokens, at least, are compared to say how confident one is at a temperature."""


class ReadNodes(NamedTuple):
    """Draft tokens whose K/V lie behind the committed ones."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


class DraftedTree(NamedTuple):
    """What was drafted behind one prefix."""

    tree: TokenTree
    q_rows: tuple[TokenDistribution, ...] | None
    """What each node was drawn from, given the siblings before it."""
    read: ReadNodes


@dataclass(slots=True)
class Sprout:
    """One tree on its way."""

    number: int
    """Of its start, among those that are read together."""
    start: ChainStart
    growth: GrowingTree
    sees_paths: bool = True
    """Whether nodes of one depth may have different children."""
    asked: Sequence[int] = (ROOT,)
    """Nodes behind which children are looked up next; all are as deep."""
    read: list[int] = field(default_factory=list)
    """Nodes by place."""
    depths: dict[int, int] = field(default_factory=lambda: {ROOT: 0})
    paths: dict[int, tuple[int, ...]] = field(default_factory=lambda: {ROOT: ()})
    q_rows: dict[tuple[int, int], TokenDistribution] = field(default_factory=dict)
    """By parent and token."""

    @property
    def rows(self) -> Sequence[int]:
        """Of these nodes, those that logits are wanted of: one, where it stands for all."""
        return self.asked if self.sees_paths else self.asked[:1]

    def read_on(self, asked: Sequence[int]) -> None:
        self.asked = asked
        self.read.extend(asked)
        for node in asked:
            parent = self.growth.parent_of(node)
            self.depths[node] = self.depths[parent] + 1
            self.paths[node] = (*self.paths[parent], self.growth.token_of(node))

    @property
    def read_nodes(self) -> ReadNodes:
        place = {node: index for index, node in enumerate(self.read)} | {ROOT: ROOT}
        return ReadNodes(
            tuple(map(self.growth.token_of, self.read)),
            tuple(place[self.growth.parent_of(node)] for node in self.read),
        )

    def slice(self, *, is_whole: bool = True) -> SequenceSlice:
        """Return all nodes to be read; unless `is_whole`, those alone that children are looked up behind."""
        start, read = self.start, self.read_nodes
        num_known = 0 if is_whole else len(self.read) - len(self.asked)
        return SequenceSlice(
            token_ids=read.token_ids[num_known:],
            start=start.end - start.num_dropped + num_known,
            block_table=start.block_table,
            num_logit_rows=len(self.rows),
            parents=read.parents,
            shift=start.shift,
            num_dropped=start.num_dropped,
            num_known=num_known,
        )

    def drafted(self, *, has_q_rows: bool) -> DraftedTree:
        tree = self.growth.best()
        q_rows = None
        if has_q_rows and not self.start.params.is_greedy:
            keys = zip(map(self.growth.parent_of, tree.nodes), tree.token_ids, strict=True)
            q_rows = tuple(self.q_rows[key] for key in keys)
        return DraftedTree(tree, q_rows, self.read_nodes)


class NodeReader(Protocol):
    """What says, for a loop, what may come next: logits [R, V], fp32, in the order of what was asked."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it has logits of."""
        ...

    @property
    def sees_paths(self) -> bool:
        """Whether what it says of a node depends on more than the prefix and the depth."""
        ...

    def read_prefixes(self, starts: Sequence[ChainStart]) -> torch.Tensor:
        """Begin a call of the loop: return logits behind the starts that have a budget."""
        ...

    def read_nodes(self, sprouts: Sequence[Sprout]) -> torch.Tensor:
        """Return logits behind the nodes that are `rows` of sprouts, all at the same depth."""
        ...

    def try_read_prefixes(self, starts: Sequence[ChainStart], chooser: NativeChooser) -> bool:
        """As `read_prefixes`, where `chooser` can be called on the logits at once; it knows the starts.

        False: nothing of it is compiled, or not for these. What was done all the same does no harm.
        """
        ...

    def try_read_nodes(self, sprouts: Sequence[Sprout], chooser: NativeChooser) -> bool:
        """As `read_nodes`, in the way of `try_read_prefixes`; the chooser knows the sprouts."""
        ...


class RunnerNodes:
    """Implements `NodeReader` with a model that reads tokens: one forward for all."""

    sees_paths = True

    def __init__(self, runner: Runner, generating: GeneratingRunner | None = None) -> None:
        """Read with `runner`; `generating` is the same where it may choose tokens itself."""
        self._runner = runner
        self._generating = generating
        self.vocab_size = runner.vocab_size

    def read_prefixes(self, starts: Sequence[ChainStart]) -> torch.Tensor:
        return self._runner.forward([start.first_slice() for start in starts])

    def read_nodes(self, sprouts: Sequence[Sprout]) -> torch.Tensor:
        return self._runner.forward([sprout.slice() for sprout in sprouts])

    def try_read_prefixes(self, starts: Sequence[ChainStart], chooser: NativeChooser) -> bool:
        return self._try_generate([start.first_slice() for start in starts], chooser)

    def try_read_nodes(self, sprouts: Sequence[Sprout], chooser: NativeChooser) -> bool:
        return self._try_generate([sprout.slice(is_whole=False) for sprout in sprouts], chooser)

    def _try_generate(self, slices: Sequence[SequenceSlice], chooser: NativeChooser) -> bool:
        if self._generating is None:
            return False
        return self._generating.try_generate(slices, [0] * len(slices), chooser) is not None


class TreeDraftLoop:
    """Drafts trees with whatever can be asked about nodes."""

    def __init__(
        self,
        reader: NodeReader,
        sampler: TokenChooser,
        vocab_size: int,
        sampling: DraftSampling,
        *,
        uses_confidence: bool,
    ) -> None:
        """Draft with `reader`; tokens from `vocab_size` on are never drafted.

        Children of a node are, in this order, the tokens of highest noisy score where the noise is the
        target's, draws without replacement where `sampling` gives q rows, and else the likeliest tokens.
        """
        self._reader = reader
        self._sampler = sampler
        self._vocab_size = min(vocab_size, reader.vocab_size)
        self._gives_q_rows = sampling.gives_q_rows
        self._stream: NoiseStream | None = None if sampling.is_deterministic else sampling.noise_stream
        self._uses_confidence = uses_confidence

    def draft(
        self, starts: Sequence[ChainStart], growths: Sequence[GrowingTree | None]
    ) -> list[DraftedTree | None]:
        """Read what each start says, and grow its tree behind it, where there is one."""
        sprouts = [
            None if growth is None else Sprout(number, start, growth, self._sees_paths(start))
            for number, (start, growth) in enumerate(zip(starts, growths, strict=True))
        ]
        active = [sprout for sprout in sprouts if sprout is not None]
        children = self._children_behind(active, starts)
        while active:
            active = _grown(active, children)
            if active:
                children = self._children_behind(active)
        return [
            None if sprout is None else sprout.drafted(has_q_rows=self._gives_q_rows) for sprout in sprouts
        ]

    def _sees_paths(self, start: ChainStart) -> bool:
        """Whether children depend on paths; draws are shown node by node, whatever they come from."""
        return self._reader.sees_paths or self._gives_q_rows or start.changes_logits

    def _children_behind(
        self, sprouts: Sequence[Sprout], starts: Sequence[ChainStart] | None = None
    ) -> list[list[Child]]:
        """Read a level; return what may come behind each of its nodes, tree after tree.

        With `starts` that is the first level: these are read.
        """
        children = self._try_children(sprouts, starts)
        if children is not None:
            return children
        reader = self._reader
        logits_RV = reader.read_nodes(sprouts) if starts is None else reader.read_prefixes(starts)
        return self._children_of(sprouts, logits_RV[:, : self._vocab_size]) if sprouts else []

    def _try_children(
        self, sprouts: Sequence[Sprout], starts: Sequence[ChainStart] | None
    ) -> list[list[Child]] | None:
        """See `_children_behind`: None, where not all of it is compiled.

        K/V that were written all the same are those that the reader writes.
        """
        if not sprouts or any(sprout.start.changes_logits for sprout in sprouts):
            return None
        has_sampled = any(not sprout.start.params.is_greedy for sprout in sprouts)
        if self._gives_q_rows and has_sampled:
            return None  # what is drawn from is wanted too
        ranker = self._sampler.ranker(
            [
                SequenceSampling(start.params, start.seed)
                for start in (starts or [sprout.start for sprout in sprouts])
            ],
            self._vocab_size,
            self._stream,
            num=self._num_ranked(sprouts, has_sampled=has_sampled),
            num_rows=sum(len(sprout.rows) for sprout in sprouts),
            has_confidence=self._uses_confidence,
        )
        if ranker is None:
            return None
        reader = self._reader
        is_read = (
            reader.try_read_nodes(sprouts, ranker.chooser)
            if starts is None
            else reader.try_read_prefixes(starts, ranker.chooser)
        )
        if not is_read:
            return None
        return [[Child(*pair) for pair in its] for its in ranker.ranked()]

    def _children_of(self, sprouts: Sequence[Sprout], logits_RV: torch.Tensor) -> list[list[Child]]:
        """Return what may come behind each node, given the logits there."""
        rows = SamplingRows.build(
            [
                RowSpec(
                    sprout.start.params,
                    sprout.start.seed,
                    sprout.start.end,
                    len(sprout.rows),
                    [sprout.depths[node] for node in sprout.rows],
                )
                for sprout in sprouts
            ],
            logits_RV.device,
        )
        return self._children(self._shaped(sprouts, logits_RV), rows, sprouts)

    def _num_ranked(self, sprouts: Sequence[Sprout], *, has_sampled: bool) -> int:
        num = max(sprout.growth.num_children for sprout in sprouts)
        return max(num, _MIN_RANKED) if self._uses_confidence and has_sampled else num

    def _shaped(self, sprouts: Sequence[Sprout], logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the logits as the requests want them changed behind each row's own path."""
        if not any(sprout.start.changes_logits for sprout in sprouts):
            return logits_RV
        logits_RV = logits_RV.clone()
        first = 0
        for sprout in sprouts:
            end = first + len(sprout.rows)
            paths = [sprout.paths[node] for node in sprout.rows]
            shape_rows(
                logits_RV[first:end],
                sprout.start.shaper,
                sprout.start.constraint,
                paths,
                self._sampler.first_token_id,
            )
            first = end
        return logits_RV

    def _children(
        self, logits_RV: torch.Tensor, rows: SamplingRows, sprouts: Sequence[Sprout]
    ) -> list[list[Child]]:
        """Return, for every row, what may come next."""
        num = self._num_ranked(sprouts, has_sampled=rows.has_sampled)
        ranked = self._sampler.ranked(logits_RV, rows, num, self._stream)
        if self._gives_q_rows and rows.has_sampled:
            ranked = self._drawn(ranked, logits_RV, rows, sprouts)
        if not self._uses_confidence:
            return [[Child(token_id, 0.0) for token_id in its] for its in ranked]
        return self._with_confidence(ranked, logits_RV, rows)

    def _drawn(
        self,
        ranked: Sequence[Sequence[int]],
        logits_RV: torch.Tensor,
        rows: SamplingRows,
        sprouts: Sequence[Sprout],
    ) -> list[list[int]]:
        """Take tokens ranked by noise of their own as drawn one after the other; keep what from.

        The order of log q + Gumbel noise is that of draws without replacement: each from what q leaves
        when those before are taken out.
        """
        q_RV = self._sampler.distributions(logits_RV, rows)
        nodes = [(sprout, node) for sprout in sprouts for node in sprout.rows]
        drawn: list[list[int]] = []
        for (sprout, node), its_ranked, q_V in zip(nodes, ranked, q_RV, strict=True):
            if sprout.start.params.is_greedy:
                drawn.append(list(its_ranked))
                continue
            kept: list[int] = []
            left_V = q_V.double()
            for token_id in its_ranked[: sprout.growth.num_children]:
                now_V = (left_V / left_V.sum()).float()
                if not float(now_V[token_id]) > 0.0:
                    break
                (sprout.q_rows[node, token_id],) = pack_rows(now_V[None])
                left_V[token_id] = 0.0
                kept.append(token_id)
            drawn.append(kept)
        return drawn

    def _with_confidence(
        self, ranked: Sequence[Sequence[int]], logits_RV: torch.Tensor, rows: SamplingRows
    ) -> list[list[Child]]:
        """Say how likely each token is thought to stand.

        Where the target chooses by log p + g and the same g is known here, by how far its score is above
        those of the others; else by its probability.
        """
        width = max(map(len, ranked), default=0)
        if width == 0:
            return [[] for _ in ranked]
        device = logits_RV.device
        ids_RN = torch.tensor([[*its, *[0] * (width - len(its))] for its in ranked], device=device)
        counts_R = torch.tensor([len(its) for its in ranked], device=device)
        scores_RN = self._sampler.log_probabilities(logits_RV, ids_RN, rows)
        if self._stream is not None and rows.has_sampled:
            noise_RN = gumbel_tokens(row_keys(rows.seeds, rows.positions, self._stream), ids_RN)
            is_there_RN = torch.arange(width, device=device) < counts_R[:, None]
            noisy_RN = (scores_RN + noise_RN).masked_fill(~is_there_RN, float("-inf")).log_softmax(-1)
            scores_RN = torch.where(rows.temperature[:, None] > 0.0, noisy_RN, scores_RN)
        return [
            [Child(*pair) for pair in zip(its, scores, strict=False)]
            for its, scores in zip(ranked, scores_RN.tolist(), strict=True)
        ]


def _grown(sprouts: Sequence[Sprout], children: Sequence[list[Child]]) -> list[Sprout]:
    """Hand every tree its new children; return those that go on."""
    its_rows = iter(children)
    left: list[Sprout] = []
    for sprout in sprouts:
        its_children = [next(its_rows) for _ in sprout.rows]
        asked = sprout.growth.grow(its_children if sprout.sees_paths else its_children * len(sprout.asked))
        if asked:
            sprout.read_on(asked)
            left.append(sprout)
    return left
