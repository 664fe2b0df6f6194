"""The error tree, as its docstring draws it."""

import inspect
import pickle

import pytest

from muonscope import errors


def test_the_docstring_draws_every_error() -> None:
    kinds = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)}

    assert kinds == {name for name in kinds if name in (errors.__doc__ or "")}
    assert all(issubclass(getattr(errors, name), errors.MuonscopeError) for name in kinds)


@pytest.mark.parametrize("status", [400, 401, 404, 409, 503])
def test_an_error_keeps_its_fields_through_str_and_is_never_blank(status: int) -> None:
    error = errors.error_for(status, "Title", "", {"title": "Title"})

    assert str(error) == "Title"
    assert error.status == status
    assert error.type == "about:blank"


def test_a_spec_file_error_names_the_file() -> None:
    error = errors.SpecFileError("spec.yaml", "is not YAML", remedy="correct it")

    assert str(error) == "spec.yaml: is not YAML"
    assert error.remedy == "correct it"


def test_a_base_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.MuonscopeError("what happened")))

    assert str(error) == "what happened"
