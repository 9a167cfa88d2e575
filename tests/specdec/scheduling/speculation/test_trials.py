"""When trials begin, how long they go on, and when the next one may."""

from __future__ import annotations

import itertools

import pytest

from specdec.scheduling.speculation.trials import Trial, TrialLength, Trials

LENGTH = TrialLength(3, 24)
ROUND_S = 0.01


def rounds(trials: Trials, number: int) -> None:
    for _ in range(number):
        assert trials.current is None
        trials.note_round(ROUND_S, 0.0)


def test_rounds_that_were_not_looked_at_pass_all_the_same() -> None:
    one_by_one, together = Trials(0.5), Trials(0.5)
    for _ in range(40):
        one_by_one.note_round(ROUND_S, 0.0)
    for _ in range(8):
        together.note_round(ROUND_S, 0.0, num_passed=4, passed_s=4 * ROUND_S)
    assert together._num_rounds_since == one_by_one._num_rounds_since == 40
    assert together._allowances == pytest.approx(one_by_one._allowances)


def audit(trials: Trials, lost_s: float) -> int:
    """Go through an audit whose rounds lose so much each; return how many there were."""
    assert trials.current == "auditing"
    number = 1
    while not trials.note_round(ROUND_S, lost_s):
        number += 1
    return number


def begun(trials: Trials, expected_loss_s: float) -> bool:
    trials.begin("auditing", LENGTH, expected_loss_s)
    return trials.current == "auditing"


def test_an_audit_ends_where_it_loses_and_goes_on_where_it_does_not() -> None:
    for lost_s, expected in ((0.001, 3), (-0.001, 24), (0.0, 24)):
        trials = Trials(0.01)
        rounds(trials, 60)
        assert begun(trials, 0.001)
        assert audit(trials, lost_s) == expected


def test_an_audit_that_gains_is_soon_followed_by_another() -> None:
    """One that does not waits twice as long each time."""
    for lost_s, is_due in ((-0.002, True), (0.0001, False)):
        trials = Trials(0.01)
        rounds(trials, 60)
        assert begun(trials, 0.0001)
        audit(trials, lost_s)
        rounds(trials, 50)
        assert trials.is_due("auditing") == is_due
        rounds(trials, 50)
        assert trials.is_due("auditing")


@pytest.mark.parametrize("real_loss_s", [-0.001, 0.0])
def test_what_the_last_audit_lost_counts_more_than_what_is_feared(real_loss_s: float) -> None:
    """A model that is wrong about plain decoding must not keep anyone from looking."""
    trials = Trials(0.004)
    rounds(trials, 60)
    assert not begun(trials, 10 * ROUND_S)
    assert begun(trials, 0.0)
    audit(trials, real_loss_s)
    rounds(trials, 100)
    assert begun(trials, 10 * ROUND_S)


def test_audits_that_lose_cost_their_share_of_the_time() -> None:
    trials, lost_s, spent_s = Trials(0.01), 0.0, 0.0
    for _ in range(20_000):
        begun(trials, 0.002)
        lost = 0.002 if trials.current == "auditing" else 0.0
        trials.note_change()  # so that they are due as often as can be
        trials.note_round(ROUND_S, lost)
        lost_s += lost
        spent_s += ROUND_S
    assert 0.005 * spent_s < lost_s < 0.012 * spent_s


def test_what_a_probe_has_cost_does_not_keep_an_audit_from_asking() -> None:
    trials = Trials(0.004)
    rounds(trials, 60)
    trials.begin("probing", LENGTH, 0.0001)
    assert trials.current == "probing"
    assert trials.note_round(ROUND_S, 3.0)
    rounds(trials, 100)
    trials.begin("probing", LENGTH, 0.0001)
    assert trials.current is None
    assert begun(trials, 0.0001)


def test_what_a_busy_machine_took_from_a_trial_is_not_owed_for_long() -> None:
    trials = Trials(0.004)
    rounds(trials, 60)
    assert begun(trials, 0.0001)
    assert trials.note_round(ROUND_S, 100 * ROUND_S)
    rounds(trials, 1100)
    assert begun(trials, 0.0001)


def test_after_an_alarm_an_audit_is_due_as_soon_as_after_a_change() -> None:
    trials = Trials(0.01)
    for number in range(3):
        rounds(trials, 48 << number)
        assert begun(trials, 0.0001)
        audit(trials, 0.0001)
    rounds(trials, 60)
    assert not trials.is_due("auditing")
    trials.note_alarm()
    assert trials.is_due("auditing")


def test_the_first_rounds_of_an_audit_say_nothing_of_the_others() -> None:
    trials = Trials(0.01)
    rounds(trials, 60)
    assert begun(trials, 0.0001)
    assert not trials.note_round(ROUND_S, 0.005, counts=False)
    assert audit(trials, -0.0001) == 23


def test_a_new_situation_grants_its_first_allowances_again() -> None:
    """What was put aside in rounds of a fiftieth of the time never pays for a long one."""
    for is_told in (False, True):
        trials = Trials(0.01)
        rounds(trials, 60)
        assert begun(trials, 0.001)
        audit(trials, 0.001)
        if is_told:
            trials.note_new_situation()
        for _ in range(12):
            trials.note_round(50 * ROUND_S, 0.0)
        assert trials.is_due("auditing") == is_told
        if not is_told:
            for _ in range(60):
                trials.note_round(50 * ROUND_S, 0.0)
        assert begun(trials, 0.3 * 50 * ROUND_S) == is_told


def probe(trials: Trials, expected_loss_s: float, *lost_s: float) -> bool:
    """Go through a probe whose rounds lose so much in turn; return whether there was one."""
    trials.begin("probing", LENGTH, expected_loss_s)
    if trials.current is None:
        return False
    losses = itertools.cycle(lost_s)
    while not trials.note_round(ROUND_S, next(losses)):
        pass
    return True


@pytest.mark.parametrize(("share_lost", "is_as_soon"), [(0.005, True), (0.3, False)])
def test_what_is_about_as_good_is_probed_as_often_as_its_loss_allows(
    share_lost: float, is_as_soon: bool
) -> None:
    """What clearly loses waits twice as long after each probe that changed nothing."""
    trials, loss_s = Trials(0.004), share_lost * ROUND_S
    waited = []
    for _ in range(5):
        rounds(trials, 48)
        number = 48
        while not probe(trials, loss_s, loss_s):
            rounds(trials, 1)
            number += 1
        waited.append(number)
    assert (max(waited[1:]) < 60) is is_as_soon, waited
    assert is_as_soon or waited[-1] > 300, waited


def test_what_the_last_probe_has_lost_counts_whatever_is_expected() -> None:
    """By the model these rounds gain; they lost a tenth, so that the next probe waits until that is paid."""
    trials = Trials(0.004)
    waited = []
    for _ in range(8):
        number = 0
        while not probe(trials, -0.01 * ROUND_S, 0.1 * ROUND_S):
            rounds(trials, 1)
            number += 1
        waited.append(number)
    assert 500 < waited[-1] < 600, waited


@pytest.mark.parametrize(("share_lost", "is_as_soon"), [(0.01, True), (0.01, False)])
def test_what_is_hardly_better_is_audited_as_often_as_its_loss_allows(
    share_lost: float, is_as_soon: bool
) -> None:
    """Whether drafts gain anything may change with every k: it is not asked less and less often."""
    trials, loss_s = Trials(0.004), share_lost * ROUND_S
    waited = []
    for _ in range(6):
        number = 0
        while trials.current is None:
            rounds(trials, 1)
            number += 1
            trials.begin("auditing", LENGTH._replace(is_of_close_call=is_as_soon), loss_s)
        audit(trials, loss_s)
        waited.append(number)
    assert (max(waited[1:]) <= 48) is is_as_soon, waited
    assert is_as_soon or waited[-1] > 300, waited


def test_probes_lose_no_more_than_their_share_whatever_was_expected_of_them() -> None:
    trials, lost_s, spent_s, really_s = Trials(0.004), 0.0, 0.0, 0.15 * ROUND_S
    for _ in range(20_000):
        trials.begin("probing", LENGTH, 0.0)
        lost = really_s if trials.current == "probing" else 0.0
        trials.note_round(ROUND_S, lost)
        lost_s, spent_s = lost_s + lost, spent_s + ROUND_S
    assert 0.003 * spent_s < lost_s < 0.0048 * spent_s


def test_a_probe_pays_for_what_all_its_rounds_have_lost_together() -> None:
    """With one request most rounds of drafts that are rarely accepted lose, and some gain much."""
    left = {}
    for name, lost_s in (("as lucky as not", (0.002, 0.002, -0.004)), ("unlucky", (0.002, 0.002, 0.002))):
        trials = Trials(0.004)
        rounds(trials, 1000)
        assert probe(trials, 0.0001, *lost_s)
        left[name] = trials._allowances["others"] / ROUND_S
    assert left["as lucky as not"] == pytest.approx(4.0 + 0.004 * 24 + 2.0, abs=0.2)
    assert left["unlucky"] < 3.0


def test_a_comparison_pays_for_its_rounds_together_and_has_them_whatever_luck_they_have() -> None:
    """Two rounds' time beyond its purse at most."""
    ended_after = {}
    for name, lost in (("lucky", (3.0, -3.0)), ("unlucky", (0.4, 0.4)), ("really slow", (3.0, 3.0))):
        trials = Trials(0.004)
        rounds(trials, 30)
        before_s = trials._allowances["comparisons"]
        trials.begin("comparing", TrialLength(16, 32), -0.1 * ROUND_S, "ping_pong")
        assert trials.current == "comparing"
        ends = (trials.note_round(ROUND_S, each * ROUND_S) for each in itertools.cycle(lost))
        ended_after[name] = 1 + list(itertools.takewhile(lambda is_over: not is_over, ends)).count(False)
        if name == "lucky":
            assert trials._allowances["comparisons"] >= 0.9 * before_s
    assert ended_after == {"lucky": 16, "unlucky": 16, "really slow": 3}


def test_a_comparison_with_what_is_thought_better_waits_for_its_purse_alone() -> None:
    """What it promises was promised before, and not kept, if its purse is empty."""
    waited = []
    trials = Trials(0.004)
    for loss in (0.0, 0.0, 0.4, 0.4):
        number = 0
        while trials.current is None:
            trials.begin("comparing", TrialLength(16, 32), -0.02 * ROUND_S, "ping_pong")
            number += trials.current is None
            if trials.current is None:
                trials.note_round(ROUND_S, 0.0)
        while not trials.note_round(ROUND_S, loss * ROUND_S):
            pass
        waited.append(number)
    assert waited[:3] == [16, 32, 32], waited
    assert waited[3] > 200, waited
    unwanted = Trials(0.004)
    rounds(unwanted, 20)
    unwanted.begin("comparing", TrialLength(16, 32), 0.02 * ROUND_S, "ping_pong")
    assert unwanted.current is None


def test_what_was_paid_to_catch_up_is_not_in_vain() -> None:
    """A probe for which a drafter had much to read has its rounds all the same, however much that was."""
    for is_spent, expected in ((True, 1), (False, 4)):
        trials = Trials(0.01)
        rounds(trials, 60)
        trials.begin("probing", LENGTH, 0.0001)
        assert trials.current == "probing"
        number = 1
        is_over = trials.note_round(ROUND_S, 20 * ROUND_S, is_spent=is_spent)
        while not is_over:
            is_over = trials.note_round(ROUND_S, 0.0)
            number += 1
        assert number == expected


def test_probes_without_an_answer_do_not_wait_ever_longer() -> None:
    waited = {}
    for has_drafts in (True, False):
        trials = Trials(0.004)
        for _ in range(8):
            number = 0
            while trials.current is None:
                trials.begin("probing", LENGTH, 0.3 * ROUND_S)
                trials.note_round(ROUND_S, 0.0, has_drafts=has_drafts)
                number += 1
            while trials.current is not None:
                trials.note_round(ROUND_S, 0.02 * ROUND_S, has_drafts=has_drafts)
        waited[has_drafts] = number
    assert waited[False] <= 48 << 3 < 3000 < waited[True], waited


def test_it_is_known_how_many_rounds_are_left() -> None:
    trials = Trials(0.5)
    rounds(trials, 48)
    trials.begin("probing", LENGTH, 0.0)
    for left in range(LENGTH.most, 0, -1):
        assert trials.num_rounds_left == left
        assert trials.note_round(ROUND_S, -0.1 * ROUND_S) is (left == 1)


@pytest.mark.parametrize("trial", ["probing", "auditing", "comparing"])
def test_what_is_thought_much_worse_is_tried_in_the_end_too(trial: Trial) -> None:
    """Drafts that were slow for a while, say. It loses no more than its share of the time all the same."""
    loss_s, share = 100 * ROUND_S, 0.05
    trials = Trials(share)
    first = 0
    while trials.current is None and first < 100_000:
        trials.note_round(ROUND_S, 0.0)
        trials.begin(trial, LENGTH, loss_s)
        first += 1
    assert trials.current == trial
    assert loss_s <= share * first * ROUND_S + 4 * ROUND_S
    while not trials.note_round(101 * ROUND_S, loss_s):
        pass
    for _ in range(1000):  # nothing more is put aside than without such a trial
        trials.note_round(ROUND_S, 0.0)
    assert max(trials._allowances.values()) <= 64 * ROUND_S * (1 + 1e-9)
