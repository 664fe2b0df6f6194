"""What a run leaves behind, by name: its spec, what its attempts resolved and printed, and its checkpoints.

A name is looked up among those that the run has; it never becomes a path. A checkpoint is read from the workers'
folder, if this machine has it: the files that its manifest names, each of the size it says, and no link.
"""

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from service.errors import Conflict
from service.store.checkpoints import CheckpointRepository
from service.store.logs import DRIVER, LogRepository
from service.store.models import Attempt, Checkpoint, Run
from service.store.session import Session

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
TAR: Final = "application/x-tar"
_CHUNK: Final = 1024 * 1024
_BLOCK: Final = 512


@dataclass(frozen=True, slots=True)
class Artifact:
    """One thing to download.

    `read` is called within the session that listed it, and what it returns may be read after that. It raises Conflict
    where what it names is no longer what was reported.
    """

    name: str
    kind: str
    media_type: str
    created_at: datetime
    read: Callable[[], Iterator[bytes]]
    total_bytes: int | None = None
    """None where it is only known once it is read."""
    attempt: int | None = None
    is_here: bool = True
    """Whether this machine has it: checkpoints lie where the workers keep them."""


def list_artifacts(session: Session, run: Run, workers_home: Path | None) -> list[Artifact]:
    """Return all that a run has, in the order of its making.

    Args:
        session: it reads.
        run: as RunRepository loads it.
        workers_home: where workers keep checkpoints, as this machine sees it; None where it does not.
    """
    found = [_document("spec.json", "spec", run.created_at, run.spec)]
    for attempt in run.attempts:
        found += _of_attempt(session, run, attempt)
    for row in CheckpointRepository(session).list(run):
        found.append(_checkpoint(run, row, workers_home))
    return found


def _of_attempt(session: Session, run: Run, attempt: Attempt) -> Iterator[Artifact]:
    prefix, at = f"attempt-{attempt.number}", attempt.created_at
    if attempt.resolved_ds_config is not None:
        yield _document(f"{prefix}/ds_config.json", "resolved_config", at, attempt.resolved_ds_config, attempt.number)
    if attempt.environment:
        environment = {"environment": attempt.environment, "ranks": attempt.ranks, "phases": attempt.phases}
        yield _document(f"{prefix}/environment.json", "environment", at, environment, attempt.number)
    logs = LogRepository(session)
    for rank, size in logs.sizes(attempt).items():
        name = f"{prefix}/driver.log" if rank == DRIVER else f"{prefix}/rank-{rank}.log"
        yield Artifact(name, "log", TEXT, at, partial(_log, logs, attempt, rank), size, attempt.number)


def _log(logs: LogRepository, attempt: Attempt, rank: int) -> Iterator[bytes]:
    return iter([logs.read(attempt, rank).encode()])


def _document(name: str, kind: str, at: datetime, body: Any, attempt: int | None = None) -> Artifact:
    content = json.dumps(body, indent=1).encode()
    return Artifact(name, kind, JSON, at, lambda: iter([content]), len(content), attempt)


def _checkpoint(run: Run, row: Checkpoint, workers_home: Path | None) -> Artifact:
    name = f"checkpoint-{row.step:08d}.tar"
    folder = workers_home / "checkpoints" / run.uid / f"step-{row.step:08d}" if workers_home is not None else None
    is_here = folder is not None and (folder / "manifest.json").is_file()
    digest = row.manifest_sha256

    def read() -> Iterator[bytes]:
        if folder is None or not is_here:
            raise Conflict(
                f"{name} is not on this machine", field="name", value=name,
                remedy="read it where the workers run, or set MUONSCOPE_WORKERS_HOME to the folder they share",
            )  # fmt: skip
        return _tar(folder, name, _manifest_files(folder, name, digest))

    return Artifact(name, "checkpoint", TAR, row.created_at, read, row.total_bytes, row.attempt, is_here)


def _manifest_files(folder: Path, name: str, digest: str) -> dict[str, int]:
    """Return the files that the manifest names, with their sizes, once all are as it says."""
    try:
        text = (folder / "manifest.json").read_bytes()
        if hashlib.sha256(text).hexdigest() != digest:
            raise _changed(name, "its manifest is not the one that was reported")
        files = {str(path): int(entry["bytes"]) for path, entry in json.loads(text)["files"].items()}
        for path, size in files.items():
            where = folder / path
            if not where.resolve().is_relative_to(folder.resolve()) or where.is_symlink():
                raise _changed(name, f"{path} leads out of it")
            if where.stat().st_size != size:
                raise _changed(name, f"{path} has another size")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _changed(name, "it was removed or damaged") from error
    return {"manifest.json": len(text), **files}


def _changed(name: str, why: str) -> Conflict:
    return Conflict(f"{name} is not what was written: {why}", field="name", value=name, remedy="take another one")


def _tar(folder: Path, name: str, files: dict[str, int]) -> Iterator[bytes]:
    """Yield the files as a tar archive, a piece in memory at a time."""
    for path, size in files.items():
        info = tarfile.TarInfo(f"{name.removesuffix('.tar')}/{path}")
        info.size = size
        yield info.tobuf(tarfile.PAX_FORMAT)
        left = size
        with (folder / path).open("rb") as file:
            # No more than was announced, whatever the file has become.
            while left and (data := file.read(min(_CHUNK, left))):
                left -= len(data)
                yield data
        if left:
            raise OSError(f"{path} was cut while it was read")
        yield b"\0" * (-size % _BLOCK)
    yield b"\0" * 2 * _BLOCK
