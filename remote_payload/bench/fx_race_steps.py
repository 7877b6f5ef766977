"""What one process of `bench.fx_race` does: threads compile, call, differentiate; eager is the judge."""

from __future__ import annotations

import logging
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
import torch._inductor.lowering  # a second of imports that the first compile would do
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex

from trainer import fx_threads

HEADS, HEAD_DIM, WIDTH = 2, 16, 32
CALLS = 8  # of the model a step: a training step calls many compiled functions, most of them compiled before
NO_LIMIT, LOW_LIMIT = 10_000, 2  # versions of a code object before Dynamo stops compiling it


@dataclass(frozen=True)
class Plan:
    """One process: `scenario` is default, dense-fallback or make-fx; `fix` is full or none."""

    scenario: str
    fix: str
    backend: str
    threads: int
    steps: int
    lengths: int
    seed: int
    device: str  # cpu or cuda


@dataclass
class Outcome:
    """What one process saw. `errors` counts kinds; `difference` is the largest relative one to eager."""

    steps: int = 0
    failed_steps: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    difference: float = 0.0
    graphs: int = 0
    stuck: bool = False
    seconds: float = 0.0
    torch: str = torch.__version__
    device: str = ""
    report: dict[str, Any] = field(default_factory=dict)


def run(plan: Plan) -> Outcome:
    """Run the plan in this process, which must be fresh. Errors of steps are counted, never raised."""
    logging.disable()  # Dynamo logs each error that is counted here,
    warnings.simplefilter("ignore")  # and flex_attention warns that it runs dense
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    device = torch.device(plan.device)
    outcome = Outcome(device="cpu" if plan.device == "cpu" else torch.cuda.get_device_name())
    if plan.fix == "full":
        outcome.report = fx_threads.install()
    limit = LOW_LIMIT if plan.scenario == "dense-fallback" else NO_LIMIT
    fx_threads.set_dynamo_limits(limit, fail_on_hit=False)
    if plan.device == "cpu":
        flex._validate_device = lambda *_: None  # "no backward on CPU" is about inductor; aot_eager has one

    workers = [_Worker(plan, number, device) for number in range(plan.threads)]
    began = time.perf_counter()
    gate = threading.Barrier(plan.threads)
    threads = [threading.Thread(target=worker.work, args=(gate,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.seconds = time.perf_counter() - began
    for worker in workers:
        outcome.steps += plan.steps
        outcome.failed_steps += worker.failed_steps
        outcome.difference = max(outcome.difference, worker.difference)
    outcome.errors = dict(sum((worker.errors for worker in workers), Counter()))
    outcome.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    outcome.stuck = not _still_works()
    return outcome


def _still_works() -> bool:
    """Whether compiled code runs when all threads are gone: overlapping traces can leave the flag set."""
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    except Exception:
        return False
    return True


class _Worker:
    """One thread with a model and wrappers of its own, as a drafter thread has."""

    def __init__(self, plan: Plan, number: int, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.random = random.Random(f"{plan.seed}/{number}")
        self.lengths = random.Random(plan.seed).sample(range(33, 300), plan.lengths)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(32))
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()).to(device)
        self.compiled_model = torch.compile(self.model, backend=plan.backend, dynamic=False)
        self.compiled_flex = torch.compile(flex.flex_attention, backend=plan.backend, dynamic=False)
        self.tolerance = 1e-4 if device.type == "cpu" else 1e-2  # Triton multiplies float32 in TF32
        self.errors: Counter[str] = Counter()
        self.failed_steps = 0
        self.difference = 0.0

    def work(self, gate: threading.Barrier) -> None:
        gate.wait()
        for _ in range(self.plan.steps):
            try:
                self._step()
            except Exception as error:
                self.failed_steps += 1
                self.errors[_kind(error)] += 1

    def _step(self) -> None:
        for length in self.random.choices(self.lengths, k=CALLS):
            x = torch.randn(length, WIDTH, generator=self.generator).to(self.device)
            self._compare("model", self.compiled_model, self.model, (x,), tuple(self.model.parameters()))
        self._attend(self.random.choice(self.lengths))
        if self.plan.scenario == "make-fx":
            self._compare("make_fx", make_fx(_polynomial)(x), _polynomial, (x,), ())

    def _attend(self, length: int) -> None:
        """Four documents of random lengths, causal inside each, the mask made eagerly."""
        borders = torch.tensor(sorted(self.random.sample(range(1, length), 3)))
        document = torch.bucketize(torch.arange(length), borders, right=True).to(self.device)

        def visible(_b: Any, _h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (q >= k) & (document[q] == document[k])

        shape = (3, 1, HEADS, length, HEAD_DIM)
        q, k, v = torch.randn(shape, generator=self.generator).to(self.device).unbind()
        mask = flex.create_block_mask(visible, None, None, length, length, device=self.device)
        at = torch.arange(length, device=self.device)
        dense = visible(None, None, at[:, None], at[None, :])
        inputs = (q, k, v)
        if (
            self.plan.backend == "aot_eager" or self.device.type == "cuda"
        ):  # on CPU inductor refuses the backward
            inputs = tuple(x.requires_grad_() for x in inputs)
        self._compare(
            "flex",
            lambda q, k, v: self.compiled_flex(q, k, v, block_mask=mask),
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense),
            inputs,
            tuple(x for x in inputs if x.requires_grad),
        )

    def _compare(
        self,
        name: str,
        compiled: Callable[..., torch.Tensor],
        eager: Callable[..., torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        leaves: tuple[torch.Tensor, ...],
    ) -> None:
        got, wanted = ([out, *_gradients(out, leaves)] for out in (compiled(*inputs), eager(*inputs)))
        for one, other in zip(got, wanted, strict=True):
            difference = ((one - other).abs().max() / other.abs().max()).item()
            if not difference <= self.tolerance:  # NaN fails too
                raise ArithmeticError(f"{name} differs from eager by {difference:.1e}")
            self.difference = max(self.difference, difference)


def _gradients(out: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), leaves) if leaves else ()


def _polynomial(x: torch.Tensor) -> torch.Tensor:
    return (x * x + x).sum(dim=0)


def _kind(error: Exception) -> str:
    """The error in a few words that are equal in all steps, for counting."""
    text = str(error).strip().split("\n")[0]
    if "FX to symbolically trace" in text:
        return "FX: compiled call during another thread's trace"
    return f"{type(error).__name__}: {text[:80]}"
