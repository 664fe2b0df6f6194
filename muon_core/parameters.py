"""Which parameters Muon takes, which AdamW, which neither, and why.

Routing is by rule, each decision with its reason, and a name pattern overrides any rule.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

logger = logging.getLogger(__name__)

Route = Literal["muon", "adamw", "frozen"]

# DeepSpeed's own name rules, so that a model is routed alike by both implementations.
ADAMW_NAME_PARTS: Final = ("embed", "lm_head")
# Attribute of an attention projection, read per parameter: orthogonalize each head on its own.
NUM_HEADS_ATTRIBUTE: Final = "muon_num_heads"
# Attribute of a fused projection (query, key and value in one matrix): the rows of each part, likewise on its own.
ROW_SPLITS_ATTRIBUTE: Final = "muon_row_splits"


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A parameter as Muon sees it: `batch` matrices of `rows` x `cols`, contiguous in its own layout.

    With `row_splits` each matrix is cut into blocks of that many rows, each orthogonalized on its own.
    """

    batch: int
    rows: int
    cols: int
    row_splits: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return self.batch * self.rows * self.cols

    @property
    def blocks(self) -> tuple["MatrixShape", ...]:
        """What is orthogonalized on its own, in the order of the elements."""
        if not self.row_splits:
            return (self,)
        assert self.batch == 1, "only a matrix is split"
        return tuple(MatrixShape(1, rows, self.cols) for rows in self.row_splits)

    @property
    def aspect_scale(self) -> float:
        """Gives a tall matrix's update the RMS of a square one's."""
        return math.sqrt(max(1.0, self.rows / self.cols)) if self.cols else 1.0


@dataclass(frozen=True, slots=True)
class Routed:
    """One parameter's route, and the rule that chose it.

    `index` is the parameter's position among the model's named parameters that require a gradient; frozen parameters
    are numbered after all of these.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    route: Route
    reason: str
    matrices: MatrixShape | None = None
    """How Muon views it; None for the other routes."""


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) by parameter index: those that require a gradient, in model order, tied ones once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return a parameter's own shape, also where ZeRO-3 has already emptied it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def route_parameters(model: nn.Module, *, muon: Sequence[str] = (), adamw: Sequence[str] = ()) -> list[Routed]:
    """Decide every parameter's route.

    Args:
        model: tied parameters are decided once, by all the modules that hold them.
        muon: name patterns (`*.head.weight`) that go to Muon whatever the rules say.
        adamw: name patterns that go to AdamW; they win over `muon`.
    Returns:
        One entry a parameter, in model order.
    Raises:
        ValueError: a pattern that sends fewer than two dimensions to Muon, or that matches no parameter.
    """
    named = list(model.named_parameters())
    _refuse_idle_patterns([*muon, *adamw], [name for name, _ in named])
    owners = _owning_modules(model)
    num_trainable = sum(parameter.requires_grad for _, parameter in named)
    routed, next_trainable, next_frozen = [], 0, num_trainable
    for name, parameter in named:
        if parameter.requires_grad:
            index, next_trainable = next_trainable, next_trainable + 1
        else:
            index, next_frozen = next_frozen, next_frozen + 1
        modules = owners.get(id(parameter), [])
        route, reason = _decide_route(name, parameter, modules, muon, adamw)
        matrices = matrix_shape(parameter, modules) if route == "muon" else None
        routed.append(Routed(index, name, full_shape(parameter), route, reason, matrices))
    if not any(entry.route == "muon" for entry in routed):
        logger.warning("no parameter is routed to Muon: AdamW alone will train this model")
    return routed


def matrix_shape(parameter: nn.Parameter, modules: Sequence[nn.Module] = ()) -> MatrixShape:
    """Say how Muon views a parameter of two or more dimensions.

    Convolutions flatten to (out, in * kernel), transposed ones to (in, out * kernel), each in its own layout; other
    tensors of three dimensions are a batch (expert stacks); a parameter tagged with `muon_num_heads` is a batch of its
    heads, one tagged with `muon_row_splits` its parts.

    Raises:
        ValueError: a tag that does not fit the shape, or both.
    """
    shape = full_shape(parameter)
    num_heads = getattr(parameter, NUM_HEADS_ATTRIBUTE, None)
    row_splits = getattr(parameter, ROW_SPLITS_ATTRIBUTE, None)
    if row_splits is not None:
        splits = tuple(int(rows) for rows in row_splits)
        if num_heads is not None or len(shape) != 2 or min(splits, default=0) < 1 or sum(splits) != shape[0]:
            raise ValueError(
                f"{ROW_SPLITS_ATTRIBUTE}={splits} must be positive, add up to the rows of shape {shape} and stand "
                f"without {NUM_HEADS_ATTRIBUTE}"
            )
        return MatrixShape(1, shape[0], shape[1], splits)
    if num_heads is not None:
        if len(shape) != 2 or not isinstance(num_heads, int) or num_heads < 1 or shape[0] % num_heads:
            raise ValueError(f"{NUM_HEADS_ATTRIBUTE}={num_heads} does not split the rows of shape {shape} evenly")
        return MatrixShape(num_heads, shape[0] // num_heads, shape[1])
    is_convolution = any(isinstance(module, _ConvNd) for module in modules)
    if len(shape) == 3 and not is_convolution:
        return MatrixShape(*shape)
    return MatrixShape(1, shape[0], math.prod(shape[1:]))


def build_param_groups(
    model: nn.Module, routed: Sequence[Routed], muon: Mapping[str, Any], adamw: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Make torch parameter groups of a routing: one for Muon, one for AdamW, empty ones left out.

    Raises:
        ValueError: nothing to train.
    """
    parameters = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for route, settings in (("muon", muon), ("adamw", adamw)):
        entries = [entry for entry in routed if entry.route == route]
        if entries:
            members = [parameters[entry.name] for entry in entries]
            matrices = [entry.matrices for entry in entries]
            groups.append({"params": members, "route": route, "matrices": matrices, **settings})
    if not groups:
        raise ValueError("the model has no trainable parameter; nothing to optimize")
    return groups


def _decide_route(
    name: str, parameter: nn.Parameter, modules: Sequence[nn.Module], muon: Sequence[str], adamw: Sequence[str]
) -> tuple[Route, str]:
    shape = full_shape(parameter)
    if not parameter.requires_grad:
        return "frozen", "requires no gradient"
    if not math.prod(shape):
        return "frozen", "has no elements"
    for pattern in adamw:
        if fnmatchcase(name, pattern):
            return "adamw", f"named by the pattern {pattern!r}"
    for pattern in muon:
        if fnmatchcase(name, pattern):
            if len(shape) < 2:
                raise ValueError(f"{name} has shape {shape}; the pattern {pattern!r} cannot send it to Muon")
            return "muon", f"named by the pattern {pattern!r}"
    if len(shape) < 2:
        return "adamw", "has fewer than two dimensions"
    if len(shape) > 2 and sum(size > 1 for size in shape) < 2:
        return "adamw", "has no two dimensions larger than one"
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in modules):
        return "adamw", "is an embedding"
    for part in ADAMW_NAME_PARTS:
        if part in name.lower():
            return "adamw", f"its name contains {part!r}"
    return "muon", "is a matrix" if len(shape) == 2 else "is a stack of matrices or a convolution"


def _owning_modules(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Map each parameter's id to the modules that hold it directly; a tied one has several.

    What a parametrization holds (`torch.nn.utils.parametrizations`) is its module's.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
        if is_parametrized(module):
            parametrizations = module.parametrizations
            assert isinstance(parametrizations, nn.ModuleDict)
            for originals in parametrizations.values():
                for parameter in originals.parameters(recurse=False):
                    owners.setdefault(id(parameter), []).append(module)
    return owners


def _refuse_idle_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"the pattern {pattern!r} matches no parameter; the first names are {list(names[:5])}")
