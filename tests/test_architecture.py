"""The tree's own rules: import directions, quick imports, short files, documented settings."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from fastapi.datastructures import DefaultPlaceholder
from fastapi.routing import APIRoute
from pydantic import BaseModel

from muonscope.client import ClientSettings
from muonscope.contract.run_spec import RunSpec
from service.app import ROUTERS
from service.settings import Settings

ROOT = Path(__file__).parent.parent
PACKAGES = ("muonscope", "muon_core", "workers", "service", "migrations")
MAX_FILE_LINES = 500
# Each name here has its reason in the commit that added it.
LONGER_FILES: frozenset[str] = frozenset()
MODULES_WITH_LOGIC_IN_INIT = {"muonscope/__init__.py"}  # exports that are imported when first used


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if "node_modules" not in path.parts)


@cache
def loaded_modules(statement: str) -> frozenset[str]:
    program = f"import sys; {statement}; print(*sorted(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return frozenset(printed.stdout.split())


def test_every_import_goes_in_an_allowed_direction() -> None:
    result = subprocess.run([Path(sys.executable).parent / "lint-imports"], capture_output=True, text=True, cwd=ROOT)

    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("heavy", ["torch", "deepspeed", "ray"])
def test_the_service_loads_nothing_that_trains(heavy: str) -> None:
    assert heavy not in loaded_modules("import service.app, service.serve")


@pytest.mark.parametrize("heavy", ["torch", "deepspeed", "ray", "fastapi", "sqlalchemy", "numpy"])
def test_the_client_loads_neither_what_trains_nor_what_serves(heavy: str) -> None:
    assert heavy not in loaded_modules("import muonscope.client")


@pytest.mark.parametrize("heavy", ["torch", "ray", "fastapi", "sqlalchemy", "uvicorn"])
def test_the_command_loads_no_service_before_it_needs_one(heavy: str) -> None:
    assert heavy not in loaded_modules("import muonscope.cli.up")


@pytest.mark.parametrize("heavy", ["httpx", "pydantic", "rich", "torch", "service"])
def test_importing_the_package_alone_loads_nothing(heavy: str) -> None:
    assert heavy not in loaded_modules("import muonscope")


def test_the_core_loads_torch_and_not_deepspeed() -> None:
    loaded = loaded_modules("import muon_core")

    assert "torch" in loaded
    assert "deepspeed" not in loaded


def test_every_route_of_the_api_answers_in_json_that_is_json_or_says_what_else() -> None:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    documented = [route for route in routes if route.include_in_schema]

    # FastAPI's own default writes NaN as it stands.
    assert [route.path for route in documented if isinstance(route.response_class, DefaultPlaceholder)] == []
    assert len(documented) > 40


def test_every_exported_name_of_the_package_can_be_imported() -> None:
    import muonscope

    assert [name for name in muonscope.__all__ if not hasattr(muonscope, name)] == []
    assert set(muonscope._HOMES) == set(muonscope.__all__)


def test_no_file_has_grown_beyond_its_budget() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(*PACKAGES)}

    too_long = {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}
    assert {name: length for name, length in too_long.items() if name not in LONGER_FILES} == {}
    assert set(LONGER_FILES) <= set(too_long), "an exception that is no longer needed"


def test_init_files_hold_exports_only() -> None:
    def is_export(node: ast.stmt) -> bool:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets)
        return docstring or names or isinstance(node, ast.Import | ast.ImportFrom)

    files = {str(path.relative_to(ROOT)): path for path in sources(*PACKAGES) if path.name == "__init__.py"}
    found = {
        name: [type(node).__name__ for node in ast.parse(path.read_text()).body if not is_export(node)]
        for name, path in files.items()
        if name not in MODULES_WITH_LOGIC_IN_INIT
    }

    assert {name: nodes for name, nodes in found.items() if nodes} == {}


def test_every_module_says_what_it_is_for() -> None:
    modules = [path for path in sources(*PACKAGES) if path.name != "__init__.py" and path.read_text().strip()]

    assert [str(path.relative_to(ROOT)) for path in modules if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_no_module_is_named_for_nothing() -> None:
    names = {path.name for path in sources(*PACKAGES)}

    assert names.isdisjoint({"utils.py", "helpers.py", "common.py", "misc.py", "manager.py"})


def test_only_settings_read_our_environment_variables() -> None:
    """Other programs' variables (CUDA_VISIBLE_DEVICES, PYTHONPATH) are read where they are acted on."""

    def reads_ours(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get", "os.environ.pop"):
            return "MUONSCOPE_" in ast.unparse(node.args[0])
        is_read = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        return is_read and re.match(r"os\.environ\[.MUONSCOPE_", ast.unparse(node)) is not None

    readers = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("muonscope", "service")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.expr) and reads_ours(node)
    ]

    assert readers == []


@pytest.mark.parametrize("settings", [Settings, ClientSettings])
def test_every_setting_is_documented(settings: type[BaseModel]) -> None:
    assert [name for name, field in settings.model_fields.items() if not field.description] == []


def test_every_setting_can_be_found_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guides" / "settings.md").read_text()
    names = {f"MUONSCOPE_{name.upper()}" for name in (*Settings.model_fields, *ClientSettings.model_fields)}

    assert {name for name in names if f"`{name}`" not in guide} == set()


def test_every_field_of_a_spec_can_be_found_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guides" / "run-spec.md").read_text()

    assert {name for name in RunSpec.model_fields if f"`{name}`" not in guide} == set()
