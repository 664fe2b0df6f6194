"""Checkpoints that are whole or not there: written beside, fsynced, hashed, renamed, retained.

What a folder holds is said in `checkpoint_files.py`.

The folder must be one that all ranks' nodes share. Resume takes only folders with a manifest of this run whose every
file hashes to what the manifest says; DeepSpeed's loader unpickles, so nothing else may reach it.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from muon_core.disk import fsync_path
from workers.checkpoint_files import MANIFEST, Manifest, choose, complete_folders, describe_file
from workers.engine import Place, Training
from workers.errors import CheckpointNotShared, CheckpointUnusable

STATE_TAG: Final = "state"
# A write that failed with less room than this failed for want of it.
FULL_BELOW_BYTES: Final = 16 * 1024 * 1024
Result = TypeVar("Result")


class Resumed(NamedTuple):
    """Where the loop goes on after a checkpoint was loaded."""

    first_step: int
    """The first step to attempt."""
    discarded_in_a_row: int
    """Steps before it that were discarded without one between them that was applied."""


def save(training: Training, root: Path, next_step: int, discarded_in_a_row: int = 0) -> Path:
    """Write a checkpoint that resumes at `next_step`, and remove the oldest beyond what the run keeps.

    Collective.

    Args:
        training: this rank's.
        root: the run's folder.
        next_step: the first step to attempt after loading it.
        discarded_in_a_row: how many steps before it were discarded: the loop counts on from there.
    Returns:
        The complete checkpoint's folder.
    Raises:
        CheckpointNotShared: not all ranks see the folder.
    """
    place = training.place
    partial, complete = root / f".step-{next_step:08d}.partial", root / f"step-{next_step:08d}"
    _on_first_rank(place, lambda: _make_empty(partial))
    _require_shared(place, partial)
    with disk_full_is_said(root):
        training.engine.save_checkpoint(str(partial), tag=STATE_TAG, save_latest=False)
        torch.save(
            {**_random_states(), "discarded_in_a_row": discarded_in_a_row}, partial / f"random-rank-{place.rank}.pt"
        )
    _barrier(place)
    files = _merge(place, _hash_share(partial, place))
    manifest = Manifest(training.spec.fingerprint(), next_step, place.world_size, files)
    _on_first_rank(place, lambda: _publish(partial, complete, manifest, keep=training.spec.checkpoint.keep))
    return complete


@contextmanager
def disk_full_is_said(folder: Path) -> Iterator[None]:
    """Turn a write that failed for want of room into the error that says so: torch's own speaks of a stream."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if shutil.disk_usage(folder).free < FULL_BELOW_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise


def load_newest(training: Training, root: Path, resume_step: int, known: Mapping[int, str] | None = None) -> Resumed:
    """Load the newest whole checkpoint that is not newer than `resume_step`.

    Collective. `known` is `choose`'s.

    Returns:
        Where the loop goes on.
    Raises:
        CheckpointUnusable: none is whole and of this run.
    """
    spec, place = training.spec, training.place
    folder, manifest = _on_first_rank(
        place,
        lambda: choose(root, resume_step, fingerprint=spec.fingerprint(), world_size=spec.world_size, known=known),
    )
    loaded, _ = training.engine.load_checkpoint(str(folder), tag=STATE_TAG)
    if loaded is None:
        raise CheckpointUnusable(str(folder), "DeepSpeed did not load it")
    states = torch.load(folder / f"random-rank-{place.rank}.pt", weights_only=True)
    _restore_random_states(states)
    return Resumed(int(manifest.step), int(states["discarded_in_a_row"]))


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _require_shared(place: Place, partial: Path) -> None:
    """Hold that every rank sees the folder that the first one has made. Collective."""
    sees: list[bool | None] = [None] * place.world_size
    if place.world_size > 1:
        dist.all_gather_object(sees, partial.is_dir())
    blind = [rank for rank, seen in enumerate(sees) if seen is False]
    if blind:
        raise CheckpointNotShared(str(partial.parent), blind)


def _hash_share(partial: Path, place: Place) -> dict[str, dict[str, Any]]:
    """Fsync and hash this rank's share of the files: they are dealt out in turn."""
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    share = {}
    for path in paths[place.rank :: place.world_size]:
        fsync_path(path)
        share[str(path.relative_to(partial))] = describe_file(path)
    return share


def _publish(partial: Path, complete: Path, manifest: Manifest, keep: int) -> None:
    path = partial / MANIFEST
    path.write_text(manifest.to_json())
    fsync_path(path)
    for folder in [path for path in partial.rglob("*") if path.is_dir()] + [partial]:
        fsync_path(folder)
    # A resumed run may write the same step again: the same state, so the newer copy stands.
    shutil.rmtree(complete, ignore_errors=True)
    partial.rename(complete)
    fsync_path(complete.parent)
    for _, folder in complete_folders(complete.parent)[:-keep]:
        if folder != complete:
            shutil.rmtree(folder, ignore_errors=True)


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def _on_first_rank(place: Place, action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 and give every rank its result, or its error."""
    said: list[Any] = [None, None]
    if place.rank == 0:
        try:
            said[0] = action()
        except Exception as error:
            said[1] = error
    if place.world_size > 1:
        dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise said[1]
    result: Result = said[0]
    return result


def _merge(place: Place, share: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    shares: list[dict[str, dict[str, Any]] | None] = [share]
    if place.world_size > 1:
        shares = [None] * place.world_size
        dist.all_gather_object(shares, share)
    return {name: entry for part in _present(shares) for name, entry in sorted(part.items())}


def _present(shares: Sequence[dict[str, dict[str, Any]] | None]) -> list[dict[str, dict[str, Any]]]:
    return [share for share in shares if share is not None]


def _barrier(place: Place) -> None:
    if place.world_size > 1:
        dist.barrier()
