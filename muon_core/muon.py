"""Muon for plain torch, and the update that every Muon here shares.

One step, in order: momentum, Nesterov blend, orthogonalize, aspect scale, weight decay, learning rate. The functions
on top are that step's phases; `muon_core.zero` runs the same ones on shards.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from muon_core.newton_schulz import coefficient_schedule, orthogonalize
from muon_core.parameters import MatrixShape, matrix_shape


def blend_momentum_(gradient: Tensor, momentum_buffer: Tensor, *, momentum: float, nesterov: bool) -> Tensor:
    """Move the momentum by a gradient and leave the direction to orthogonalize in the gradient's own storage.

    Elementwise: a shard of a matrix can be blended without the rest of it.
    """
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
        max_elements: the largest batch: what is held besides the directions.
    """
    pieces: list[Tensor] = []
    blocks: list[MatrixShape] = []
    for direction, whole in zip(directions, shapes, strict=True):
        blocks += whole.blocks
        pieces += direction.view(-1).split([block.numel for block in whole.blocks])
    for positions in batches_of_equal_shape(blocks, max_elements):
        shape = blocks[positions[0]]
        views = [pieces[i].view(blocks[i].batch, shape.rows, shape.cols) for i in positions]
        stacked = torch.cat(views) if len(views) > 1 else views[0]
        updates = orthogonalize(stacked, ns_method=ns_method, ns_steps=ns_steps, iteration_dtype=iteration_dtype)
        if shape.aspect_scale != 1.0:
            updates.mul_(shape.aspect_scale)
        for view, update in zip(views, updates.split([view.size(0) for view in views]), strict=True):
            view.copy_(update)


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


def apply_update_(weight: Tensor, update: Tensor, *, lr: float, weight_decay: float) -> None:
    """Decoupled weight decay, then the step."""
    weight.mul_(1 - lr * weight_decay).add_(update.view_as(weight), alpha=-lr)


def adamw_step_(weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One AdamW step by torch's own arithmetic, so that it equals `torch.optim.AdamW` to the last bit."""
    if not state:
        state.update(new_adamw_state(weight))
    beta1, beta2 = group["betas"]
    adamw(
        [weight],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        foreach=False,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def new_adamw_state(weight: Tensor) -> dict[str, Any]:
    """Zero moments; the step count stays on the CPU, where torch reads it without a device synchronization."""
    return {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}


class Muon(torch.optim.Optimizer):
    """Muon on whole matrices; groups with `route: "adamw"` take AdamW's step instead.

    Works under `torch.amp.GradScaler`: an overflowed step never calls `step`, so the momentum cannot absorb it.

    Args:
        params: matrices, or groups as `build_param_groups` makes them.
        lr: learning rate; an update has singular values near `sqrt(max(1, rows / cols))` before it.
        momentum: of the gradient's running mean.
        weight_decay: decoupled.
        nesterov: blend the gradient into the momentum once more before orthogonalizing.
        ns_method, ns_steps, iteration_dtype: as for `orthogonalize`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        ns_method: str = "gram",
        ns_steps: int = 5,
        iteration_dtype: torch.dtype | None = None,
    ) -> None:
        validate_settings(lr=lr, momentum=momentum, weight_decay=weight_decay)
        coefficient_schedule(ns_method, ns_steps)
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
        super().__init__(params, defaults)
        self.iteration_dtype = iteration_dtype
        self.ns_calls = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["route"] == "muon" and group["matrices"] is None:
            for parameter in group["params"]:
                if parameter.ndim < 2:
                    raise ValueError(f"Muon takes matrices; shape {tuple(parameter.shape)} belongs to AdamW")
            group["matrices"] = [matrix_shape(parameter) for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["route"] == "muon":
                self._muon_step(group)
            else:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        adamw_step_(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def _muon_step(self, group: dict[str, Any]) -> None:
        members: list[nn.Parameter] = []
        directions: list[Tensor] = []
        shapes: list[MatrixShape] = []
        for parameter, matrices in zip(group["params"], group["matrices"], strict=True):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            # A copy: the caller's gradient stays as it is.
            gradient = parameter.grad.clone(memory_format=torch.contiguous_format)
            blend_momentum_(gradient, state["momentum_buffer"], momentum=group["momentum"], nesterov=group["nesterov"])
            members.append(parameter)
            directions.append(gradient)
            shapes.append(matrices)
        orthogonalize_directions_(
            directions,
            shapes,
            ns_method=group["ns_method"],
            ns_steps=group["ns_steps"],
            iteration_dtype=self.iteration_dtype,
        )
        self.ns_calls += len(directions)
        for parameter, update in zip(members, directions, strict=True):
            apply_update_(parameter, update, lr=group["lr"], weight_decay=group["weight_decay"])


def validate_settings(*, lr: float, momentum: float, weight_decay: float) -> None:
    """Raise ValueError for settings no run can mean."""
    if not 0 <= lr < float("inf"):
        raise ValueError(f"lr={lr} must be finite and not negative")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must be at least 0 and below 1")
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay={weight_decay} must be finite and not negative")
