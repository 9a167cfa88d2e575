"""Numbers of several engines as one."""

from __future__ import annotations

from specdec.core.series import Series, combine, name_of

KNOWN = {
    "tokens": Series("counter", "Tokens."),
    "worth": Series("gauge", "Worth.", "mean"),
    "workers": Series("gauge", "Workers.", "max"),
}


def test_values_are_combined_as_their_series_says() -> None:
    first = {'tokens{of="a"}': 3.0, "worth": 0.5, "workers": 2.0, "unknown": 1.0}
    second = {'tokens{of="a"}': 4.0, 'tokens{of="b"}': 1.0, "worth": 1.5, "workers": 1.0, "unknown": 1.0}
    assert combine([first, second], KNOWN) == {
        'tokens{of="a"}': 7.0,
        'tokens{of="b"}': 1.0,
        "worth": 1.0,
        "workers": 2.0,
        "unknown": 2.0,
    }


def test_a_mean_is_of_those_that_have_the_value() -> None:
    assert combine([{"worth": 0.5}, {"tokens": 1.0}], KNOWN)["worth"] == 0.5


def test_of_nothing_there_is_nothing() -> None:
    assert combine([], KNOWN) == {}


def test_labels_are_no_part_of_the_name() -> None:
    assert name_of('state{mode="lockstep",reason="gain"}') == "state"
    assert name_of("rounds") == "rounds"
