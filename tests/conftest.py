"""What holds for every test: no state of the machine's own service is read or written."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Shared machines are slow at times: a deadline per example would test the machine.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _own_muonscope_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MUONSCOPE_") and not name.startswith("MUONSCOPE_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MUONSCOPE_HOME", str(tmp_path / "muonscope-home"))
