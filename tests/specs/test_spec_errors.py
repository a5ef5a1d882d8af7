"""One error type for every record, however it is made or changed."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from attn.selector import Candidate
from specs.attention import AttentionSelectorConfig, HeadSizes
from specs.base import Spec, SpecError, parse_spec, spec_errors
from specs.devices import ComputeCapability, Device
from specs.engine import EngineConfig
from specs.kv_cache import FullAttentionSpec

ENGINE = EngineConfig(max_model_len=64)
DOORS: dict[str, Callable[[], Any]] = {
    "constructor": lambda: EngineConfig(max_model_len=0),
    "replace": lambda: ENGINE.replace(max_model_len=0),
    "mapping": lambda: EngineConfig.model_validate({"max_model_len": 0}),
    "JSON": lambda: EngineConfig.model_validate_json('{"max_model_len": 0}'),
    "strings": lambda: EngineConfig.model_validate_strings({"max_model_len": "0"}),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_bad_value_is_one_line_that_names_record_field_and_value(door: str) -> None:
    with pytest.raises(SpecError) as caught:
        DOORS[door]()
    came = "'0'" if door == "strings" else "0"
    assert str(caught.value) == (
        f"EngineConfig: field 'max_model_len': Input should be greater than 0; got {came}"
    )
    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, ValidationError)
    assert caught.value.__suppress_context__


def _change(field: str) -> None:
    setattr(ENGINE, field, 1)


def _delete(field: str) -> None:
    delattr(ENGINE, field)


@pytest.mark.parametrize("change", [_change, _delete])
def test_a_frozen_field_is_the_same_error(change: Callable[[str], None]) -> None:
    with pytest.raises(SpecError, match="EngineConfig: field 'max_model_len': Instance is frozen"):
        change("max_model_len")
    assert ENGINE.max_model_len == 64


def test_a_field_inside_a_field_keeps_its_path() -> None:
    with pytest.raises(SpecError) as caught:
        EngineConfig.model_validate(
            {"max_model_len": 64, "parallel": {"tensor_parallel_size": -1, "what": 2}}
        )
    assert str(caught.value).splitlines() == [
        "EngineConfig: field 'parallel.tensor_parallel_size': Input should be greater than 0; "
        "got -1",
        "EngineConfig: field 'parallel.what': Extra inputs are not permitted; got 2",
    ]


def test_a_rule_over_several_fields_is_the_same_error() -> None:
    with pytest.raises(SpecError, match=r"^HeadSizes: field '\(whole\)': .*64\) exceeds"):
        HeadSizes(minimum=64, maximum=32)
    with pytest.raises(SpecError, match=r"^Device: .*a cpu device has no compute capability"):
        Device(name="x", kind="cpu", compute_capability=ComputeCapability(major=9))


def test_records_of_other_packages_of_this_project_are_specs_too() -> None:
    with pytest.raises(SpecError, match=r"^Candidate: field 'verdict'"):
        Candidate(name="X", verdict="maybe", reasons=())


def test_a_caller_that_knows_the_source_names_it_in_place_of_the_record() -> None:
    with (
        pytest.raises(SpecError, match=r"^file\.json: field 'max_model_len'") as caught,
        spec_errors("file.json"),
    ):
        EngineConfig(max_model_len=0)
    assert "EngineConfig" not in str(caught.value)
    # A record that was named once keeps its name, and so does an error without fields.
    with pytest.raises(SpecError, match=r"^layer 3: field 'head_size'"), spec_errors("model"):
        parse_spec(AttentionSelectorConfig, {"head_size": 0, "dtype": "bf16"}, "layer 3")
    with pytest.raises(SpecError, match=r"^heads do not divide$"), spec_errors("model"):
        raise SpecError("heads do not divide")


def test_a_record_made_inside_a_rule_of_another_is_one_error() -> None:
    fields: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 64}
    with pytest.raises(SpecError, match="page_size_padded must be at least") as caught:
        FullAttentionSpec(**fields, page_size_padded=5)
    assert str(caught.value).startswith("FullAttentionSpec: field ")


def test_good_values_make_what_they_made_before() -> None:
    assert EngineConfig.model_validate_json(ENGINE.model_dump_json()) == ENGINE
    assert pickle.loads(pickle.dumps(ENGINE)) == ENGINE
    assert ENGINE.replace(max_model_len=65).max_model_len == 65
    assert issubclass(EngineConfig, Spec)
    with pytest.raises(TypeError):
        EngineConfig(64)  # type: ignore[misc]
