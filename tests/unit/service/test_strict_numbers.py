"""No message takes a switch for a number, a number for a switch, or a text for an integer, in any field."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from service.app import ROUTERS


def _models(annotation: Any, seen: set[type]) -> Iterator[type[BaseModel]]:
    for part in get_args(annotation):
        yield from _models(part, seen)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
        seen.add(annotation)
        yield annotation
        for field in annotation.model_fields.values():
            yield from _models(field.annotation, seen)


def _kinds(annotation: Any) -> set[Any]:
    """What stands on its own in an annotation: of `Annotated[int, …] | None`, int and None."""
    if get_origin(annotation) in (Union, UnionType):
        return {kind for part in get_args(annotation) for kind in _kinds(part)}
    return _kinds(get_args(annotation)[0]) if get_origin(annotation) is Annotated else {annotation}


def _fields() -> Iterator[tuple[str, FieldInfo, set[type]]]:
    """Every field of every body that is a number or a switch, by the name of its model."""
    seen: set[type] = set()
    for route in (route for router in ROUTERS for route in router.routes):
        if isinstance(route, APIRoute) and route.body_field is not None:
            for model in _models(route.body_field.field_info.annotation, seen):
                for name, field in model.model_fields.items():
                    kinds = _kinds(field.annotation) & {int, float, bool}
                    if kinds:
                        yield f"{model.__name__}.{name}", field, kinds


FIELDS = {name: (field, kinds) for name, field, kinds in _fields()}


def _takes(field: FieldInfo, value: Any) -> bool:
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_takes_its_own_kind_alone(name: str) -> None:
    field, kinds = FIELDS[name]
    others = {bool: (0, 1, "true"), int: (True, False, "1"), float: (True, False)}
    own = {bool: (True,), int: (1, 2, 8, 64), float: (0.5, 1.0)}
    (kind,) = kinds
    assert [value for value in others[kind] if _takes(field, value)] == []
    # The counter-test: it takes something.
    assert any(_takes(field, value) for value in own[kind])


def test_fields_of_every_part_are_looked_at() -> None:
    assert {
        "RunSpec.zero_stage", "ExternalTask.is_open_ended", "FinalState.peak_memory_bytes", "CheckpointFact.step",
        "LimitIn.max_gpus", "SilenceCondition.seconds", "LoadSample.at", "LogPiece.start",
    } <= set(FIELDS)  # fmt: skip
