"""Whether this controller leads: claimed at the start, renewed while it lives, checked in every tick's transaction.

    leads        decides, submits, takes what workers and users write
    stands by    serves reads, tries to lead every second, and does so within `LEASE_S` and a second of the leader's end

The lease alone would let a leader that was stopped for longer go on for a moment when it wakes: so each tick's own
transaction asks the row again, and holds it until it commits.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from service.controller.process_birth import birth_of, was_born
from service.errors import ServiceError
from service.store.leadership import LeadershipRepository, Standing
from service.store.session import Database, Session

logger = logging.getLogger(__name__)

LEASE_S: Final = 10.0
_RENEW_S: Final = 2.5
_TRY_S: Final = 1.0


class NotLeading(Exception):
    """Another controller leads by now: nothing of this tick may be done."""


class Leadership:
    """One controller's claim."""

    def __init__(
        self,
        database: Database,
        url: str,
        *,
        place: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Claim nothing yet.

        Args:
            database: migrated.
            url: how workers reach this controller.
            place: as `this_place`; for tests.
            clock: monotonic seconds.
        """
        self.id = f"{socket.gethostname()[:16]}-{secrets.token_hex(4)}"
        self._database, self.url = database, url
        self._place = place if place is not None else this_place()
        self._clock = clock
        self._standing: Standing | None = None
        self._held_until = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._gives_up = False

    @property
    def is_leading(self) -> bool:
        """Whether this controller leads for all it knows; thread-safe."""
        return self._standing is not None and self._standing.leader == self.id and self._clock() < self._held_until

    @property
    def another_leads(self) -> bool:
        """Whether the last that was seen is another controller in the lead."""
        return self._standing is not None and self._standing.leader != self.id

    @property
    def problem(self) -> str | None:
        """Why this controller does not act; None while it leads."""
        if self.is_leading:
            return None
        if self._standing is None or self._standing.leader == self.id:
            return "no controller leads yet"
        return f"standing by: {self._standing.leader_url} leads"

    @property
    def term(self) -> int:
        return self._standing.term if self._standing is not None else 0

    def claim(self) -> bool:
        """Lead if nobody else does, or go on leading; returns whether this one leads now. Blocks."""
        began = self._clock()
        dead = None
        if self._standing is not None and self._standing.leader != self.id and is_gone(self._standing.leader_place):
            dead = self._standing.leader
        with self._database.write() as session:
            if self._gives_up:
                # Begun before, and only now let in.
                return False
            leadership = LeadershipRepository(session)
            leadership.register(self.id, url=self.url, place=self._place)
            self._standing = leadership.claim(self.id, lease_s=LEASE_S, dead=dead)
        if self._standing.leader != self.id and dead is None and is_gone(self._standing.leader_place):
            # Known gone only now that its place was read.
            return self.claim()
        # From before the transaction: by the database's clock it ends later, never sooner.
        self._held_until = began + LEASE_S if self._standing.leader == self.id else float("-inf")
        return self.is_leading

    def confirm(self, session: Session) -> None:
        """Raise NotLeading unless this controller leads in this very transaction."""
        if not self.is_leading or not LeadershipRepository(session).confirm(self.id, self.term):
            self._held_until = float("-inf")
            raise NotLeading(self.problem or "another controller leads")

    def urls(self) -> str:
        """Return the addresses at which workers may find whoever leads, this one's first, comma-separated. Blocks."""
        with self._database.read() as session:
            return ",".join(LeadershipRepository(session).urls(first=self.url))

    def start(self, *, on_gain: Callable[[], None]) -> None:
        """Begin to claim and renew, in the background; `on_gain` is called each time this one begins to lead."""
        self._task = asyncio.create_task(self._keep(on_gain), name="leadership")

    async def stop(self) -> None:
        """Give the lead up for good, so that another controller takes over at once."""
        self._gives_up = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._held_until = float("-inf")
        with suppress(ServiceError):
            await asyncio.to_thread(self._release)

    def _release(self) -> None:
        with self._database.write() as session:
            LeadershipRepository(session).release(self.id)

    async def _keep(self, on_gain: Callable[[], None]) -> None:
        was_leading, told = False, None
        while True:
            try:
                leads = await asyncio.to_thread(self.claim)
            except ServiceError as error:
                leads = self.is_leading
                logger.warning("the lead cannot be renewed: %s", error.detail, extra={"action": "claim_failed"})
            except Exception:
                # A server that takes no writes for a moment, say: who stops trying would never lead again.
                leads = self.is_leading
                logger.exception("the lead cannot be renewed", extra={"action": "claim_failed"})
            if leads and not was_leading:
                logger.info("this controller leads, term %d", self.term, extra={"action": "leads"})
                on_gain()
            elif not leads and told != self.problem:
                logger.info("%s", self.problem, extra={"action": "stands_by"})
            was_leading, told = leads, self.problem
            await asyncio.sleep(_RENEW_S if leads else _TRY_S)


def this_place() -> str:
    """Name this process so that another one on its machine can tell that it is gone."""
    return "|".join([*_machine(), str(os.getpid()), str(birth_of(psutil.Process()))])


def is_gone(place: str) -> bool:
    """Whether a process is proven gone: it ran where we run, and its process id is nobody's or another's now."""
    *machine, pid, born = place.split("|") if place.count("|") == 3 else ("", "", "")
    if tuple(machine) != _machine():
        return False
    try:
        process = psutil.Process(int(pid))
        return not was_born(process, float(born)) or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError):
        return False


def _machine() -> tuple[str, str]:
    """Return the running kernel and the space in which its process ids count, containers apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        # Not told apart: nobody is ever proven gone.
        return secrets.token_hex(8), ""
