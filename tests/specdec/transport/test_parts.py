"""Items of one message after the other."""

from __future__ import annotations

import itertools
import random

from specdec.transport.parts import in_parts


def test_parts_hold_everything_in_order_and_no_more_than_may_be() -> None:
    generator = random.Random(1)
    for _ in range(200):
        sized = [(number, generator.randrange(1, 12)) for number in range(generator.randrange(20))]
        parts = list(in_parts(sized, 10))
        sizes = dict(sized)
        assert [item for part in parts for item in part] == [item for item, _ in sized]
        assert all(len(part) == 1 or sum(sizes[item] for item in part) <= 10 for part in parts)
        for part, following in itertools.pairwise(parts):
            assert sum(sizes[item] for item in part) + sizes[following[0]] > 10, "it would have had room"
