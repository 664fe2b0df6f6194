"""The driver: entry point of an attempt's Ray job.

    python -m workers.driver --controller URL --attempt ID (--enrolment-file FILE | --enrolment-token TOKEN)

It enrols with the controller while Ray is being imported and connected to, then lives through the attempt
(`workers.attempt`). Start-up time is the product here: whatever is heavy is imported after the enrolment is on its way.

Exit code: 0 succeeded, 3 a death that the numbers explain, 1 another failure, 130 stopped.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from workers.background import Background
from workers.controller_client import ControllerClient, until_answered
from workers.errors import ControllerAway, ControllerRefused

if TYPE_CHECKING:
    from muonscope.contract.attempts import Enrolled

# How long a job waits for a controller that is away, at its start and at its end.
PATIENCE_S: Final = 900.0

EXIT_FAILED: Final = 1
EXIT_STOPPED: Final = 130

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one attempt; returns the job's exit code."""
    arguments = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    stop = threading.Event()
    _stop_on_sigterm(stop)
    token = arguments.enrolment_token or take_token(arguments.enrolment_file)
    enrolment = Background(lambda: enrol(arguments.controller, arguments.attempt, token, stop))
    import ray

    ray.init(address="auto", logging_level=logging.WARNING)
    # Ray takes SIGTERM for itself when it connects.
    _stop_on_sigterm(stop)
    from workers.attempt import Attempt

    try:
        enrolled, enrolled_at = enrolment.wait()
    except (ControllerAway, ControllerRefused) as error:
        logger.error("not enrolled: %s", error, extra={"action": "enrolment_failed"})
        return EXIT_STOPPED if stop.is_set() else EXIT_FAILED
    started_at = process_started_at()
    attempt = Attempt(arguments.controller, arguments.attempt, enrolled, arguments.home, stop, PATIENCE_S)
    return attempt.run(driver_started_at=started_at, enrolled_at=enrolled_at)


def take_token(file: Path) -> str:
    """Return the token that a file holds, and remove the file: nobody needs it any more."""
    token = file.read_text()
    file.unlink()
    return token


def enrol(controller: str, attempt_id: str, token: str, give_up: threading.Event) -> "tuple[Enrolled, float]":
    """Exchange the one-use token for the attempt's spec and own token, waiting for a controller that is away.

    Returns:
        What the controller said, and the Unix time at which it did.
    Raises:
        ControllerRefused: the token was used before, or the attempt is over.
        ControllerAway: not back in time, or `give_up` was set meanwhile.
    """
    from muonscope.contract.attempts import Enrolled, Enrolment

    client = ControllerClient(controller, attempt_id)
    body = Enrolment(token=token, ray_job_id=attempt_id).model_dump_json().encode()
    answer = until_answered(lambda: client.post("enrol", body), patience_s=PATIENCE_S, give_up=give_up)
    client.close()
    return Enrolled.model_validate_json(answer), time.time()


def process_started_at() -> float:
    """Return the Unix time at which this process began, before any of its imports."""
    try:
        # Field 22, counted after the parenthesized command: clock ticks since boot.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        age_s = time.process_time()
    return time.time() - age_s


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="workers.driver", description="Run one attempt of a run, as its Ray job.")
    parser.add_argument("--controller", required=True, metavar="URL", help="where the controller answers")
    parser.add_argument("--attempt", required=True, metavar="ID", help="the attempt's id, and the Ray job's")
    proof = parser.add_mutually_exclusive_group(required=True)
    proof.add_argument("--enrolment-file", type=Path, metavar="FILE", help="holds the token; read once and removed")
    proof.add_argument("--enrolment-token", metavar="TOKEN", help="good for one enrolment")
    home = Path(os.environ.get("MUONSCOPE_HOME", "~/.muonscope"))
    parser.add_argument("--home", type=Path, default=home, help="where checkpoints are kept; shared by all nodes")
    arguments = parser.parse_args(argv)
    arguments.home = arguments.home.expanduser()
    return arguments


def _stop_on_sigterm(stop: threading.Event) -> None:
    signal.signal(signal.SIGTERM, lambda *_: stop.set())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Ray's orderly goodbye takes longer than its noticing that we are gone, and there is nothing left to say.
    os._exit(code)
