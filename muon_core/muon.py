"""Muon for plain torch, and the update that every Muon here shares.

One step, in order: momentum, Nesterov blend, orthogonalize, aspect scale, weight decay, learning rate. The functions
on top are that step's phases; `muon_core.zero` runs the same ones on shards.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from muon_core.kernels import Guard, device_has_kernels, shape_has_kernels
from muon_core.large_matrices import orthogonalize_large_
from muon_core.newton_schulz import (
    ITERATION_DTYPES,
    coefficient_schedule,
    default_iteration_dtype,
    goes_one_by_one,
    orthogonalize,
    takes_kernels,
)
from muon_core.parameters import MatrixShape, matrix_shape


def blend_momentum_(gradient: Tensor, momentum_buffer: Tensor, *, momentum: float, nesterov: bool) -> Tensor:
    """Move the momentum by a gradient and leave the direction to orthogonalize in the gradient's own storage.

    Elementwise: a shard of a matrix can be blended without the rest of it.
    """
    if device_has_kernels(gradient.device):
        from muon_core.kernels import flat

        if flat.takes_flat(gradient, momentum_buffer):
            return flat.blend_momentum_(gradient, momentum_buffer, momentum=momentum, nesterov=nesterov)
    momentum_buffer.lerp_(gradient, 1 - momentum)
    return gradient.lerp_(momentum_buffer, momentum) if nesterov else gradient.copy_(momentum_buffer)


def orthogonalize_directions_(
    directions: Sequence[Tensor],
    shapes: Sequence[MatrixShape],
    *,
    ns_method: str,
    ns_steps: int,
    iteration_dtype: torch.dtype | None = None,
    max_elements: int = 1 << 25,
) -> None:
    """Turn blended directions into Muon's updates, in place; same-shape matrices go through in one batch.

    Args:
        directions: contiguous, any shape that holds `shapes[i].numel` elements.
        shapes: how each is viewed.
        max_elements: the largest batch: what is held besides the directions. The kernels have their own bound.
    """
    pieces, blocks = split_into_blocks(directions, shapes)
    if not pieces:
        return
    dtype = iteration_dtype or default_iteration_dtype(pieces[0].device)
    if takes_kernels(pieces[0], dtype):
        pieces, blocks = _orthogonalize_on_kernels_(pieces, blocks, ns_method, ns_steps, dtype)
    pieces, blocks = _orthogonalize_one_by_one_(pieces, blocks, ns_method, ns_steps, dtype)
    for positions in batches_of_equal_shape(blocks, max_elements):
        shape = blocks[positions[0]]
        views = [pieces[i].view(blocks[i].batch, shape.rows, shape.cols) for i in positions]
        stacked = torch.cat(views) if len(views) > 1 else views[0]
        updates = orthogonalize(stacked, ns_method=ns_method, ns_steps=ns_steps, iteration_dtype=dtype)
        if shape.aspect_scale != 1.0:
            updates.mul_(shape.aspect_scale)
        for view, update in zip(views, updates.split([view.size(0) for view in views]), strict=True):
            view.copy_(update)


def split_into_blocks(
    tensors: Sequence[Tensor], shapes: Sequence[MatrixShape]
) -> tuple[list[Tensor], list[MatrixShape]]:
    """Cut contiguous tensors into the pieces that are orthogonalized on their own, and say each one's shape."""
    pieces: list[Tensor] = []
    blocks: list[MatrixShape] = []
    for tensor, whole in zip(tensors, shapes, strict=True):
        if whole.row_splits:
            blocks += whole.blocks
            pieces += tensor.view(-1).split([block.numel for block in whole.blocks])
        else:
            blocks.append(whole)
            pieces.append(tensor)
    return pieces, blocks


def _orthogonalize_on_kernels_(
    pieces: Sequence[Tensor],
    blocks: Sequence[MatrixShape],
    ns_method: str,
    ns_steps: int,
    dtype: torch.dtype,
) -> tuple[list[Tensor], list[MatrixShape]]:
    """Orthogonalize in place what the kernels take; return the rest."""
    from muon_core.kernels.orthogonalize import step_matrices_

    mine = [i for i, block in enumerate(blocks) if block.numel and shape_has_kernels(block.rows, block.cols)]
    rest = sorted(set(range(len(blocks))) - set(mine))
    if mine:
        step_matrices_(
            [pieces[i] for i in mine],
            [blocks[i] for i in mine],
            [blocks[i].aspect_scale for i in mine],
            ns_method=ns_method,
            schedule=coefficient_schedule(ns_method, ns_steps),
            dtype=dtype,
        )
    return [pieces[i] for i in rest], [blocks[i] for i in rest]


def _orthogonalize_one_by_one_(
    pieces: Sequence[Tensor], blocks: Sequence[MatrixShape], ns_method: str, ns_steps: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[MatrixShape]]:
    """Orthogonalize in place what is large on a CPU; return the rest."""
    mine = [
        i for i, block in enumerate(blocks) if block.numel and goes_one_by_one(pieces[i], dtype, block.rows, block.cols)
    ]
    rest = sorted(set(range(len(blocks))) - set(mine))
    views = [view for i in mine for view in pieces[i].view(blocks[i].batch, blocks[i].rows, blocks[i].cols)]
    scales = [blocks[i].aspect_scale for i in mine for _ in range(blocks[i].batch)]
    schedule = coefficient_schedule(ns_method, ns_steps)
    orthogonalize_large_(views, views, scales, ns_method=ns_method, schedule=schedule)
    return [pieces[i] for i in rest], [blocks[i] for i in rest]


def batches_of_equal_shape(shapes: Sequence[MatrixShape], max_elements: int) -> Iterator[list[int]]:
    """Yield positions whose matrices share rows and columns, at most `max_elements` a batch but always at least one."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for position, shape in enumerate(shapes):
        by_shape.setdefault((shape.rows, shape.cols), []).append(position)
    for positions in by_shape.values():
        batch: list[int] = []
        elements = 0
        for position in positions:
            if batch and elements + shapes[position].numel > max_elements:
                yield batch
                batch, elements = [], 0
            batch.append(position)
            elements += shapes[position].numel
        yield batch


def apply_update_(weight: Tensor, update: Tensor, *, lr: float | Tensor, weight_decay: float) -> None:
    """Decoupled weight decay, then the step."""
    weight.mul_(1 - lr * weight_decay)
    if isinstance(lr, Tensor):
        weight.sub_(update.view_as(weight) * lr)
    else:
        weight.add_(update.view_as(weight), alpha=-lr)


def apply_measured_update_(weight: Tensor, update: Tensor, *, lr: float, weight_decay: float) -> Tensor:
    """`apply_update_` on float32 tensors; return the update's squared norm."""
    if device_has_kernels(weight.device):
        from muon_core.kernels import flat

        if flat.takes_flat(weight, update):
            return flat.apply_update_(weight, update, lr=lr, weight_decay=weight_decay)
    norm_squared = torch.linalg.vector_norm(update).square()
    apply_update_(weight, update, lr=lr, weight_decay=weight_decay)
    return norm_squared


def adamw_step_(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    *,
    skip: Tensor | None = None,
) -> None:
    """One AdamW step by torch's own arithmetic, so that it equals `torch.optim.AdamW` to the last bit.

    Args:
        skip: on the device; where it is not zero nothing moves, the count of steps included. It takes torch's fused
            kernel, whose rounding is its own.
    """
    if not state:
        state.update(new_adamw_state(weight))
    if skip is not None and state["step"].device != weight.device:
        state["step"] = state["step"].to(weight.device)
    beta1, beta2 = group["betas"]
    adamw(
        [weight],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        foreach=False,
        fused=skip is not None,
        # Without dimensions, as the count of steps is.
        found_inf=None if skip is None else skip.squeeze(),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def new_adamw_state(weight: Tensor) -> dict[str, Any]:
    """Zero moments, and a step count: on the CPU, where torch reads it without a device synchronization."""
    # Whatever the script's default dtype is: bfloat16 counts to 256 and no further.
    step = torch.zeros((), dtype=torch.float32, device="cpu")
    return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}


class Muon(torch.optim.Optimizer):
    """Muon on whole matrices; groups with `route: "adamw"` take AdamW's step instead.

    Works under `torch.amp.GradScaler`: no overflowed step reaches the momentum. On a GPU neither the scaler's verdict
    nor `skip_nonfinite`'s is read by the host: a step to be discarded runs and writes nothing, and a whole step can be
    captured in a CUDA graph (after one step that makes the state, with gradients that stay in place).

    Args:
        params: matrices, or groups as `build_param_groups` makes them: three dimensions are then told apart by module,
            where a bare tensor of three is a stack of matrices.
        lr: learning rate; an update has singular values near `sqrt(max(1, rows / cols))` before it. A tensor on the
            parameters' device can change under a captured step.
        momentum: of the gradient's running mean.
        weight_decay: decoupled.
        nesterov: blend the gradient into the momentum once more before orthogonalizing.
        ns_method, ns_steps, iteration_dtype: as for `orthogonalize`.
        skip_nonfinite: discard a step in which any gradient, of any group, has a non-finite element. Without it, and
            without a scaler, such a gradient is for the caller to find.

    Raises:
        ValueError: a setting out of range, a group of an unknown route, or a vector for Muon; the optimizer is then as
            it was.
    """

    # GradScaler then hands its verdict and scale over as device tensors, and always calls `step`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        ns_method: str = "gram",
        ns_steps: int = 5,
        iteration_dtype: torch.dtype | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "ns_method": ns_method,
            "ns_steps": ns_steps,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "route": "muon",
            "matrices": None,
        }
        _validate_group(defaults)
        validate_iteration_dtype(iteration_dtype)
        super().__init__(params, defaults)
        self.iteration_dtype = iteration_dtype
        self.skip_nonfinite = skip_nonfinite
        self.ns_calls = 0
        """Parameters orthogonalized so far; on a GPU those of discarded steps among them."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _validate_group(group)
            if group["route"] == "muon" and group["matrices"] is None:
                for parameter in group["params"]:
                    if parameter.ndim < 2:
                        raise ValueError(f"Muon takes matrices; shape {tuple(parameter.shape)} belongs to AdamW")
                group["matrices"] = [matrix_shape(parameter) for parameter in group["params"]]
        except ValueError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Torch's, without `matrices`: how a parameter is viewed belongs to the model, and is no plain data."""
        state = super().state_dict()
        for group in state["param_groups"]:
            group.pop("matrices", None)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch's; parameters stay viewed as they are here."""
        matrices = [group["matrices"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, matrices, strict=True):
            group["matrices"] = own

    def __getstate__(self) -> dict[str, Any]:
        """What torch copies and pickles, and our own settings."""
        own = ("iteration_dtype", "skip_nonfinite", "ns_calls")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_sparse_gradients()
        guard = self._guard()
        if guard.flag is not None and guard.flag.device.type == "cpu":
            if guard.flag.item():
                return loss
            guard = Guard(None, guard.gradient_scale)
        for group in self.param_groups:
            members = [
                (parameter, matrices)
                for parameter, matrices in zip(
                    group["params"], group["matrices"] or [None] * len(group["params"]), strict=True
                )
                if parameter.grad is not None
            ]
            if group["route"] == "muon":
                # A batch is one tensor: what lies elsewhere or is held in another dtype makes batches of its own.
                kinds = dict.fromkeys((parameter.device, parameter.dtype) for parameter, _ in members)
                for device, dtype in kinds:
                    alike = [member for member in members if (member[0].device, member[0].dtype) == (device, dtype)]
                    self._muon_step(group, alike, guard.on(device))
            else:
                for parameter, _ in members:
                    self._adamw_step(parameter, group, guard.on(parameter.device))
        return loss

    def _refuse_sparse_gradients(self) -> None:
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and gradient.layout != torch.strided:
                    raise ValueError(
                        f"a parameter of shape {tuple(parameter.shape)} in group {number} has a {gradient.layout} "
                        "gradient; Muon and AdamW take dense ones: build its embedding with sparse=False, or give it "
                        "to torch.optim.SparseAdam"
                    )

    def _guard(self) -> Guard:
        """What says whether this step is to be discarded, and what the gradients are multiplied by."""
        found_inf = getattr(self, "found_inf", None)
        # Where no parameter has a gradient, GradScaler says 0, and not as a tensor.
        flag: Tensor | None = found_inf if isinstance(found_inf, Tensor) else None
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if self.skip_nonfinite:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            found = nonfinite_flag(gradients)
            flag = found if flag is None or found is None else torch.maximum(found, flag.view(1).to(found.device))
        if scale is not None:
            # As GradScaler's own unscaling rounds it.
            scale = scale.double().reciprocal().float().view(1)
        return Guard(None if flag is None else flag.view(1), scale)

    def _muon_step(
        self, group: dict[str, Any], members: Sequence[tuple[nn.Parameter, MatrixShape]], guard: Guard
    ) -> None:
        for parameter, _ in members:
            if "momentum_buffer" not in self.state[parameter]:
                buffer = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                self.state[parameter]["momentum_buffer"] = buffer
        self.ns_calls += len(members)
        rest = self._fused_step(group, members, guard)
        directions = []
        for parameter, _ in rest:
            assert parameter.grad is not None
            # A copy: the caller's gradient stays as it is.
            gradient = parameter.grad.clone(memory_format=torch.contiguous_format)
            if guard.gradient_scale is not None:
                gradient.mul_(guard.gradient_scale)
            buffer = self.state[parameter]["momentum_buffer"]
            moved = buffer if guard.flag is None else buffer.clone()
            blend_momentum_(gradient, moved, momentum=group["momentum"], nesterov=group["nesterov"])
            _keep_where(guard.flag, buffer, moved)
            directions.append(gradient)
        orthogonalize_directions_(
            directions,
            [matrices for _, matrices in rest],
            ns_method=group["ns_method"],
            ns_steps=group["ns_steps"],
            iteration_dtype=self.iteration_dtype,
        )
        for (parameter, _), update in zip(rest, directions, strict=True):
            weight = parameter if guard.flag is None else parameter.clone()
            apply_update_(weight, update, lr=group["lr"], weight_decay=group["weight_decay"])
            _keep_where(guard.flag, parameter, weight)

    def _fused_step(
        self, group: dict[str, Any], members: Sequence[tuple[nn.Parameter, MatrixShape]], guard: Guard
    ) -> list[tuple[nn.Parameter, MatrixShape]]:
        """Step on the kernels what they take, all of it in a few launches; return the rest."""
        if not members or not takes_kernels(
            members[0][0], self.iteration_dtype or default_iteration_dtype(members[0][0].device)
        ):
            return list(members)
        mine = [member for member in members if self._is_fusible(*member)]
        if not mine:
            return list(members)
        from muon_core.kernels.orthogonalize import Momentum, WeightUpdate, step_matrices_

        shapes = [matrices for _, matrices in mine]
        gradients, blocks = split_into_blocks([parameter.grad for parameter, _ in mine], shapes)  # type: ignore[misc]
        buffers, _ = split_into_blocks([self.state[parameter]["momentum_buffer"] for parameter, _ in mine], shapes)
        weights, _ = split_into_blocks([parameter.data for parameter, _ in mine], shapes)
        step_matrices_(
            gradients,
            blocks,
            [block.aspect_scale for block in blocks],
            ns_method=group["ns_method"],
            schedule=coefficient_schedule(group["ns_method"], group["ns_steps"]),
            dtype=self.iteration_dtype or default_iteration_dtype(gradients[0].device),
            momentum=Momentum(buffers, group["momentum"], group["nesterov"]),
            update=WeightUpdate(weights, group["lr"], group["weight_decay"]),
            guard=guard,
        )
        taken = {id(parameter) for parameter, _ in mine}
        return [member for member in members if id(member[0]) not in taken]

    def _is_fusible(self, parameter: nn.Parameter, matrices: MatrixShape) -> bool:
        tensors = (parameter, parameter.grad, self.state[parameter]["momentum_buffer"])
        return all(t is not None and t.dtype == torch.float32 and t.is_contiguous() for t in tensors) and all(
            block.numel > 0 and shape_has_kernels(block.rows, block.cols) for block in matrices.blocks
        )

    def _adamw_step(self, parameter: nn.Parameter, group: dict[str, Any], guard: Guard) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad if guard.gradient_scale is None else parameter.grad * guard.gradient_scale
        adamw_step_(parameter, gradient, self.state[parameter], group, skip=guard.flag)


def nonfinite_flag(gradients: Sequence[Tensor]) -> Tensor | None:
    """Return 1.0 on the gradients' device if any of their elements is not finite, else 0.0; None if there are none."""
    if not gradients:
        return None
    device = gradients[0].device
    flag = torch.zeros(1, dtype=torch.float32, device=device)
    has_kernels = device_has_kernels(device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if has_kernels and gradient.device == device and gradient.is_contiguous():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        else:
            is_bad = gradient.isfinite().all().logical_not()
            flag = torch.maximum(flag, is_bad.to(device, torch.float32))
    for of_dtype in by_dtype.values():
        from muon_core.kernels.orthogonalize import find_nonfinite_

        find_nonfinite_(of_dtype, flag)
    return flag


def _keep_where(flag: Tensor | None, tensor: Tensor, moved: Tensor) -> None:
    """Write what has moved, unless the flag, which the host does not read, says that the step is discarded."""
    if flag is not None:
        tensor.copy_(torch.where(flag != 0, tensor, moved))


def validate_settings(
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> None:
    """Raise ValueError for settings no run can mean."""
    if not 0 <= lr < float("inf"):
        raise ValueError(f"lr={lr} must be finite and not negative")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must be at least 0 and below 1")
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay={weight_decay} must be finite and not negative")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas} must be two numbers of at least 0 and below 1")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps={eps} must be finite and not negative")


def validate_iteration_dtype(iteration_dtype: torch.dtype | None) -> None:
    if iteration_dtype not in (None, *ITERATION_DTYPES):
        raise ValueError(f"iteration_dtype={iteration_dtype} is none of {', '.join(map(str, ITERATION_DTYPES))}")


def _validate_group(group: dict[str, Any]) -> None:
    if group["route"] not in ("muon", "adamw"):
        raise ValueError(f"route={group['route']!r} is unknown; choose muon or adamw")
    settings = {name: group[name] for name in ("momentum", "weight_decay", "betas", "eps")}
    validate_settings(lr=float(group["lr"]), **settings)
    coefficient_schedule(group["ns_method"], group["ns_steps"])
