"""Whose texts are kept, how many, and for what."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import Sequence
from specdec.engine.draft_pool.text_tap import LearnableText, TextTap
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.online_config import OnlineConfig
from tests.architectures import VOCAB_SIZE
from tests.training.online.domains import FORMER, QUICK, heard
from training.online.buffer import KeptText, TextBuffer, is_held_back, num_judged
from training.online.trainer import _part

ALICE, BOB, CAROL = ("a" * 64, "b" * 64, "c" * 64)


def config(**changes: object) -> OnlineConfig:
    return OnlineConfig.model_validate({**QUICK.model_dump(), **changes})


def buffer_of(settings: OnlineConfig) -> TextBuffer:
    return TextBuffer(settings, VOCAB_SIZE)


def a_sequence(owner: str | None, generated: tuple[int, ...] = (5, 6, 7)) -> Sequence:
    request = Request(
        request_id=RequestId(f"of {owner}"),
        prompt_token_ids=(2, 3, 4),
        params=SamplingParams(temperature=0.7, top_k=9, stop=("secret",), logit_bias=((3, 1.0),)),
        seed=11,
        owner=owner,
    )
    sequence = Sequence(request)
    if generated:
        sequence.commit(generated)
    return sequence


@pytest.mark.parametrize("owner", [BOB, None], ids=["another key", "no key"])
def test_texts_of_others_are_never_kept(owner: str | None) -> None:
    """Neither where they are heard nor where they are learnt from."""
    settings = config(allow_shared=False, tenants=[ALICE])
    tap = TextTap(settings)
    for one in (ALICE, owner):
        tap.note(a_sequence(one))
    assert [text.owner for text in tap.take()] == [ALICE]
    buffer = buffer_of(settings)
    for text in (*heard(FORMER, 30, owner=ALICE), *heard(FORMER, 30, owner=owner, seed=1)):
        buffer.add(text)
    assert buffer.owners == {ALICE}
    assert all(buffer.draw(random.Random(seed)).owner == ALICE for seed in range(50))
    assert {text.owner for text in buffer.held_back(10_000)} == {ALICE}


def test_shared_learning_hears_everybody() -> None:
    """The negative control of the test above."""
    tap = TextTap(config(allow_shared=True))
    for one in (ALICE, BOB, None):
        tap.note(a_sequence(one))
    assert [text.owner for text in tap.take()] == [ALICE, BOB, None]


def test_a_text_is_what_was_committed_and_by_what_it_was_chosen() -> None:
    tap = TextTap(config(allow_shared=True))
    tap.note(a_sequence(ALICE, generated=()))  # nothing was chosen
    tap.note(a_sequence(ALICE))
    (text,) = tap.take()
    assert (text.token_ids, text.num_prompt_tokens, text.seed) == ((2, 3, 4, 5, 6, 7), 3, 11)
    assert text.params == SamplingParams(temperature=0.7, top_k=9)  # and nothing else of the request
    assert tap.take() == ()


def test_a_tap_that_nobody_empties_drops_the_oldest() -> None:
    tap = TextTap(config(allow_shared=True))
    long = tuple(range(2, 102)) * 500
    for _ in range(8):
        tap.note(a_sequence(ALICE, long))
    kept = tap.take()
    assert 1 <= len(kept) < 8
    assert tap.counters["online_texts_dropped"] == 8 - len(kept)


def test_whoever_has_most_gives_way() -> None:
    settings = config(allow_shared=False, tenants=[ALICE, BOB, CAROL], max_buffer_tokens=2400)
    buffer = buffer_of(settings)
    for text in (*heard(FORMER, 10, owner=BOB, seed=1), *heard(FORMER, 400, owner=ALICE)):
        buffer.add(text)
        assert buffer.num_tokens <= 2400
    num_of_bob = sum(text.num_generated for text in buffer.held_back(10**6) if text.owner == BOB)
    assert buffer.owners == {ALICE, BOB}
    for text in heard(FORMER, 10, owner=BOB, seed=1):
        is_there = is_held_back(text, settings.held_back_share)
        assert not is_there or num_of_bob > 0
    counters = buffer.counters
    assert counters["online_tokens_buffered"] - counters["online_tokens_dropped"] == buffer.num_tokens


@pytest.mark.parametrize("is_judge", [False, True])
def test_a_text_longer_than_all_that_may_be_held_drives_nothing_out(is_judge: bool) -> None:
    """Else it would go itself next, and the trainer would have nothing to draw from."""
    buffer = buffer_of(config(allow_shared=True, max_buffer_tokens=2400))
    for text in heard(FORMER, 40):
        buffer.add(text)
    before, num_new = buffer.num_tokens, buffer.num_new_tokens
    texts = (LearnableText(None, (first, 5) + (7,) * 4000, 2, SamplingParams(), 0) for first in range(2, 40))
    buffer.add(next(text for text in texts if is_held_back(text, 0.3) == is_judge))
    assert buffer.num_tokens == before
    assert buffer.num_new_tokens == num_new
    assert buffer.draw(random.Random(0)).num_generated < 4000
    counters = buffer.counters
    assert counters["online_tokens_buffered"] - counters["online_tokens_dropped"] == before


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 40])
def test_what_a_trial_scores_of_a_text(num_prompt_tokens: int) -> None:
    for num_generated in (1, 14, 15, 16, 17, 60):
        tokens = (3,) * (num_prompt_tokens + num_generated)
        text = LearnableText(None, tokens, num_prompt_tokens, SamplingParams(), 0)
        kept = KeptText.of(text, 16)
        assert num_judged(text, 16) == num_judged(kept, 16) == _part(kept, 16, None).num_scored


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 400])
def test_what_is_kept_of_a_text_is_all_that_is_read_of_it(num_prompt_tokens: int) -> None:
    for num_generated in (1, 16, 60):
        tokens = tuple(range(num_prompt_tokens + num_generated))  # each names its place
        text = LearnableText(None, tokens, num_prompt_tokens, SamplingParams(), 0)
        kept = KeptText.of(text, 16)
        assert len(kept.token_ids) <= 15 + num_generated
        parts = [_part(kept, 16, random.Random(seed)) for seed in range(200)]
        for part in (*parts, _part(kept, 16, None)):
            end = part.start + len(part.token_ids)
            assert part.token_ids.tolist() == list(range(part.start, end))
            assert part.scored.tolist() == list(range(max(num_prompt_tokens, part.start + 1), end))
            assert len(part.token_ids) == min(16, len(tokens))
        first_end = min(len(tokens), max(16, num_prompt_tokens + 1))
        assert min(part.start for part in parts) == max(0, first_end - 16)


def test_long_prompts_with_short_answers_are_enough_to_learn_from() -> None:
    """All of their tokens would leave room for a few texts, which say too little to judge by."""
    settings = config(max_text_tokens=16, max_buffer_tokens=4000, min_held_back_tokens=100)
    buffer, rng = buffer_of(settings), random.Random(0)
    for _ in range(400):
        tokens = tuple(rng.randrange(2, VOCAB_SIZE) for _ in range(304))
        buffer.add(LearnableText(None, tokens, 300, SamplingParams(), 0))
    assert buffer.has_enough()
    assert buffer.num_tokens <= 4000


def test_what_is_held_back_is_counted_as_it_is_scored() -> None:
    """Of long texts a trial reads the ends; all that they have would be thought enough at once."""
    settings = config(max_text_tokens=16, min_held_back_tokens=100)
    buffer, num_judges = buffer_of(settings), 0
    for text in heard(FORMER, 200, num_tokens=84):
        buffer.add(text)
        num_judges += is_held_back(text, settings.held_back_share)
        assert buffer.has_enough() == (buffer.num_new_tokens >= 200 and num_judges >= 7)
        if num_judges == 8:
            break
    chosen = buffer.held_back(100)
    assert sum(_part(text, 16, None).num_scored for text in chosen) == 105
    assert len(buffer.held_back(10**6)) == 8


def test_no_prompt_is_both_trained_on_and_judged_by() -> None:
    buffer = buffer_of(config(allow_shared=True))
    texts = heard(FORMER, 100) * 2
    for text in texts:
        buffer.add(text)
    judges = {text.token_ids[:4] for text in buffer.held_back(10**6)}
    rng = random.Random(0)
    trained_on = {buffer.draw(rng).token_ids[:4] for _ in range(2000)}
    assert judges
    assert trained_on
    assert not judges & trained_on
    assert judges | trained_on == {text.token_ids[:4] for text in texts}


def test_tokens_that_the_draft_model_does_not_have_are_left_out() -> None:
    buffer = TextBuffer(config(allow_shared=True), vocab_size=10)
    for text in heard(FORMER, 50):
        buffer.add(text)
    assert buffer.num_tokens == 0


@pytest.mark.parametrize(
    ("online", "said"),
    [
        ({}, "nobody's texts may be learnt from"),
        ({"allow_shared": True, "tenants": [ALICE]}, "learns from everybody"),
        ({"tenants": ["sk-not-a-digest"]}, "SHA-256 digests of API keys"),
        ({"allow_shared": True, "held_back_share": 0.9}, "held_back_share"),
        ({"allow_shared": True, "learning_rat": 0.1}, "learning_rat"),
        ({"allow_shared": True, "max_buffer_tokens": 4096}, "819 tokens, prompts included: never would"),
    ],
    ids=["nobody", "both", "no digest", "range", "unknown key", "nothing to judge by"],
)
def test_wrong_settings_are_explained(online: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SpeculativeConfig.model_validate({"method": "draft_model", "model": "draft", "online": online})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"method": "ngram"}, "draft_model learns, not ngram"),
        ({"quantization": "int8"}, "leave out quantization: int8"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size: 2"),
        ({"synthetic_acceptance": {"acceptance": [0.5]}}, "synthetic_acceptance makes verdicts up"),
        *(
            (
                {"rejection_sample_method": rule, "allow_lossy": rule == "typical"},
                f"online: under rejection_sample_method: {rule} {reason}",
            )
            for rule, reason in (
                ("rejection", "drafts must know nothing of what a request's seed"),
                ("block", "drafts must know nothing of what a request's seed"),
                ("multi_round", "drafts must know nothing of what a request's seed"),
                ("typical", "no text tells which drafts would have stood"),
            )
        ),
    ],
    ids=["method", "quantization", "ranks", "synthetic", "rejection", "block", "multi_round", "typical"],
)
def test_what_cannot_learn_is_refused(other: dict[str, object], said: str) -> None:
    block: dict[str, object] = {"method": "draft_model", "model": "draft", "online": {"allow_shared": True}}
    block.update(other)
    if block["method"] == "ngram":
        del block["model"]
    with pytest.raises(ValidationError, match=said):
        SpeculativeConfig.model_validate(block)


def test_a_key_is_named_as_in_the_file_of_keys() -> None:
    written = OnlineConfig(tenants=(f"sha256:{'A' * 64}",))
    assert written.tenants == (ALICE,)
    assert written.may_learn_from(ALICE)
    assert not written.may_learn_from(None)
