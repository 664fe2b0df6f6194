"""What a signal does to a service that runs."""

import signal
from pathlib import Path

import pytest

from service.app import create_app
from service.serve import Server
from service.settings import Settings
from tests.unit.controller.fakes import FakeLauncher


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_is_a_clean_end_and_a_second_interrupt_a_hard_one(tmp_path: Path, number: signal.Signals) -> None:
    server = Server(create_app(Settings(home=tmp_path), FakeLauncher()))

    server.handle_exit(number, None)
    assert (server.should_exit, server.force_exit) == (True, False)

    server.handle_exit(number, None)
    assert server.force_exit == (number is signal.SIGINT)
