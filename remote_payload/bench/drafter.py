"""How fast a drafter's own step is at full size, what it takes on the card, and that it never compiles again.

    python -m bench.drafter --config qwen3.5-27b
    python -m bench.drafter --config qwen3.5-27b --varied 500 --checkpointing
    python -m bench.drafter --small

A step is forward, backward and optimizer of one row, on random features and a random head. TFLOP/s count the
matrix products that the step must do (trainer/work.py: attention, and whatever is computed again, left out);
the share is of the rate that an 8192³ bf16 product reaches in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.common import (
    clock,
    concluded,
    config_folder,
    default_device,
    machine,
    matrix_rate,
    peak_memory,
    print_kernel_times,
    say,
    section,
    table,
)
from trainer import compile_watch, fx_threads, islands, memory, products
from trainer.anchors import draw_anchors
from trainer.config import DataConfig, DrafterConfig, Recipe, TargetConfig, TrainConfig
from trainer.data import Document, Row, pack
from trainer.geometry import DrafterGeometry, resolve
from trainer.masks import build_masks
from trainer.replica import Replica
from trainer.seeding import generator
from trainer.target import SharedHead
from trainer.work import drafter_flops

SUPERVISED = 0.7  # of each document, in two answers
# What --small, and the many steps of --varied, run on: every part of the real one, in milliseconds.
SMALL = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048, "num_hidden_layers": 12}


def main(argv: list[str] | None = None) -> int:
    """Print everything; 0 if all sections ran and all checks held, 1 if not, 2 for a refusal."""
    options = _parse(argv)
    return concluded(lambda: Bench(options).run())


class Bench:
    """One drafter on one device, measured section by section."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.failures = options, list[str]()
        self.device = default_device()
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.recipe, self.geometry = _recipe(options)
        self.flops = drafter_flops(self.geometry, options.budget, options.anchors)
        self.ceiling = math.nan

    def run(self) -> list[str]:
        say(machine(self.device))
        fx_threads.install()
        fx_threads.set_dynamo_limits()
        if self.on_gpu:
            fx_threads.forbid_dense_flex()
        with section("ceiling", self.failures):
            self.ceiling = matrix_rate(self.device, self.dtype, 8192 if self.on_gpu else 256)
            say(f"matrix rate {self.ceiling / 1e12:.1f} TFLOP/s")
        with section("weight gradients in fp32", self.failures):
            self._accumulation()
        with section("building", self.failures):
            self._build()
        with section("warm-up", self.failures):
            self._warm_up()
        with section("steps", self.failures):
            self._steps()
        with section("attention alone", self.failures):
            self._attention()
        if self.on_gpu:
            with section("where the time goes", self.failures):
                row = self._row(0)
                print_kernel_times(lambda: self._step(self.replica, row, self.features), self.device)
        for chunk in self.options.chunks:
            with section(f"loss of {chunk} blocks a chunk", self.failures):
                self._chunk(chunk)
        if self.options.checkpointing:
            with section("activation checkpointing", self.failures):
                self._checkpointing()
        if self.options.varied:
            with section(f"{self.options.varied} steps of varied documents", self.failures):
                self._varied()
        return self.failures

    def _accumulation(self) -> None:
        """gradient += d_out.T @ x, the product of one MLP matrix: in cuBLAS' epilogue against a second
        pass."""
        g, slots = self.geometry, self.options.anchors * self.geometry.block_size
        x = torch.randn(slots, g.hidden_size, device=self.device, dtype=self.dtype)
        d_out = torch.randn(slots, 2 * g.intermediate_size, device=self.device, dtype=self.dtype)
        total = torch.zeros(2 * g.intermediate_size, g.hidden_size, device=self.device)
        work = 2 * d_out.numel() * g.hidden_size

        def rounded() -> None:
            total.add_(d_out.T @ x)

        ways = {"rounded, second pass": rounded}
        if not self.on_gpu or products.fused_accumulation(self.device):
            ways["one kernel"] = lambda: products.add_product(total, d_out.T, x)
            total.zero_()
            products.add_product(total, d_out.T, x)
            exact = d_out[:, :64].double().T @ x.double()
            error = float((total[:64] - exact).abs().max() / exact.abs().max())
            say(f"one kernel deviates by {error:.1e} from fp64")
            if not error < 1e-4:
                raise ArithmeticError("accumulation in fp32 is not what it says")
        for name, way in ways.items():
            seconds = clock(way, self.device)
            say(f"{name}: {seconds * 1e3:.2f} ms, {work / seconds / 1e12:.0f} TFLOP/s")

    def _build(self) -> None:
        began = time.perf_counter()
        g = self.geometry
        embed, lm_head = (
            torch.randn(g.vocab_size, g.hidden_size, device=self.device, dtype=self.dtype).mul_(0.02)
            for _ in range(2)
        )
        self.replica = self._replica(self.recipe, g, SharedHead(embed, lm_head))
        self.features = torch.randn(self.options.budget, g.feature_size, device=self.device, dtype=self.dtype)
        say(f"{g.parameter_count() / 1e6:,.1f} M parameters in {time.perf_counter() - began:.1f} s")
        need = memory.drafter_need(self.recipe, g, self.dtype)
        table(("estimate", "GiB"), [(name, f"{n / memory.GIB:.2f}") for name, n in need.items()])
        # this benchmark holds the features of one row, a run holds those of the next too
        self.estimate = sum(need.values()) - need["features"] // memory.ROWS_AT_A_DRAFTER + memory.STEP_SLACK

    def _replica(self, recipe: Recipe, g: DrafterGeometry, head: SharedHead) -> Replica:
        made = Replica(recipe, g, 0, self.device, head)
        made.drafter.islands = islands.compiled(self.device) if self.on_gpu else islands.EAGER
        return made

    def _warm_up(self) -> None:
        self._warm(self.replica, self._row(0))

    def _warm(self, replica: Replica, row: Row) -> None:
        """Compile, print what took how long, check the number of graphs, forbid more."""
        compile_watch.allow_recompiles()
        before, began = compile_watch.graphs(), time.perf_counter()
        replica.warm_up(row)
        self._wait()
        made = compile_watch.graphs() - before
        say(f"{time.perf_counter() - began:.1f} s, {made} graphs")
        for compiled in compile_watch.compiles()[-made:] if made else ():
            say(f"   {compiled}")
        compile_watch.forbid_recompiles()
        if self.on_gpu and made != islands.GRAPHS_PER_DRAFTER:
            raise AssertionError(f"{made} graphs, expected {islands.GRAPHS_PER_DRAFTER}")

    def _steps(self) -> None:
        """Each step a row of other documents; the host may not wait for the device inside."""
        rows = [self._row(index) for index in range(self.options.steps)]
        self._step(self.replica, rows[0], self.features)  # Adam's moments come into being
        with peak_memory(self.device) as peak:
            self._wait()
            began = time.perf_counter()
            with _no_waiting(self.on_gpu):
                marks = [self._step(self.replica, rows[0], self.features)]
                host = time.perf_counter() - began  # a second step may find the launch queue full
                marks += [self._step(self.replica, row, self.features) for row in rows[1:]]
            self._wait()
            wall = (time.perf_counter() - began) / len(rows)
        slots = self.geometry.block_size - 1
        losses = [float(numbers[0] / numbers[1]) for numbers, _ in marks]
        counted = [float(numbers[2 + slots :].sum()) for numbers, _ in marks]
        say(f"{wall * 1e3:.1f} ms a step; the host issues one in {host * 1e3:.1f} ms")
        say(self._rate(wall))
        say(f"{sum(counted) / len(counted):,.0f} labels a row of {self.options.anchors * slots:,} slots")
        say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        if not all(math.isfinite(loss) for loss in losses):
            raise ArithmeticError(f"losses {losses}")
        if peak:
            say(f"peak {peak[0]:.2f} GiB allocated, estimated {self.estimate / memory.GIB:.2f}")
            if peak[0] > self.estimate / memory.GIB:
                raise MemoryError("the estimate is too low")
        if self.on_gpu:
            row = rows[0]
            parts = {
                "forward and backward": lambda: self.replica.backward(row, self.features),
                "optimizer": lambda: self.replica.optimizer.step(0, 1.0),
                "masks": lambda: self._masks(row),
            }
            table(
                ("part", "ms"),
                [(name, f"{clock(part, self.device) * 1e3:.2f}") for name, part in parts.items()],
            )

    def _rate(self, seconds: float) -> str:
        rate = self.flops / seconds
        tokens = self.options.budget / seconds
        return (
            f"{self.flops / 1e12:.1f} TFLOP a step: {rate / 1e12:.0f} TFLOP/s, "
            f"{rate / self.ceiling:.1%} of the ceiling; {tokens:,.0f} tokens/s"
        )

    def _attention(self) -> None:
        """The layer's attention on its own, and the rate over the pairs that the mask leaves visible."""
        g, row = self.geometry, self._row(0)
        context, slots = self.options.budget, self.options.anchors * g.block_size
        query = self._random(slots, g.heads, g.head_dim)
        key, value = (self._random(context + slots, g.kv_heads, g.head_dim) for _ in range(2))
        mask, pairs = self._masks(row)
        attend = self.replica.drafter.islands.attend
        d_out = torch.randn_like(query)

        def both() -> None:
            torch.autograd.grad(attend(query, key, value, mask), (query, key, value), d_out)

        forward = clock(lambda: attend(query, key, value, mask), self.device)
        backward = clock(both, self.device) - forward
        work = 4 * pairs * g.heads * g.head_dim
        say(f"{pairs:,} visible pairs; a layer: {forward * 1e3:.2f} ms forward, {backward * 1e3:.2f} back")
        say(
            f"{work / forward / 1e12:.0f} TFLOP/s forward, {2.5 * work / backward / 1e12:.0f} back; "
            f"{g.layers * (forward + backward) * 1e3:.1f} ms in {g.layers} layers"
        )

    def _masks(self, row: Row) -> tuple[object, int]:
        g = self.geometry
        blocks = draw_anchors(row, self.options.anchors, generator(0, "anchors", row.index))
        pairs = int((row.positions[blocks.anchors[blocks.valid]] + g.block_size).sum()) * g.block_size
        blocks, positions = blocks.to(self.device), row.positions.to(self.device)
        masks = build_masks(blocks, positions, g.block_size, g.layer_types, g.sliding_window, heads=g.heads)
        return masks["full_attention"], pairs

    def _chunk(self, blocks: int) -> None:
        """The same step with larger or smaller pieces of the logits: a new shape for one island."""
        train = dataclasses.replace(self.recipe.train, loss_chunk_blocks=blocks)
        self._timed(dataclasses.replace(self.recipe, train=train))

    def _checkpointing(self) -> None:
        self.replica.drafter.checkpointing = True
        try:
            self._timed(self.recipe)
        finally:
            self.replica.drafter.checkpointing = False

    def _timed(self, recipe: Recipe) -> None:
        kept, self.replica.recipe = self.replica.recipe, recipe
        row = self._row(1)
        compile_watch.allow_recompiles()
        try:
            with peak_memory(self.device) as peak:
                seconds = clock(lambda: self._step(self.replica, row, self.features), self.device, repeats=5)
            say(f"{seconds * 1e3:.1f} ms a step; {self._rate(seconds)}")
            if peak:
                say(f"peak {peak[0]:.2f} GiB")
        finally:
            self.replica.recipe = kept
            compile_watch.forbid_recompiles()

    def _varied(self) -> None:
        """A small drafter on as many different rows, none of which may compile anything."""
        options = _parse(["--small"])
        recipe, g = _recipe(options)
        embed = self._random(g.vocab_size, g.hidden_size).detach().mul_(0.05)
        replica = self._replica(recipe, g, SharedHead(embed, embed))
        self._warm(replica, self._row(0, options))
        features = self._random(options.budget, g.feature_size).detach()
        before, began = compile_watch.graphs(), time.perf_counter()
        for index in range(self.options.varied):
            numbers, norm = self._step(replica, self._row(index, options), features)
        self._wait()
        took, made = time.perf_counter() - began, compile_watch.graphs() - before
        loss = float(numbers[0] / numbers[1])
        say(f"{self.options.varied} steps in {took:.1f} s, {made} recompiles, last loss {loss:.3f}")
        if made or not torch.isfinite(norm):
            raise AssertionError(f"{made} recompiles, gradient norm {float(norm)}")

    def _row(self, index: int, options: argparse.Namespace | None = None) -> Row:
        """A row of about `documents` documents whose lengths and answers only `index` decides."""
        options = options or self.options
        draw = generator("bench", "row", index)
        share = torch.rand(options.documents, generator=draw) + 0.25
        lengths = (share / share.sum() * options.budget).long().clamp(min=32).tolist()
        lengths[-1] = max(
            32, options.budget - sum(lengths[:-1]) - int(torch.randint(100, (), generator=draw))
        )
        documents = []
        for length in lengths:
            mask = torch.zeros(length, dtype=torch.bool)
            half, question = length // 2, max(1, int(length * (1 - SUPERVISED) / 2))
            mask[question:half] = mask[half + question :] = True
            ids = torch.randint(0, 1000, (length,), generator=draw)
            documents.append(Document(ids, mask, str(len(documents))))
        while sum(len(d.ids) for d in documents) > options.budget:
            documents.pop()
        return pack(documents, options.budget, index)

    def _step(self, replica: Replica, row: Row, features: Tensor) -> tuple[Tensor, Tensor]:
        contribution = replica.backward(row, features)
        _, norm = replica.optimizer.step(1, contribution.numbers[1])
        return contribution.numbers, norm

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype).requires_grad_()

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def _no_waiting(on_gpu: bool) -> Iterator[None]:
    """On CUDA, whatever makes the host wait for the device inside raises."""
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def _recipe(options: argparse.Namespace) -> tuple[Recipe, DrafterGeometry]:
    """The recipe of the full-size drafter for that target, or a small one of the same make."""
    small = (
        {"heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 2, "mask_token_id": 7} if options.small else {}
    )
    recipe = Recipe(
        name="bench",
        target=TargetConfig(model=str(config_folder(options.config))),
        data=DataConfig("", "", budget=options.budget, max_document=options.budget),
        drafter=DrafterConfig(**small),
        train=TrainConfig(steps=1000, anchors=options.anchors, loss_chunk_blocks=options.chunk),
    )
    return recipe, _small_geometry(recipe) if options.small else resolve(recipe)


def _small_geometry(recipe: Recipe) -> DrafterGeometry:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps({"model_type": "qwen3", **SMALL}), encoding="utf-8")
        return resolve(dataclasses.replace(recipe, target=TargetConfig(model=folder)))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.drafter", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", default="qwen3.5-27b", help="folder under bench/configs, or a model folder"
    )
    parser.add_argument("--budget", type=int, help="tokens a row (49152)")
    parser.add_argument("--anchors", type=int, help="blocks a row (512)")
    parser.add_argument("--documents", type=int, help="documents a row, of varied lengths (12)")
    parser.add_argument("--steps", type=int, help="timed steps, each of other documents (20)")
    parser.add_argument("--chunk", type=int, default=128, help="train.loss_chunk_blocks")
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="try these too, e.g. 64 256 512")
    parser.add_argument("--checkpointing", action="store_true", help="measure activation checkpointing too")
    parser.add_argument(
        "--varied", type=int, default=0, help="as many steps of a small drafter, none compiling"
    )
    parser.add_argument("--small", action="store_true", help="a drafter for a CPU's smoke test")
    options = parser.parse_args(argv)
    full = {"budget": 49152, "anchors": 512, "documents": 12, "steps": 20}
    small = {"budget": 512, "anchors": 16, "documents": 4, "steps": 3}
    for name, value in (small if options.small else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    sys.exit(main())
