"""A checkpoint's folder: what it holds, whether it is whole, and which one to resume from. Needs no torch.

    <root>/step-00000200/manifest.json      what the folder holds, each file's size and SHA-256
    <root>/step-00000200/state/…            DeepSpeed's own checkpoint
    <root>/step-00000200/random-rank-0.pt   each rank's random generators
    <root>/.step-00000200.partial           being written, or left by a run that was killed meanwhile

A folder gets its name only after all it holds is on disk and hashed: whoever sees the name sees a whole checkpoint.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.errors import CheckpointUnusable

MANIFEST: Final = "manifest.json"
FORMAT_VERSION: Final = 1
_COMPLETE_NAME: Final = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint says of itself."""

    fingerprint: str
    """Of the run's spec: a checkpoint of other numbers is not this run's."""
    step: int
    """The first step to attempt after loading it."""
    world_size: int
    files: dict[str, dict[str, Any]]

    def to_json(self) -> str:
        body = {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint, "step": self.step}
        return json.dumps({**body, "world_size": self.world_size, "files": self.files}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a folder's manifest; raises CheckpointUnusable for any other content."""
        try:
            body = json.loads((folder / MANIFEST).read_text())
            if body["format_version"] != FORMAT_VERSION:
                raise CheckpointUnusable(
                    str(folder), f"format version {body['format_version']} is not {FORMAT_VERSION}"
                )
            return cls(body["fingerprint"], int(body["step"]), int(body["world_size"]), dict(body["files"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointUnusable(str(folder), f"its manifest cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint as its folder shows it, unverified."""

    step: int
    total_bytes: int
    manifest_sha256: str


def look(root: Path) -> list[Found]:
    """Return the complete checkpoints under `root`, oldest first. Reads their manifests, not what they hold."""
    found = []
    for step, folder in complete_folders(root):
        try:
            text = (folder / MANIFEST).read_bytes()
            total = sum(int(entry["bytes"]) for entry in Manifest.read(folder).files.values())
        except (OSError, CheckpointUnusable, KeyError, TypeError, ValueError):
            # Removed meanwhile, as the oldest are, or damaged: not one to resume from.
            continue
        found.append(Found(step, total, hashlib.sha256(text).hexdigest()))
    return found


def choose(
    root: Path,
    resume_step: int,
    *,
    fingerprint: str,
    world_size: int,
    known: Mapping[int, str] | None = None,
) -> tuple[Path, Manifest]:
    """Return the newest checkpoint at or before `resume_step` that is whole and of this run.

    Args:
        root: the run's folder.
        resume_step: the newest step to resume at.
        fingerprint: of the run's spec.
        world_size: the run's.
        known: step -> its manifest's SHA-256, as the controller was told when it was written: no other folder is
            touched, whatever it says of itself. None trusts every manifest.
    Raises:
        CheckpointUnusable: there is none; says what was wrong with each candidate.
    """
    reasons = []
    for step, folder in reversed(complete_folders(root)):
        if step > resume_step:
            continue
        try:
            _refuse_unknown(folder, step, known)
            manifest = Manifest.read(folder)
            _refuse_foreign(folder, manifest, step, fingerprint, world_size)
            verify(folder, manifest)
        except CheckpointUnusable as error:
            reasons.append(str(error))
            continue
        return folder, manifest
    found = "; ".join(reasons) or f"it holds no complete checkpoint at or before step {resume_step}"
    raise CheckpointUnusable(str(root), found)


def complete_folders(root: Path) -> list[tuple[int, Path]]:
    """Return the folders that carry a complete checkpoint's name, as (step, folder), oldest first."""
    if not root.is_dir():
        return []
    matches = ((_COMPLETE_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def verify(folder: Path, manifest: Manifest) -> None:
    """Check every file against the manifest; raises CheckpointUnusable naming the first that differs."""
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointUnusable(str(folder), f"its manifest names {name!r}, outside the folder")
        try:
            actual = describe_file(path)
        except OSError as error:
            raise CheckpointUnusable(str(folder), f"{name}: {error.strerror or error}") from error
        if actual != expected:
            raise CheckpointUnusable(str(folder), f"{name} is not what was written ({actual['bytes']} bytes now)")
    extra = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {
        *manifest.files,
        MANIFEST,
    }
    if extra:
        raise CheckpointUnusable(str(folder), f"it holds files nobody wrote down: {', '.join(sorted(extra)[:3])}")


def describe_file(path: Path) -> dict[str, Any]:
    """Return a file's size and SHA-256."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _refuse_unknown(folder: Path, step: int, known: Mapping[int, str] | None) -> None:
    if known is None:
        return
    if step not in known:
        raise CheckpointUnusable(str(folder), "no attempt of this run has reported it")
    try:
        digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointUnusable(str(folder), f"its manifest cannot be read: {error}") from error
    if digest != known[step]:
        raise CheckpointUnusable(str(folder), "its manifest is not the one that was reported when it was written")


def _refuse_foreign(folder: Path, manifest: Manifest, step: int, fingerprint: str, world_size: int) -> None:
    if manifest.fingerprint != fingerprint:
        raise CheckpointUnusable(str(folder), "it was written by a run of another spec")
    if manifest.world_size != world_size:
        raise CheckpointUnusable(
            str(folder), f"it was written by {manifest.world_size} ranks, this run has {world_size}"
        )
    if manifest.step != step:
        raise CheckpointUnusable(str(folder), f"its manifest says step {manifest.step}")
