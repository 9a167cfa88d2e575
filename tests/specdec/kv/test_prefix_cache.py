"""Names of blocks, what is found by them, and what never is."""

from __future__ import annotations

import random
from array import array

import pytest

from specdec.kv.block_table import BlockTable
from specdec.kv.prefix_cache import PrefixCache, PrefixTrail

TOKENS = list(range(100, 121))


class Holder:
    """A sequence with a table over the cache's pool."""

    def __init__(self, cache: PrefixCache, tokens: list[int], salt: str | None = None) -> None:
        self.cache = cache
        self.tokens = tokens
        self.trail = PrefixTrail(salt)
        self.table = BlockTable(cache.allocator, cache.block_size)

    def find(self) -> int:
        return len(self.cache.find(self.trail, self.tokens)) * self.cache.block_size

    def begin(self) -> int:
        blocks = self.cache.find(self.trail, self.tokens)
        self.cache.lend(blocks, self.trail, self.table)
        self.table.grow(len(self.tokens))
        return len(blocks) * self.cache.block_size

    def offer(self, num_computed: int) -> None:
        self.cache.offer(self.trail, self.table, self.tokens, num_computed)

    def release(self) -> None:
        self.table.release()
        self.trail.reset()


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(num_blocks=20, block_size=4)


def keys(tokens: list[int], salt: str | None = None) -> list[bytes]:
    return list(PrefixTrail(salt).keys(tokens, len(tokens), 4))


def test_names_say_the_tokens_from_the_first_one_on() -> None:
    assert len(keys(TOKENS)) == 5, "the last token fills no block"
    assert keys(TOKENS)[:4] == keys(TOKENS[:16])
    changed = [*TOKENS[:5], 0, *TOKENS[6:]]
    assert [a == b for a, b in zip(keys(TOKENS), keys(changed), strict=True)] == [True, *[False] * 4]
    assert keys(TOKENS[4:8])[0] not in keys(TOKENS), "the same tokens elsewhere are something else"


def test_names_do_not_depend_on_how_they_were_asked_for() -> None:
    trail, generator = PrefixTrail(), random.Random(0)
    for _ in range(20):
        trail.keys(TOKENS, generator.randint(0, len(TOKENS)), 4)
    assert list(trail.keys(TOKENS, len(TOKENS), 4)) == keys(TOKENS)


def test_salts_keep_requests_apart() -> None:
    salted = [keys(TOKENS, salt) for salt in (None, "", "a", "b")]
    assert len({name for names in salted for name in names}) == 4 * 5


def test_no_salt_is_the_name_of_a_block() -> None:
    """A salt may be any text, also the bytes that name tokens."""
    begin = array("q", TOKENS[:4]).tobytes()
    assert keys(TOKENS[4:], salt=begin.decode()) != keys(TOKENS)[1:]


def test_the_block_of_the_last_token_is_not_looked_for(cache: PrefixCache) -> None:
    first = Holder(cache, TOKENS[:16])
    first.begin()
    first.offer(16)
    assert Holder(cache, TOKENS[:16]).find() == 12
    assert Holder(cache, TOKENS[:17]).find() == 16


def test_only_full_computed_blocks_are_found(cache: PrefixCache) -> None:
    first = Holder(cache, TOKENS)
    first.begin()
    for num_computed, num_found in ((3, 0), (4, 4), (11, 8), (21, 20)):
        first.offer(num_computed)
        assert Holder(cache, [*TOKENS, 1, 2, 3, 4]).find() == num_found


def test_a_common_beginning_is_held_once_and_stays_until_nobody_holds_it(cache: PrefixCache) -> None:
    first, second = Holder(cache, TOKENS), Holder(cache, [*TOKENS[:9], 1, 2, 3])
    first.begin()
    first.offer(21)
    assert second.begin() == 8
    assert cache.allocator.num_used == 6 + 1
    first.release()
    assert cache.allocator.num_used == 3
    assert Holder(cache, TOKENS).find() == 20, "free, and still known"
    cache.allocator.check_integrity()


def test_the_end_of_a_prefix_is_evicted_before_its_beginning(cache: PrefixCache) -> None:
    first = Holder(cache, TOKENS)
    first.begin()
    first.offer(21)
    first.release()
    cache.allocator.allocate(cache.allocator.num_free - 3)
    assert Holder(cache, TOKENS).find() == 12


def test_withdrawn_blocks_are_not_found_nor_offered_again(cache: PrefixCache) -> None:
    first = Holder(cache, TOKENS)
    first.begin()
    first.offer(12)
    cache.withdraw(first.trail, first.table)
    first.offer(21)
    assert Holder(cache, TOKENS).find() == 0
    first.release()
    first.begin()
    first.offer(21)
    assert Holder(cache, TOKENS).find() == 20, "computed anew"


def test_two_that_compute_the_same_do_not_disturb_each_other(cache: PrefixCache) -> None:
    one, other = Holder(cache, TOKENS), Holder(cache, TOKENS)
    one.begin()
    other.begin()
    one.offer(8)
    other.offer(21)
    one.offer(21)
    one.release()
    other.release()
    assert Holder(cache, TOKENS).find() == 20
    cache.allocator.check_integrity()
