"""Environment variables that must be set before torch or DeepSpeed is imported, and what of them a run records.

Set in the process, not through Ray's runtime_env: that costs a round trip to an agent and a fresh worker process.
"""

import ctypes
import hashlib
import ipaddress
import os
import stat
import sys
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

# Variables that change the code path or the numbers; their values are part of a run's recorded environment.
RECORDED: Final = (
    "CUDA_VISIBLE_DEVICES",
    "DS_ACCELERATOR",
    "LOCAL_RANK",
    "MUON_CORE_CPU_DTYPE",
    "MUON_CORE_KERNELS",
    "NCCL_HOSTID",
    "OMP_NUM_THREADS",
    "TORCHDYNAMO_DISABLE",
    "TORCH_EXTENSIONS_DIR",
)


def has_gpu_driver() -> bool:
    """Whether this machine can have a CUDA device at all, without importing torch."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def prepare_environment(environment: MutableMapping[str, str] = os.environ, *, has_gpu: bool | None = None) -> None:
    """Fill in what torch and DeepSpeed read at import; what the user set stays.

    Args:
        environment: changed in place.
        has_gpu: whether to prepare for CUDA; None looks.
    """
    environment.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_folder()))
    if has_gpu_driver() if has_gpu is None else has_gpu:
        return
    environment.setdefault("DS_ACCELERATOR", "cpu")
    # Importing and arming the compiler costs seconds of start-up and speeds nothing up here.
    environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    environment.setdefault("OMP_NUM_THREADS", "1")


def use_card_of(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo and NCCL meet on the network card that has the node's address in Ray; what the user set stays.

    Left alone, gloo takes the card that the host's name leads to, which on many machines is loopback, and NCCL any that
    is no loopback: neither need be one that the other nodes reach.

    Args:
        address: the node's, by which the others know it.
        environment: changed in place.
    """
    # Idle workers import this module, and need no more than its variables.
    import psutil

    cards = psutil.net_if_addrs().items()
    # A link-local IPv6 address names its card after a %.
    card = next((name for name, found in cards if address in {each.address.split("%")[0] for each in found}), None)
    if card is None:
        return
    environment.setdefault("GLOO_SOCKET_IFNAME", card)
    if not ipaddress.ip_address(address).is_loopback:
        # NCCL takes what it is told for a beginning, unless it is said that it is the whole name.
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={card}")


def keep_compiler_unloaded() -> None:
    """Let optimizers be built without importing torch's compiler, where TORCHDYNAMO_DISABLE=1 says that it is off.

    Torch marks some functions as not to be compiled, DeepSpeed asks for others to be compiled, and the first of either
    imports the compiler: three seconds of processor time for each rank. With the compiler off both mean "as it is",
    which is what they become here. Call it after `import torch`.
    """
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        return
    import torch

    for method in vars(torch.optim.Optimizer).values():
        marker = getattr(method, "__code__", None)
        if marker is not None and marker.co_filename == torch._compile.__file__:
            method.__wrapped__.__dynamo_disable = method.__wrapped__
    torch.compile = torch.compiler.disable = _as_it_is  # type: ignore[assignment]


def _as_it_is(fn: Any = None, *_: Any, **__: Any) -> Any:
    return fn if fn is not None else _as_it_is


def extensions_folder() -> Path:
    """Return where this user's and this Python environment's C++ extensions are built.

    DeepSpeed's builds lock the folder: one of our own holds no stale lock, nor an extension, of somebody else's.
    """
    python = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return user_folder() / "torch_extensions" / python


def user_folder_path() -> Path:
    """Return where `user_folder` is, or will be; whoever only looks makes none."""
    return Path(tempfile.gettempdir()) / f"muonscope-{os.getuid()}"


def user_folder() -> Path:
    """Return this user's folder for what a node keeps: sockets, spools, built code. Nobody else may write there.

    Its name is known beforehand in a folder where everybody may write: whoever made it first could put other code
    and other sockets under ours.

    Raises:
        PermissionError: it is another user's, or no folder.
    """
    folder = user_folder_path()
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(
            f"{folder} belongs to another user or is no folder: remove it, or set TMPDIR to a folder of your own"
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def recorded_environment(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Return the recorded variables that are set."""
    return {name: environment[name] for name in RECORDED if name in environment}
