"""The drafter's matrix products: few, large, and with gradients that add up in fp32 without a second pass.

Master weights, gradients and the weights that products read lie in one flat tensor each. Then matrices with
the same input are one product (their rows lie side by side), the cast to the compute type is one kernel a
step instead of two a use, the gradients of all parameters are reduced and clipped as one tensor, and a weight
gradient is added to what earlier rows of the step left there by the product's own epilogue.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNMENT = 64  # elements: every product's weight starts on 128 bytes, as tensor cores and Triton like it


class Matrix(nn.Module):
    """A weight [out, in] and nothing else; Stack multiplies with it."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))


class Stack:
    """Matrices with the same input as one: x [n, in] -> [n, sum of their rows], in the type of x.

    Until `attach` has laid the matrices side by side the product reads the parameters themselves, whatever
    their type, and autograd does the rest.
    """

    def __init__(self, *matrices: Matrix) -> None:
        self.matrices = matrices
        self.weight: Tensor | None = None  # [rows, in] in the compute type
        self.gradient: Tensor | None = None  # [rows, in] fp32

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None or self.weight.dtype != x.dtype:
            weights = [m.weight.to(x.dtype) for m in self.matrices]
            return F.linear(x, weights[0] if len(weights) == 1 else torch.cat(weights))
        return _Product.apply(x, self.matrices[0].weight, self.weight, self.gradient)

    def parts(self, size: int) -> list[Stack]:
        """The same matrices in stacks of `size`, for products that need only those."""
        made = [Stack(*self.matrices[i : i + size]) for i in range(0, len(self.matrices), size)]
        if self.weight is not None and self.gradient is not None:
            start = 0
            for part in made:
                rows = slice(start, start + sum(len(m.weight) for m in part.matrices))
                part.weight, part.gradient = self.weight[rows], self.gradient[rows]
                start = rows.stop
        return made


class _Product(torch.autograd.Function):
    """x @ weight.T. The weight's gradient is added to `gradient` in backward: autograd never sees it.

    `master` only tells autograd that the result needs a gradient even where x does not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.gradient = weight, gradient
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        add_product(ctx.gradient, d_out.T, x)
        return d_out @ ctx.weight if ctx.needs_input_grad[0] else None, None, None, None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [m, n] fp32 += a [m, k] @ b [k, n], summed in fp32 whatever the type of a and b."""
    if b.dtype == torch.float32:
        total.addmm_(a, b)
    elif b.is_cuda and fused_accumulation(b.device):
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total.add_(a @ b)


@functools.cache
def fused_accumulation(device: torch.device) -> bool:
    """Whether this torch and GPU add a bf16 product to an fp32 matrix in one kernel (cuBLAS does), right.

    Otherwise the product is rounded to bf16 first and added by a second pass over all weights.
    """
    a, b = (torch.full(shape, 1.0, dtype=torch.bfloat16, device=device) for shape in ((64, 128), (128, 64)))
    total = torch.full((64, 64), 2.0**-10, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool((total == 128 + 2.0**-10).all())  # bf16 could not hold this sum


@dataclass(frozen=True)
class Storage:
    """All parameters of one drafter on its device, each kind in one flat tensor, in the same order.

    weights: fp32 masters; gradients: fp32, and every `parameter.grad` is a view of it; compute: what products
    read, `weights` itself where they run in fp32.
    """

    weights: Tensor
    gradients: Tensor
    compute: Tensor

    def refresh(self) -> None:
        """After the masters changed: cast them for the products."""
        if self.compute is not self.weights:
            self.compute.copy_(self.weights)


def attach(
    stacks: Sequence[Stack], others: Sequence[nn.Parameter], device: torch.device, dtype: torch.dtype
) -> Storage:
    """Move all parameters into flat tensors on `device`, from wherever they are; products run in `dtype`.

    The module must not be moved or cast afterwards; copying values into its parameters is fine, with a
    `refresh`.
    """
    groups: list[tuple[Stack | None, list[nn.Parameter]]]
    groups = [*((s, [m.weight for m in s.matrices]) for s in stacks), *((None, [p]) for p in others)]
    starts = [0]
    for _, parameters in groups:
        size = sum(p.numel() for p in parameters)
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    weights = torch.zeros(starts[-1], device=device)
    gradients = torch.zeros(starts[-1], device=device)
    compute = weights if dtype == torch.float32 else torch.empty(starts[-1], device=device, dtype=dtype)
    for start, (stack, parameters) in zip(starts, groups, strict=False):
        at = start
        for parameter in parameters:
            part = slice(at, at + parameter.numel())
            weights[part].copy_(parameter.detach().flatten())
            parameter.data = weights[part].view(parameter.shape)
            parameter.grad = gradients[part].view(parameter.shape)
            at = part.stop
        if stack is not None:
            shape = (-1, parameters[0].shape[1])
            stack.weight = compute[start:at].view(shape)
            stack.gradient = gradients[start:at].view(shape)
    storage = Storage(weights, gradients, compute)
    storage.refresh()
    return storage
