"""The service process stays light."""

import subprocess
import sys


def loaded_by(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_service_loads_neither_torch_nor_deepspeed_nor_ray() -> None:
    assert not loaded_by("import service.app, service.serve") & {"torch", "deepspeed", "ray"}


def test_the_command_loads_no_service_before_it_needs_one() -> None:
    assert not loaded_by("import muonscope.cli.up") & {"torch", "ray", "fastapi", "sqlalchemy", "uvicorn"}
