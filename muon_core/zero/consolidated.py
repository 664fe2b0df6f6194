"""Checkpoints that another world size, ZeRO stage or partition layout can resume from.

DeepSpeed's own checkpoints hold each rank's partition as it lies there, and its ways to re-cut them know Adam alone.
Here every parameter is written whole, by name:

    <path>/manifest.json               what is held and where, steps, loss scaler, learning-rate schedule
    <path>/tensors-00001.safetensors   master/<name>, and momentum_buffer/<name> or exp_avg/<name>, exp_avg_sq/<name>;
                                       frozen/<name>, buffer/<name>

Bits are kept: the float32 values that a run resumes with are those it was saved with.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from muon_core.disk import fsync_path
from muon_core.errors import CheckpointMismatch
from muon_core.parameters import full_shape
from muon_core.zero.layout import Partition, PlacedParameter, ZeroPartitions
from muon_core.zero.optimizer import ZeroMuon

FORMAT: Final = "muon_core.consolidated"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
DEFAULT_FILE_BYTES: Final = 1 << 31
_PROGRESS: Final = ("global_steps", "global_samples", "skipped_steps")
_SCALER: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_FIELDS: Final[dict[str, tuple[type, ...]]] = {
    **dict.fromkeys(("parameters", "tensors", "adam_steps", "progress", "learning_rates", "client_state"), (dict,)),
    **dict.fromkeys(("loss_scaler", "schedule"), (dict, type(None))),
}
_STATE_KEYS: Final = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}


def save_consolidated(
    engine: Any,
    optimizer: ZeroMuon,
    path: str | os.PathLike[str],
    *,
    client_state: dict[str, Any] | None = None,
    file_bytes: int = DEFAULT_FILE_BYTES,
) -> None:
    """Write everything that training goes on from, parameter by parameter.

    Collective: every rank must call it, between steps; the first rank writes. Nothing but a complete checkpoint ever
    stands at `path`, and what stands there when the call returns outlives a power cut.

    Args:
        engine, optimizer: as given to `attach`.
        path: a folder that does not exist yet, on a file system that all ranks share when it is loaded.
        client_state: what else to keep, as JSON; the first rank's.
        file_bytes: a file is closed once it holds this much; the first rank keeps one file in memory.
    Raises:
        ValueError: inside an accumulation window, a path that is taken, or a state that JSON cannot hold.
        OSError: the first rank could not write; every rank is told.
    """
    _require_between_steps(engine, "there is a gradient to lose; save after its last step")
    is_first = dist.get_rank() == 0
    writer = _Writer(Path(path), file_bytes, lambda: _manifest(engine, optimizer, client_state)) if is_first else None
    _raise_everywhere(None if writer is None else writer.error)
    for key, tensor in _whole_tensors(engine, optimizer):
        if writer is not None:
            writer.add(key, tensor)
    _raise_everywhere(None if writer is None else writer.finish())


def load_consolidated(engine: Any, optimizer: ZeroMuon, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Resume from a checkpoint, whatever world size and stage wrote it.

    Collective: every rank must call it, after `attach` and between steps. Settings (learning rate, momentum, …) stay
    those of this run, except for a learning rate that a schedule has moved.

    Returns:
        The `client_state` it was saved with.
    Raises:
        CheckpointMismatch: not such a checkpoint, or one of another model or routing; nothing has been changed.
        ValueError: inside an accumulation window; nothing has been changed.
    """
    _require_between_steps(engine, "there is a gradient that the next step would take; load after its last step")
    source = Path(path)
    manifest = _checked_manifest(source, engine, optimizer)
    partitions = optimizer.partitions
    with torch.no_grad(), _Reader(source, manifest) as reader:
        for partition in partitions.partitions:
            _load_partition(partition, optimizer, manifest, reader)
        _load_the_rest(engine.module, partitions, reader)
        partitions.publish_weights()
    _restore_progress(engine, optimizer, manifest)
    return dict(manifest["client_state"])


def _require_between_steps(engine: Any, reason: str) -> None:
    if engine.micro_steps % engine.gradient_accumulation_steps():
        raise ValueError(f"inside a gradient accumulation window {reason}")


def _raise_everywhere(error: Exception | None) -> None:
    """Raise the first rank's error on every rank, if it has one; collective."""
    told = [error]
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise told[0]


def _manifest(engine: Any, optimizer: ZeroMuon, client_state: dict[str, Any] | None) -> dict[str, Any]:
    schedule = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    scaler = engine.optimizer.loss_scaler
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "written_by": {"zero_stage": optimizer.stage, "world_size": dist.get_world_size(), "torch": torch.__version__},
        "parameters": _described(engine, optimizer),
        "adam_steps": _adam_steps(optimizer),
        "progress": {name: getattr(engine, name) for name in _PROGRESS},
        "loss_scaler": {name: getattr(scaler, name) for name in _SCALER} if scaler.dynamic else None,
        "schedule": schedule,
        "learning_rates": {group["route"]: group["lr"] for group in optimizer.param_groups},
        "client_state": client_state or {},
    }
    try:
        return dict(json.loads(json.dumps(manifest)))
    except TypeError as error:
        raise ValueError(f"client_state or the schedule's state is not JSON: {error}") from error


def _described(engine: Any, optimizer: ZeroMuon) -> dict[str, Any]:
    """Say by name what each parameter is: what a checkpoint and the run that loads it must agree about."""
    routes = {entry.name: entry.route for entry in optimizer.routed}
    return {
        name: {"shape": list(full_shape(parameter)), "route": routes[name]}
        for name, parameter in engine.module.named_parameters()
    }


def _adam_steps(optimizer: ZeroMuon) -> dict[str, float]:
    partitions = optimizer.partitions
    return {
        partitions.names[parameter.index]: float(optimizer.state[partitions.flat(partition)]["step"])
        for partition in partitions.partitions
        if optimizer.group_of(partition)["route"] == "adamw"
        for parameter in partition.parameters
    }


def _whole_tensors(engine: Any, optimizer: ZeroMuon) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor, whole and on the CPU; collective, the same order on every rank."""
    partitions = optimizer.partitions
    for partition in partitions.partitions:
        for key, flat in _flat_tensors(partition, optimizer):
            for parameter in partition.parameters:
                whole = _gathered(partitions, parameter, flat).view(partitions.shapes[parameter.index])
                yield f"{key}/{partitions.names[parameter.index]}", whole.cpu()
    for name, frozen in _frozen(engine.module, partitions):
        yield f"frozen/{name}", _whole_frozen(frozen)
    for name, buffer in _persistent_buffers(engine.module):
        yield f"buffer/{name}", buffer.detach().cpu().clone().contiguous()


def _flat_tensors(partition: Partition, optimizer: ZeroMuon) -> list[tuple[str, Tensor]]:
    flat = optimizer.partitions.flat(partition)
    state = optimizer.state[flat]
    keys = _STATE_KEYS[optimizer.group_of(partition)["route"]]
    return [("master", flat.detach()), *((key, state[key]) for key in keys)]


def _gathered(partitions: ZeroPartitions, parameter: PlacedParameter, flat: Tensor) -> Tensor:
    """Put one parameter together from all ranks; meaningful on the first rank.

    The bits are summed as integers, of which all but one are zero: -0.0 and NaN come through unchanged.
    """
    whole = torch.zeros(parameter.numel, dtype=torch.float32, device=partitions.device)
    fragment = parameter.fragments[partitions.rank]
    if fragment.numel:
        whole.narrow(0, fragment.start, fragment.numel).copy_(flat.narrow(0, fragment.offset, fragment.numel))
    dist.reduce(whole.view(torch.int32), dst=0, group=partitions.process_group)
    return whole


def _frozen(module: nn.Module, partitions: ZeroPartitions) -> Iterator[tuple[str, nn.Parameter]]:
    """What no partition holds; a parameter that has since been frozen or unfrozen is still where it was."""
    for name, parameter in module.named_parameters():
        if name not in partitions.names:
            yield name, parameter


def _expected_shapes(engine: Any, optimizer: ZeroMuon) -> dict[str, list[int]]:
    """Name every tensor that a checkpoint of this run holds."""
    partitions = optimizer.partitions
    shapes = {
        f"{key}/{partitions.names[parameter.index]}": partitions.shapes[parameter.index]
        for partition in partitions.partitions
        for key, _ in _flat_tensors(partition, optimizer)
        for parameter in partition.parameters
    }
    shapes |= {f"frozen/{name}": full_shape(parameter) for name, parameter in _frozen(engine.module, partitions)}
    shapes |= {f"buffer/{name}": tuple(buffer.shape) for name, buffer in _persistent_buffers(engine.module)}
    return {key: list(shape) for key, shape in shapes.items()}


def _whole_frozen(parameter: nn.Parameter) -> Tensor:
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().cpu().clone().contiguous()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().cpu().clone().contiguous()


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


class _Writer:
    """Collects tensors into files beside the target, and moves the whole folder there at the end.

    An error is kept: the other ranks are inside collectives that this one must take part in.
    """

    def __init__(self, target: Path, file_bytes: int, manifest: Callable[[], dict[str, Any]]) -> None:
        self._target, self._file_bytes = target, file_bytes
        self._held: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}
        self._num_files = 0
        self.error: Exception | None = None
        try:
            self._partial = target.with_name(target.name + ".partial")
            self._manifest = manifest()
            if target.exists():
                raise ValueError(f"{target} exists already; a checkpoint never replaces another")
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        except Exception as error:  # Whatever it is: the other ranks wait for this one's word.
            self.error = error

    def add(self, key: str, tensor: Tensor) -> None:
        if self.error is not None:
            return
        self._held[key] = tensor
        if sum(held.numel() * held.element_size() for held in self._held.values()) >= self._file_bytes:
            self._write_held()

    def finish(self) -> Exception | None:
        """Complete the checkpoint and return what went wrong, if anything did."""
        if self.error is None:
            self._write_held()
        if self.error is None:
            try:
                text = json.dumps({**self._manifest, "tensors": self._files}, indent=1, sort_keys=True)
                (self._partial / MANIFEST).write_text(text)
                fsync_path(self._partial / MANIFEST)
                fsync_path(self._partial)
                self._partial.rename(self._target)
                fsync_path(self._target.parent)
            except OSError as error:
                self.error = error
        if self.error is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
        return self.error

    def _write_held(self) -> None:
        if not self._held:
            return
        self._num_files += 1
        name = f"tensors-{self._num_files:05}.safetensors"
        try:
            save_file(self._held, self._partial / name)
            fsync_path(self._partial / name)
        except Exception as error:  # safetensors wraps what the operating system says in an error of its own.
            self.error = OSError(f"cannot write {self._partial / name}: {error}")
        self._files.update(dict.fromkeys(self._held, name))
        self._held = {}


class _Reader:
    """Reads single tensors by key from a checkpoint's memory-mapped files."""

    def __init__(self, source: Path, manifest: dict[str, Any]) -> None:
        self._source, self._files = source, manifest["tensors"]
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "_Reader":
        for name in sorted(set(self._files.values())):
            try:
                self._open[name] = safe_open(self._source / name, framework="pt").__enter__()
            except Exception as error:
                raise CheckpointMismatch(str(self._source), f"{name} cannot be read: {error}") from error
        return self

    def __exit__(self, *reason: object) -> None:
        for file in self._open.values():
            file.__exit__(*reason)

    def shape(self, key: str) -> list[int] | None:
        """A tensor's shape; None if it is not in the file that is to hold it."""
        file = self._open[self._files[key]]
        return list(file.get_slice(key).get_shape()) if key in file.keys() else None  # noqa: SIM118

    def tensor(self, key: str) -> Tensor:
        return self._open[self._files[key]].get_tensor(key)


def _read_manifest(source: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((source / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointMismatch(str(source), f"{MANIFEST} cannot be read: {error}") from error
    found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else None
    if found != (FORMAT, VERSION):
        raise CheckpointMismatch(str(source), f"it is {found}, not {(FORMAT, VERSION)}")
    for field, kinds in _FIELDS.items():
        if not isinstance(manifest.get(field), kinds):
            raise CheckpointMismatch(str(source), f"{MANIFEST} says {field}={manifest.get(field)!r}")
    for field, names in (("progress", _PROGRESS), ("loss_scaler", _SCALER)):
        for name in names if manifest[field] is not None else ():
            if not isinstance(manifest[field].get(name), int | float):
                raise CheckpointMismatch(str(source), f"{MANIFEST} says {field}.{name}={manifest[field].get(name)!r}")
    return dict(manifest)


def _checked_manifest(source: Path, engine: Any, optimizer: ZeroMuon) -> dict[str, Any]:
    """Read the manifest and hold all that will be loaded against this run; a refusal by one rank is all ranks'."""
    manifest: dict[str, Any] = {}
    problem: CheckpointMismatch | None = None
    try:
        manifest = _read_manifest(source)
        _require_same_model(source, manifest, _described(engine, optimizer))
        _require_same_tensors(source, manifest, _expected_shapes(engine, optimizer))
        _require_same_progress(source, manifest, engine, optimizer)
    except CheckpointMismatch as error:
        problem = error
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if problem is None else problem.reason)
    for rank, reason in enumerate(said):
        if reason is not None:
            raise problem or CheckpointMismatch(str(source), f"rank {rank}: {reason}")
    return manifest


def _require_same_tensors(source: Path, manifest: dict[str, Any], ours: dict[str, list[int]]) -> None:
    with _Reader(source, manifest) as reader:
        for key in sorted(set(manifest["tensors"]) | set(ours)):
            there = reader.shape(key) if key in manifest["tensors"] else None
            if there != ours.get(key):
                raise CheckpointMismatch(
                    str(source), f"tensor {key} is {_shaped(there)} there and {_shaped(ours.get(key))} here"
                )


def _require_same_progress(source: Path, manifest: dict[str, Any], engine: Any, optimizer: ZeroMuon) -> None:
    needed = {"adam_steps": set(_adam_steps(optimizer)), "learning_rates": {g["route"] for g in optimizer.param_groups}}
    if manifest["schedule"] is not None and engine.lr_scheduler is not None:
        needed["schedule"] = set(engine.lr_scheduler.state_dict())
    for field, names in needed.items():
        for name in sorted(names - set(manifest[field])):
            raise CheckpointMismatch(str(source), f"{MANIFEST} says no {field}.{name}, which this run goes on from")


def _shaped(shape: list[int] | None) -> str:
    return "absent" if shape is None else f"of shape {shape}"


def _require_same_model(source: Path, manifest: dict[str, Any], ours: dict[str, Any]) -> None:
    theirs = manifest["parameters"]
    for name in sorted(set(theirs) | set(ours)):
        if theirs.get(name) != ours.get(name):
            raise CheckpointMismatch(
                str(source), f"parameter {name} is {_said(theirs.get(name))} there and {_said(ours.get(name))} here"
            )


def _said(parameter: dict[str, Any] | None) -> str:
    return "absent" if parameter is None else f"{parameter['route']} of shape {parameter['shape']}"


def _load_partition(partition: Partition, optimizer: ZeroMuon, manifest: dict[str, Any], reader: _Reader) -> None:
    rank, names = optimizer.partitions.rank, optimizer.partitions.names
    for key, flat in _flat_tensors(partition, optimizer):
        for parameter in partition.parameters:
            fragment = parameter.fragments[rank]
            if fragment.numel:
                whole = reader.tensor(f"{key}/{names[parameter.index]}").view(-1)
                piece = whole.narrow(0, fragment.start, fragment.numel)
                flat.narrow(0, fragment.offset, fragment.numel).copy_(piece)
    if optimizer.group_of(partition)["route"] == "adamw":
        steps = {manifest["adam_steps"][names[parameter.index]] for parameter in partition.parameters}
        assert len(steps) == 1, "AdamW steps all of its parameters together"
        optimizer.state[optimizer.partitions.flat(partition)]["step"].fill_(steps.pop())


def _load_the_rest(module: nn.Module, partitions: ZeroPartitions, reader: _Reader) -> None:
    for name, parameter in _frozen(module, partitions):
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if dist.get_rank() == 0:
                    parameter.copy_(reader.tensor(f"frozen/{name}"))
        else:
            parameter.copy_(reader.tensor(f"frozen/{name}"))
    for name, buffer in _persistent_buffers(module):
        buffer.copy_(reader.tensor(f"buffer/{name}"))


def _restore_progress(engine: Any, optimizer: ZeroMuon, manifest: dict[str, Any]) -> None:
    for name in _PROGRESS:
        setattr(engine, name, manifest["progress"][name])
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    scaler = engine.optimizer.loss_scaler
    # A static scale is a setting, and settings are this run's.
    if manifest["loss_scaler"] is not None and scaler.dynamic:
        for name in _SCALER:
            setattr(scaler, name, manifest["loss_scaler"][name])
    if manifest["schedule"] is not None and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(_as_held(engine.lr_scheduler.state_dict(), manifest["schedule"]))
        for group in optimizer.param_groups:
            group["lr"] = manifest["learning_rates"][group["route"]]


def _as_held(own: Any, loaded: Any) -> Any:
    """Give a schedule's state the keys back that JSON made texts of: MultiStepLR counts its milestones by number."""
    if isinstance(own, dict) and isinstance(loaded, dict):
        if isinstance(own, Counter) or any(not isinstance(key, str) for key in own):
            numbered = {json.loads(key): value for key, value in loaded.items()}
            return Counter(numbered) if isinstance(own, Counter) else numbered
        return {key: _as_held(own.get(key), value) for key, value in loaded.items()}
    if isinstance(own, list | tuple) and isinstance(loaded, list):
        return [_as_held(*pair) for pair in zip(own, loaded, strict=True)] if len(own) == len(loaded) else loaded
    return loaded
