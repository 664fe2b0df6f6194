"""A run's tags, which may change while it waits, runs, and after: they say nothing about its numbers."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from service.errors import InvalidInput
from service.store.events import EventRepository
from service.store.models import Run, RunTag
from service.store.runs import RunRepository

MAX_TAGS: Final = 64


class TagRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def change(self, run: Run, *, add: Sequence[str], remove: Sequence[str], who: str) -> bool:
        """Put tags on a run and take tags off it; what is there, or gone, already stays as it is.

        The spec keeps the tags it was submitted with. A change leaves one event; a call that changes nothing, none.

        Returns:
            Whether anything changed.
        Raises:
            InvalidInput: a tag is in both lists, or the run would carry more than MAX_TAGS.
        """
        both = sorted(set(add) & set(remove))
        if both:
            raise InvalidInput(
                f"the tag {both[0]!r} is both added and removed", field="remove_tags", value=both[0],
                remedy="name it in one of add_tags and remove_tags",
            )  # fmt: skip
        gone = [row for row in run.tags if row.tag in set(remove)]
        kept = [row for row in run.tags if row not in gone]
        known = {row.tag for row in kept}
        fresh = [tag for tag in dict.fromkeys(add) if tag not in known]
        if not gone and not fresh:
            return False
        if len(kept) + len(fresh) > MAX_TAGS:
            raise InvalidInput(
                f"run {run.uid} would carry {len(kept) + len(fresh)} tags", field="add_tags", value=list(add),
                remedy=f"a run carries at most {MAX_TAGS}; take some off with remove_tags",
            )  # fmt: skip
        for row in gone:
            self._session.delete(row)
        free = max((row.position for row in run.tags), default=-1) + 1
        added = [RunTag(run_id=run.id, position=free + place, tag=tag) for place, tag in enumerate(fresh)]
        self._session.add_all(added)
        self._session.flush()
        set_committed_value(run, "tags", kept + added)
        RunRepository(self._session).touch(run)
        lost = list(dict.fromkeys(row.tag for row in gone))
        said = [f"{verb} {', '.join(tags)}" for verb, tags in (("added", fresh), ("removed", lost)) if tags]
        EventRepository(self._session).append(
            "tags", run=run, who=who, why="; ".join(said), detail={"added": fresh, "removed": lost}
        )
        return True
