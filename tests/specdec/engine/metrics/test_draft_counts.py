"""How far drafts are accepted, by what they were for."""

from __future__ import annotations

import random
import re
from collections import Counter

import msgspec
import pytest

from specdec.core.request import OTHER_CLASS
from specdec.core.sampling_params import SamplingParams
from specdec.engine.metrics.draft_counts import DraftKind, DraftsByKind
from specdec.scheduling.speculation.acceptance import MAX_CLASSES
from tests.specdec.engine.toy_engines import MODEL, OracleProposer, request, run, toy_engine

COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def kind(num_generated: int = 0, class_name: str = "code", **params: float) -> DraftKind:
    one = request(params=SamplingParams(**params))  # type: ignore[arg-type]
    return DraftKind.of(msgspec.structs.replace(one, class_name=class_name), num_generated)


@pytest.mark.parametrize(
    ("temperature", "band"),
    [
        (0.0, "0"), (1e-4, "to 0.5"), (0.5, "to 0.5"), (0.51, "to 1"), (1.0, "to 1"), (1.01, "above 1"),
        (9.0, "above 1"),
    ],
)  # fmt: skip
def test_bands_of_temperature(temperature: float, band: str) -> None:
    assert kind(temperature=temperature).temperature == band


@pytest.mark.parametrize(
    ("top_p", "band"), [(0.1, "below 0.9"), (0.9, "below 1"), (0.99, "below 1"), (1.0, "1")]
)
def test_bands_of_top_p(top_p: float, band: str) -> None:
    assert kind(top_p=top_p).top_p == band


@pytest.mark.parametrize(
    ("num_generated", "phase"),
    [(0, "first 32"), (31, "first 32"), (32, "to 256"), (255, "to 256"), (256, "later"), (9999, "later")],
)
def test_phases(num_generated: int, phase: str) -> None:
    assert kind(num_generated).phase == phase


def test_each_property_has_all_drafts() -> None:
    rng = random.Random(3)
    requests = [
        msgspec.structs.replace(
            request(
                f"r{index}",
                [rng.randrange(16) for _ in range(5)],
                SamplingParams(
                    temperature=(0.0, 0.4, 1.0, 2.0)[index % 4],
                    top_p=(1.0, 0.95, 0.5)[index % 3],
                    max_tokens=40,
                    ignore_eos=True,
                ),
                seed=index,
            ),
            class_name=("code", "chat")[index % 2],
        )
        for index in range(12)
    ]
    engine = toy_engine(OracleProposer(MODEL, wrong_from=2), max_num_seqs=5)
    run(engine, *requests)
    metrics = engine.metrics()
    sums: Counter[tuple[str, str]] = Counter()
    values: dict[str, set[str]] = {}
    for series, number in metrics.by_kind.series().items():
        found = re.fullmatch(r'spec_decode_(\w+)_by_(\w+)\{\2="([^"]+)"\}', series)
        assert found is not None, series
        sums[found[1], found[2]] += number
        values.setdefault(found[2], set()).add(found[3])
    for property_name in DraftKind._fields:
        for counted in COUNTED:
            assert sums[counted, property_name] == getattr(metrics, counted) > 0
    assert values["request_class"] == {"code", "chat"}
    assert values["temperature"] == {"0", "to 0.5", "to 1", "above 1"}
    assert values["top_p"] == {"1", "below 1", "below 0.9"}
    assert values["phase"] == {"first 32", "to 256"}
    assert metrics.num_verified_requests > metrics.num_rounds
    assert metrics.num_places == 5 * metrics.num_rounds >= metrics.num_verified_requests
    assert metrics.num_verified_rows >= metrics.num_verified_requests + metrics.num_draft_tokens


def test_there_is_a_bound_for_classes() -> None:
    drafts = DraftsByKind()
    for number in range(3 * MAX_CLASSES):
        drafts.count(kind(class_name=f"class {number}"), 4, 2)
    series = drafts.series()
    classes = [name for name in series if name.startswith("spec_decode_num_drafts_by_request_class")]
    assert len(classes) == MAX_CLASSES
    others = f'spec_decode_num_draft_tokens_by_request_class{{request_class="{OTHER_CLASS}"}}'
    assert series[others] == 4 * (3 * MAX_CLASSES - (MAX_CLASSES - 1))


def test_a_class_cannot_break_the_text_that_prometheus_reads() -> None:
    drafts = DraftsByKind()
    drafts.count(kind(class_name='a"} 5\nb\\'), 1, 1)
    assert any(name.endswith('{request_class="a_} 5_b_"}') for name in drafts.series())
