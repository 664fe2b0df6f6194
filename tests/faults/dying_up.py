"""`muonscope up` that dies, or is careless, at one chosen place: python -m tests.faults.dying_up PLACE up …

after-commit    between a committed submission and its answer, once the file `die` is in its folder
mid-migration   after the whole migration's work and before its commit
careless        never syncs: what a power cut takes from a store that does not do it right
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _after_commit() -> None:
    from service.controller.loop import ControllerLoop

    real = ControllerLoop.wake

    def wake(self: ControllerLoop) -> None:
        if (Path(os.environ["MUONSCOPE_HOME"]) / "die").exists():
            _die()
        real(self)

    ControllerLoop.wake = wake  # type: ignore[method-assign]


def _mid_migration() -> None:
    from service.store import migrate

    real = migrate.command.upgrade

    def upgrade(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        _die()

    migrate.command.upgrade = upgrade


def _careless() -> None:
    from service.store.session import Database

    real = Database.write
    Database.write = lambda self, **_: real(self, durable=False)  # type: ignore[method-assign]


PLACES = {"after-commit": _after_commit, "mid-migration": _mid_migration, "careless": _careless}


if __name__ == "__main__":
    PLACES[sys.argv.pop(1)]()
    from muonscope.cli.main import main

    main()
