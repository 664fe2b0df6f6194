"""The contract's table of DeepSpeed's keys is the installed release's, and our reading of values is DeepSpeed's."""

from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from muonscope.contract import deepspeed_keys
from muonscope.contract.ds_config import refusal
from workers.deepspeed_keys import read


def test_the_contracts_table_is_what_the_installed_release_says() -> None:
    table = read()

    assert table["release"] == deepspeed_keys.RELEASE
    assert sorted(deepspeed_keys.TOP_LEVEL) == table["top_level"]
    assert table["sections"] == deepspeed_keys.SECTIONS


VALUES = (
    True,
    False,
    0,
    1,
    2,
    5e8,
    3774873.6,
    "auto",
    "5e8",
    "500",
    "1.0",
    "1.5",
    "true",
    "off",
    "maybe",
    "",
    None,
    [1],
)


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("field", ["overlap_comm", "reduce_bucket_size", "stage3_prefetch_bucket_size"])
def test_a_value_is_taken_exactly_where_deepspeed_takes_it(field: str, value: Any) -> None:
    try:
        DeepSpeedZeroConfig(**{field: value})
        is_taken = True
    except ValidationError:
        is_taken = False

    said = refusal({"zero_optimization": {field: value}})

    # None is the one value that we leave to DeepSpeed: some fields take it.
    assert (said is None) == is_taken or (value is None and said is None)
