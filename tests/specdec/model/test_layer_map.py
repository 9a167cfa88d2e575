import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.inflate import evenly_between
from specdec.core.errors import ConfigError
from specdec.model.layer_map import CONFIG_KEY, LayerMap


def inflated(num_original: int, num_total: int) -> LayerMap:
    return LayerMap.from_config(
        {"num_hidden_layers": num_total, CONFIG_KEY: evenly_between(num_original, num_total)}
    )


def test_an_ordinary_checkpoint_maps_to_itself() -> None:
    layer_map = LayerMap.from_config({"num_hidden_layers": 8})
    assert [layer_map.layers_for(count) for count in range(1, 9)] == list(range(1, 9))
    assert layer_map.exit_layers_for(4) == 4


@given(st.integers(2, 40), st.integers(0, 300))
def test_the_first_layers_hold_exactly_the_first_originals_at_the_same_share(
    original: int, extra: int
) -> None:
    total = original + extra
    layer_map = inflated(original, total)
    for count in range(1, original + 1):
        mapped = layer_map.layers_for(count)
        assert sum(position < mapped for position in layer_map.positions) == count
        assert abs(mapped / total - count / original) <= 1 / total


def test_an_exit_that_leaves_out_nothing_is_refused() -> None:
    layer_map = inflated(8, 100)
    with pytest.raises(ConfigError, match="at least one of the 8 layers"):
        layer_map.exit_layers_for(8)
    layer_map.check_exit(99)
    with pytest.raises(ConfigError, match="whole target"):
        layer_map.check_exit(100)


@pytest.mark.parametrize("positions", [[3, 1], [0, 0], [0, 9], [-1, 2]])
def test_positions_that_make_no_sense_are_refused(positions: list[int]) -> None:
    with pytest.raises(ConfigError, match=CONFIG_KEY):
        LayerMap.from_config({"num_hidden_layers": 4, CONFIG_KEY: positions})


def test_a_layer_count_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="between 1 and 8"):
        inflated(8, 20).layers_for(0)
