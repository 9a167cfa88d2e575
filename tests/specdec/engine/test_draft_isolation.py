"""One coordinator of a draft worker does what it likes; the others get their drafts all the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.ids import RequestId, owned_id, owner_of
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.proposal import MAX_DRAFT_TOKENS
from specdec.core.sampling_params import SamplingParams
from specdec.engine.draft_pool.server import sequence_name
from specdec.engine.draft_pool.shares import DraftShareConfig, equal_share, fair_batch
from specdec.transport.base import PeerId
from specdec.transport.messages import (
    DraftBranch,
    DraftOpening,
    Message,
    ProposeAnswer,
    ProposeEntry,
    ProposeReply,
    Release,
    decode,
)
from tests.specdec.engine.draft_pool.server_bench import MODEL, PARAMS, VOCAB
from tests.specdec.engine.draft_pool.shared_worker import DRAFT, Pool, an_entry


def drafts(tokens: Sequence[int], number: int = 3) -> tuple[int, ...]:
    return tuple(MODEL.continuation(tokens, PARAMS, 7, number))


Flood = Callable[[Pool, int], None]


def repeats(pool: Pool, tick: int) -> None:
    same = an_entry("same", [1, 2, 3])
    for _ in range(500):
        pool.send("bad", same)


def never_releases(pool: Pool, tick: int) -> None:
    for index in range(200):
        pool.send("bad", an_entry(f"{tick}-{index}", [tick % VOCAB, index % VOCAB, 1]))


def long_prompts(pool: Pool, tick: int) -> None:
    for index in range(12):
        tokens = random.Random(index).choices(range(VOCAB), k=200)
        pool.send("bad", an_entry(f"{tick % 2}-{index}", tokens, epoch=tick))


def fan_outs(pool: Pool, tick: int) -> None:
    for index in range(12):
        pending, fan_out = (1,) * 20, (3,) * 21
        tokens = [index, *[1] * tick]
        pool.send("bad", an_entry(str(index), tokens, pending=pending, fan_out=fan_out, num_draft_tokens=64))


def one_great_message(pool: Pool, tick: int) -> None:
    some = [an_entry(str(index), [1, index % VOCAB], epoch=tick) for index in range(20)]
    pool.send("bad", *(some * 250))


def too_long_prompts(pool: Pool, tick: int) -> None:
    """A megabyte each, and more tokens than the draft worker would read."""
    tokens = (1,) * (1 << 20)
    for index in range(6):
        pool.send("bad", an_entry(f"long{index}", (), committed_len=2 << 20, token_ids=tokens, epoch=tick))


def full_of_prompts(pool: Pool, tick: int) -> None:
    """A megabyte each, every entry of which makes sense."""
    tokens = [tick % VOCAB] * (1 << 14)
    entries = [an_entry(str(index), tokens, epoch=tick) for index in range(64)]
    for _ in range(6):
        pool.send("bad", *entries)


def full_of_lists(pool: Pool, tick: int) -> None:
    """A megabyte each, hardly any of it tokens."""
    params = SamplingParams(bad_words=((VOCAB + 1, VOCAB + 2),) * 1024, allowed_token_ids=(1,) * (1 << 20))
    for index in range(6):
        pool.send("bad", an_entry(str(index), [1, 2, 3], opening=DraftOpening(params, 7, 1), epoch=tick))


LIES: list[dict[str, object]] = [
    {"prefix_hash": 5},
    {"committed_len": 0, "token_ids": (), "prefix_hash": EMPTY_PREFIX},
    {"committed_len": -1},
    {"committed_len": 1 << 60},
    {"base_len": -3},
    {"base_len": 1 << 60},
    {"token_ids": (-1, 2, 3), "prefix_hash": extend_prefix_hash(EMPTY_PREFIX, [-1, 2, 3])},
    {"token_ids": (1 << 40, 2, 3), "prefix_hash": extend_prefix_hash(EMPTY_PREFIX, [1 << 40, 2, 3])},
    {"num_draft_tokens": 1 << 40},
    {"num_draft_tokens": -1},
    {"fan_out": (1 << 50,)},
    {"fan_out": (1,), "pending": (1 << 50,)},
    {"opening": DraftOpening(PARAMS, (1 << 64) - 1, 1)},
    {"opening": DraftOpening(PARAMS, -(1 << 63), 1)},
    {"opening": DraftOpening(PARAMS, 7, -5)},
    {"opening": DraftOpening(PARAMS, 7, 1 << 30)},
    {"opening": DraftOpening(SamplingParams(temperature=float("nan")), 7, 1)},
    {"opening": DraftOpening(SamplingParams(logit_bias=((-4, 1.0),)), 7, 1)},
    {"opening": DraftOpening(SamplingParams(logit_bias=((1 << 40, 1.0),)), 7, 1)},
    {"opening": DraftOpening(SamplingParams(allowed_token_ids=(1 << 40,)), 7, 1)},
    {"opening": DraftOpening(SamplingParams(repetition_penalty=2.0), 7, 1 << 30)},
    {"opening": None},
    {"epoch": -(1 << 40)},
    {"epoch": 1 << 60},
]


def lies(pool: Pool, tick: int) -> None:
    for index, lie in enumerate(LIES):
        pool.send("bad", an_entry(f"lie{index}", [1, 2, 3], **lie), round_id=(-1) ** tick * (1 << 60))


@pytest.mark.parametrize(
    "flood",
    [repeats, never_releases, long_prompts, fan_outs, one_great_message, lies],
    ids=lambda f: f.__name__,
)
def test_a_coordinator_that_floods_starves_nobody(flood: Flood) -> None:
    pool = Pool()
    texts = {f"g{index}": [index, 2, 3] for index in range(3)}
    sent = dict.fromkeys(texts, 0)
    for tick in range(1, 13):
        flood(pool, tick)
        pool.send("good", *[an_entry(name, text, base_len=sent[name]) for name, text in texts.items()])
        flood(pool, tick)
        pool.deliver()
        found: dict[str, ProposeAnswer] = {}
        num_steps = 0
        while len(found) < len(texts):
            assert num_steps < 4, "batches between a wish and its answer"
            pool.server.step(0)
            num_steps += 1
            found |= {answer.request_id: answer for answer in pool.answers("good")}
        for name, text in texts.items():
            assert not found[name].needs_start
            assert not found[name].is_full
            assert found[name].token_ids == drafts(text), "drafted, and of its own text"
            sent[name] = len(text)
            text += [tick % VOCAB, (tick + len(name)) % VOCAB]
        assert pool.server.num_sequences <= 16
    pool.serve_all()
    known = pool.proposer.sequences.known
    assert {sequence_name(PeerId("good"), RequestId(name), 1) for name in texts} <= known
    for answer in pool.answers("bad"):
        assert not answer.request_id.startswith("g")


@pytest.mark.parametrize("most", [4, MAX_DRAFT_TOKENS], ids=["bounded", "control"])
def test_who_wishes_for_long_drafts_keeps_nobody_waiting_for_them(most: int) -> None:
    """Counted in forwards between a wish and its answer. Control: as long as the wire allows."""
    pool = Pool(max_draft_tokens=most)
    text, sent = [1, 2, 3], 0
    for tick in range(1, 9):
        for index in range(3):
            pool.send("bad", an_entry(f"b{index}", [index, tick], epoch=tick, num_draft_tokens=64))
        pool.send("good", an_entry("g", text, base_len=sent))
        pool.deliver()
        num_before = pool.runner.num_forwards
        pool.server.step(0)
        (answer,) = pool.answers("good")
        num_forwards = pool.runner.num_forwards - num_before
        assert answer.token_ids == drafts(text)
        assert num_forwards >= 64 if most == MAX_DRAFT_TOKENS else num_forwards <= 5
        of_bad = {one.request_id: one.token_ids for one in pool.answers("bad")}
        assert of_bad == {f"b{index}": drafts([index, tick], most) for index in range(3)}
        sent = len(text)
        text += [tick % VOCAB, 5]
    assert pool.server.counters["shortened_entries"] == (0 if most == MAX_DRAFT_TOKENS else 24)


def test_what_is_drafted_ahead_is_no_longer_than_other_drafts() -> None:
    pool = Pool(max_draft_tokens=4)
    pool.send("bad", looking_ahead("b", [1, 2, 3], num_draft_tokens=64))
    pool.serve_all()
    (answer,) = pool.answers("bad")
    assert {len(branch.token_ids) for branch in answer.branches} == {4}


@pytest.mark.parametrize(
    "flood", [too_long_prompts, full_of_prompts, full_of_lists], ids=lambda f: f.__name__
)
def test_large_messages_of_one_cost_the_others_a_bounded_time_and_no_memory(
    flood: Flood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in what has to be understood and read between a wish and its answer, not in seconds."""
    understood: list[int] = []
    hashed: list[int] = []

    def counted_decode(frame: bytes) -> Message:
        understood.append(len(frame))
        return decode(frame)

    def counted_hash(prefix_hash: int, token_ids: Sequence[int]) -> int:
        hashed.append(len(token_ids))
        return extend_prefix_hash(prefix_hash, token_ids)

    monkeypatch.setattr("specdec.transport.memory.decode", counted_decode)
    monkeypatch.setattr("specdec.engine.draft_pool.server.extend_prefix_hash", counted_hash)
    pool = Pool()
    megabyte = 1 << 20
    text, sent = [1, 2, 3], 0
    for tick in range(1, 9):
        flood(pool, tick)
        pool.send("good", an_entry("g", text, base_len=sent))
        flood(pool, tick)
        pool.deliver()
        found: list[ProposeAnswer] = []
        for _ in range(2):
            understood.clear()
            hashed.clear()
            pool.server.step(0)
            understood_by_good = [num_bytes for num_bytes in understood if num_bytes < 1000]
            assert sum(understood) - sum(understood_by_good) < 2 * megabyte, "one message, of a megabyte"
            assert sum(hashed) < 100_000
            client = pool.server._clients[PeerId("bad")]
            assert client.num_unread_bytes < 4 * megabyte
            assert sum(len(mirror.token_ids) for mirror in client.mirrors.values()) <= 16 << 14
            found += pool.answers("good")
            if found:
                break
        (answer,) = found
        assert answer.token_ids == drafts(text)
        sent = len(text)
        text += [tick % VOCAB, 5]
    assert pool.network._channels[DRAFT].counters.dropped["full"] > 0, "64 MiB of it are enough"


def test_who_is_no_coordinator_any_more_is_not_remembered() -> None:
    """What it said last may be read after it is known that it has gone."""
    pool = Pool()
    pool.send("bad", an_entry("b", [1, 2]))
    pool.serve_all()
    pool.send("bad", an_entry("c", [1, 2]))
    pool.deliver()
    pool.server.retain([PeerId("good")])
    pool.serve_all()
    assert pool.server._clients == {}
    assert pool.server.num_sequences == 0
    assert pool.server.counters["unexpected_messages"] == 1
    pool.send("good", an_entry("g", [1, 2]))
    pool.serve_all()
    assert [answer.token_ids != () for answer in pool.answers("good")] == [True]
    pool.server.retain([PeerId("good"), PeerId("bad")])
    pool.send("bad", an_entry("c", [1, 2]))
    pool.serve_all()
    assert PeerId("bad") in pool.server._clients


def test_without_turns_the_flood_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: batches as large, in the order of the coordinators' names."""
    import specdec.engine.draft_pool.server as module

    def by_name(queues: Sequence[Sequence[tuple[module._Wish, float]]]) -> list[module._Wish]:
        return sorted((wish for queue in queues for wish, _ in queue), key=lambda wish: wish.coordinator)[:8]

    monkeypatch.setattr(module, "fair_batch", by_name)
    pool = Pool()
    pool.send("good", an_entry("g", [1, 2, 3]))
    for tick in range(1, 13):
        pool.send("bad", *[an_entry(str(index), [index, *[1] * tick]) for index in range(12)])
        pool.deliver()
        pool.server.step(0)
        assert not pool.answers("good")


def test_who_never_releases_gives_up_its_own_sequences_alone() -> None:
    pool = Pool(("good", "bad"))
    pool.send("good", *[an_entry(f"g{index}", [index, 2]) for index in range(8)])
    pool.serve_all()
    assert {answer.token_ids != () for answer in pool.answers("good")} == {True}
    for index in range(20):
        pool.send("bad", an_entry(f"b{index}", [index, 5]))
    pool.serve_all()
    answers = pool.answers("bad")
    assert [answer.is_full for answer in answers].count(False) == 8, (
        "half of the places are not the good one's"
    )
    assert pool.server.counters["displaced_sequences"] == 0
    pool.network.clock.advance(6.0)
    pool.send("good", *[an_entry(f"g{index}", [index, 2, 3], base_len=2) for index in range(8)])
    pool.send("bad", an_entry("another", [9, 9]))
    pool.serve_all()
    assert not any(answer.needs_start for answer in pool.answers("good"))
    (another,) = pool.answers("bad")
    assert another.token_ids == drafts([9, 9])
    assert pool.server.counters["displaced_sequences"] == 1, (
        "its own, that it had not asked about for longest"
    )


def test_who_comes_late_gets_its_share_from_those_who_have_more() -> None:
    pool = Pool(("first", "second", "third"))
    pool.send("first", *[an_entry(f"a{index}", [index, 2]) for index in range(20)])
    pool.serve_all()
    assert [answer.is_full for answer in pool.answers("first")].count(True) == 4
    for name in ("second", "third"):
        pool.send(name, *[an_entry(f"x{index}", [index, 3]) for index in range(6)])
    pool.serve_all()
    places = {name: [a.is_full for a in pool.answers(name)].count(False) for name in ("second", "third")}
    assert places["second"] == 6
    assert places["third"] == 5
    assert pool.server.num_sequences == 16
    pool.send("first", *[an_entry(f"a{index}", [index, 2, 4], base_len=2) for index in range(16)])
    pool.serve_all()
    gone = [answer for answer in pool.answers("first") if answer.needs_start]
    assert len(gone) == 11
    pool.send("first", *[an_entry(answer.request_id, [1, 2, 4]) for answer in gone])
    pool.serve_all()
    assert all(answer.is_full for answer in pool.answers("first"))


def test_replies_tell_how_busy_the_worker_is() -> None:
    pool = Pool(("a", "b"))
    pool.send("a", an_entry("x", [1, 2]))
    pool.serve_all()
    pool.send("b", an_entry("x", [1, 2]), an_entry("y", [1, 2]))
    pool.serve_all()
    pool.deliver()
    first = pool.channels["a"].receive(0).message
    second = pool.channels["b"].receive(0).message
    assert isinstance(first, ProposeReply)
    assert isinstance(second, ProposeReply)
    assert (first.num_sequences, first.max_sequences, first.num_places) == (1, 16, 15)
    assert (second.num_sequences, second.max_sequences, second.num_places) == (3, 16, 13)


def test_a_sequence_without_room_in_the_cache_is_refused() -> None:
    pool = Pool(("a",), num_blocks=33)  # 128 tokens
    for index in range(4):
        pool.send("a", an_entry(f"s{index}", [index] * 40))
        pool.serve_all()
    answers = {answer.request_id: answer for answer in pool.answers("a")}
    assert [answers[RequestId(f"s{index}")].is_full for index in range(4)] == [False, False, True, True]
    pool.channels["a"].send(DRAFT, Release(((RequestId("s0"), 1),)))
    pool.send("a", an_entry("s2", [2] * 40))
    pool.serve_all()
    assert [answer.is_full for answer in pool.answers("a")] == [False]


def test_memory_is_taken_from_those_who_have_more_than_their_share() -> None:
    pool = Pool(num_blocks=33)
    for index in range(3):
        pool.send("bad", an_entry(f"b{index}", [index] * 36))
        pool.serve_all()
    assert [answer.is_full for answer in pool.answers("bad")] == [False] * 3
    for index in range(2):
        pool.send("good", an_entry(f"g{index}", [index, *[4] * 16]))
        pool.serve_all()
    assert [answer.token_ids != () for answer in pool.answers("good")] == [True, True]
    known = {owner_of(name) for name in pool.proposer.sequences.known}
    assert known == {"good", "bad"}
    num_good = len([name for name in pool.proposer.sequences.known if owner_of(name) == "good"])
    for _ in range(3):
        for index in range(3):
            pool.send("bad", an_entry(f"b{index}", [index] * 36))
        pool.serve_all()
    assert num_good == len([name for name in pool.proposer.sequences.known if owner_of(name) == "good"]) == 2


def test_a_sequence_that_has_outgrown_the_memory_is_told_so() -> None:
    pool = Pool(("a",), num_blocks=33)  # 128 tokens
    texts = {name: [index, *[3] * 19] for index, name in enumerate(("x", "y"))}
    sent = dict.fromkeys(texts, 0)
    told: list[str] = []
    while not told:
        pool.send("a", *[an_entry(name, text, base_len=sent[name]) for name, text in texts.items()])
        pool.serve_all()
        answers = {answer.request_id: answer for answer in pool.answers("a")}
        told = [name for name, answer in answers.items() if answer.is_full]
        for name, text in texts.items():
            assert bool(answers[RequestId(name)].token_ids) != (name in told)
            sent[name] = len(text)
            text += [len(text) % VOCAB] * 4
        assert len(texts["x"]) < 80
    assert len(told) == 1
    assert len(texts["x"]) > 60, "half of the memory"
    assert pool.server.num_sequences == len(pool.proposer.sequences.known) == 1
    assert pool.server.counters["outgrown_sequences"] == 1
    (gone,) = told
    pool.send("a", an_entry(gone, texts[gone], base_len=sent[gone]))
    pool.serve_all()
    assert [answer.needs_start for answer in pool.answers("a")] == [True], "it is not known any more"


def test_who_has_less_than_its_share_finds_room_in_a_batch_with_those_who_have_more() -> None:
    """All are asked about in every batch, so that nothing lies idle."""
    pool = Pool(num_blocks=33)
    many = [an_entry(f"b{index}", [index] * 36) for index in range(3)]
    pool.send("bad", *many)
    pool.serve_all()
    assert [answer.is_full for answer in pool.answers("bad")] == [False] * 3
    text, sent, num_full = [0, *[4] * 16], 0, 0
    for _ in range(6):
        pool.send("bad", *[an_entry(f"b{index}", [index] * 36, base_len=36) for index in range(3)])
        pool.send("good", an_entry("g", text, base_len=sent))
        pool.serve_all()
        (answer,) = pool.answers("good")
        assert answer.token_ids == drafts(text)
        sent = len(text)
        text += [6, 7, 8]
        num_full += sum(answer.is_full for answer in pool.answers("bad"))
    assert num_full == 1, "who had more than its share is told, once for each sequence"


def looking_ahead(name: str, tokens: Sequence[int], *, width: int = 2, **fields: object) -> ProposeEntry:
    return an_entry(
        name, tokens, **({"pending": (1, 2, 3), "fan_out": (width,) * 4, "num_draft_tokens": 6} | fields)
    )


def test_branches_of_one_leave_the_others_theirs() -> None:
    """48 blocks for branches of both. One asks for hundreds, in the same batch, before and after."""
    alone = Pool(num_blocks=193)
    alone.send("good", looking_ahead("g", [1, 2, 3]))
    alone.serve_all()
    (expected,) = alone.answers("good")
    assert len(expected.branches) >= 4

    pool = Pool(num_blocks=193)
    for tick in range(4):
        for index in range(4):
            pool.send("bad", looking_ahead(f"b{index}", [index, 5, *[5] * tick], width=4))
        if tick == 1:
            pool.send("good", looking_ahead("g", [1, 2, 3]))
        pool.serve_all()
        pool.answers("bad")
        if tick == 1:
            (found,) = pool.answers("good")
            assert found.branches == expected.branches
    name = sequence_name(PeerId("good"), RequestId("g"), 1)
    branches = pool.proposer.sequences.branches
    held = [one for one in branches if one.owner == "good"]
    assert name in branches
    assert len(held) == len(expected.branches), "kept until the verdict"
    assert branches.num_own_blocks["bad"] > 8, "what is left is for whoever comes"
    true = expected.branches[0]
    pool.send("good", an_entry("g", _committed(true, [1, 2, 3]), base_len=3))
    pool.serve_all()
    assert pool.server.counters["draft_ahead_branches_true"] == 1


def _committed(branch: DraftBranch, tokens: Sequence[int]) -> list[int]:
    """The text that a branch assumes, behind pending tokens 1, 2 and 3."""
    num_kept = branch.committed_len - len(tokens) - 1
    kept = [*tokens, *(1, 2, 3)[:num_kept]]
    return next(
        [*kept, token_id]
        for token_id in range(VOCAB)
        if extend_prefix_hash(EMPTY_PREFIX, [*kept, token_id]) == branch.prefix_hash
    )


def test_a_growing_sequence_takes_no_branches_of_those_within_their_share() -> None:
    pool = Pool(num_blocks=65, shares=DraftShareConfig(max_sequences=64))
    pool.send("good", looking_ahead("g", [1, 2, 3]))
    pool.serve_all()
    num_held = len(list(pool.proposer.sequences.branches))
    assert num_held > 0
    for tick in range(10):
        pool.send("bad", *[an_entry(f"{tick}-{index}", [tick, index, *[7] * 30]) for index in range(4)])
        pool.serve_all()
    assert len([one for one in pool.proposer.sequences.branches if one.owner == "good"]) == num_held


def test_reading_prompts_is_shared_too() -> None:
    """64 tokens are read in a batch: a prompt of one is not put off for the many short ones of the other."""
    pool = Pool(shares=DraftShareConfig(max_sequences=64))
    long = random.Random(0).choices(range(VOCAB), k=150)
    pool.send("good", an_entry("long", long))
    num_batches = 0
    sent = 0
    while True:
        pool.send("bad", *[an_entry(f"{num_batches}-{index}", [index % VOCAB] * 20) for index in range(5)])
        pool.deliver()
        pool.server.step(0)
        num_batches += 1
        (answer,) = [one for one in pool.answers("good") if one.request_id == "long"]
        if answer.token_ids:
            break
        sent = len(long)
        pool.send("good", an_entry("long", long, base_len=sent))
        assert num_batches <= 6
    assert answer.token_ids == drafts(long)


def test_a_sequence_that_nobody_asks_about_is_forgotten_after_its_lease() -> None:
    pool = Pool(shares=DraftShareConfig(max_sequences=16, lease_s=20.0))
    pool.send("good", an_entry("asked", [1, 2]), an_entry("left", [1, 2]))
    for _ in range(11):
        pool.serve_all()
        pool.network.clock.advance(2.0)
        pool.send("good", an_entry("asked", [1, 2], base_len=2))
    pool.serve_all()
    assert pool.server.num_sequences == 1
    assert not any(answer.needs_start for answer in pool.answers("good"))


@given(
    st.lists(st.lists(st.floats(0.01, 2.0), max_size=12), min_size=1, max_size=5),
)
def test_batches_are_fair(queues: list[list[float]]) -> None:
    waiting = {
        owner: [((owner, index), part) for index, part in enumerate(queue)]
        for owner, queue in enumerate(queues)
    }
    order = list(waiting)
    since = dict.fromkeys(order, 0)
    while any(waiting.values()):
        batch = fair_batch([waiting[owner] for owner in order if waiting[owner]])
        parts = {owner: dict(waiting[owner]) for owner in order}
        total = sum(parts[owner][(owner, index)] for owner, index in batch)
        assert len(batch) == 1 or total <= 1.0 + 1e-6
        for owner in order:
            mine = [wish for wish in batch if wish[0] == owner]
            assert mine == [wish for wish, _ in waiting[owner][: len(mine)]], "each queue in its order"
            since[owner] = 0 if mine or not waiting[owner] else since[owner] + 1
            assert since[owner] < len(order), "nobody waits for longer than everybody's turn"
            del waiting[owner][: len(mine)]
        first = batch[0][0]
        order.remove(first)
        order.append(first)


def test_equal_shares() -> None:
    assert equal_share(10, ["a", "b"], "c") == 3
    assert equal_share(10, ["a"], "a") == 10
    assert owner_of(owned_id("a", "b/c")) == "a"
    assert owner_of(RequestId("chat")) == ""
