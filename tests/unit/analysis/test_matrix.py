import time

import pytest

from service.analysis.matrix import MAX_RUNS, expand
from service.errors import InvalidInput


def test_a_list_far_too_long_is_refused_before_its_values_are_held_against_each_other() -> None:
    begun = time.process_time()

    with pytest.raises(InvalidInput, match=f"more than {MAX_RUNS} combinations"):
        expand({}, {"seed": list(range(20_000))}, name="long")

    assert time.process_time() - begun < 0.5


def test_a_value_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lists a value twice"):
        expand({}, {"seed": [1, 2, 1]}, name="twice")
