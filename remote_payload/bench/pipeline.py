"""What the whole pipeline reaches on the cards there are, against each of its sides alone.

    python -m bench.pipeline --config qwen3.5-27b --random-weights --split 1:1 --devices cuda:0,cuda:0
    python -m bench.pipeline --config qwen3.5-27b --random-weights --split 1:1 --devices cuda:0,cuda:1
    python -m bench.pipeline --varied-steps 500 --races 4
    torchrun --standalone --nproc-per-node 2 -m bench.pipeline --small --rows-per-step 2 --losses
    python -m bench.pipeline --small

The real threads over rows of varied documents: a random-weight target, a real drafter, the real optimizer.
Efficiency is the pipeline's rate over that of its slower side alone. Where both roles share a card they share
its time too, so there it is taken of 1 / (1/targets + 1/drafters).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from bench import pipeline_race
from bench.common import clock, concluded, config_folder, machine, matrix_rate, say, section, table
from bench.pipeline_parts import Ready, Rows, Timed, lateness, small_config
from bench.random_target import build_random_target, taps, text_config
from trainer import balance, compile_watch, fx_threads, islands, world
from trainer.config import DataConfig, DrafterConfig, Recipe, TargetConfig, TopologyConfig, TrainConfig
from trainer.geometry import DrafterGeometry, resolve
from trainer.handoff import empty_cache
from trainer.pipeline import Pipeline
from trainer.replica import Replica
from trainer.target import SharedHead, Target
from trainer.topology import Devices, place
from trainer.work import drafter_flops, target_flops

SETTLE = 2  # steps that fill the channels and do not count
PROFILED = 2  # steps under the profiler: a row of the 27B target is a thousand kernels


def main(argv: list[str] | None = None) -> int:
    """Print everything; 0 if all sections ran and all checks held, 1 if not, 2 for a refusal."""
    options = _parse(argv)

    def run() -> list[str]:
        bench = Bench(options)
        with contextlib.nullcontext() if bench.world.leads else contextlib.redirect_stdout(io.StringIO()):
            failures = bench.run()
        bench.world.close()
        if failures and not bench.world.leads:
            print(f"process {bench.world.rank} FAILED: {', '.join(failures)}", file=sys.stderr)
        return failures

    return concluded(run)


class Bench:
    """One split of the devices, measured section by section."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.failures = options, list[str]()
        self.recipe, self.geometry = _recipe(options)
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.devices: Devices = place(self.recipe, self.geometry, rank, size)
        self.world = world.join(rank, size, self.devices.drafters[0])
        self.everywhere = list(dict.fromkeys(self.devices.targets + self.devices.drafters))
        self.on_gpu = self.everywhere[0].type == "cuda"
        self.rates: dict[str, float] = {}
        self.ceiling = 0.0

    def run(self) -> list[str]:
        say(machine(self.everywhere[0]))
        of = f", process {self.world.rank} of {self.world.size}" if self.world.size > 1 else ""
        say(f"{self.devices}, {self.recipe.rows_per_step} row(s) a step{of}")
        torch.set_num_threads(self.recipe.topology.cpu_threads)  # as in the threads: Dynamo's guards look
        if not self.options.no_fix:
            fx_threads.install()
        fx_threads.set_dynamo_limits()
        if self.options.varied_steps or self.options.races:
            return self._small_questions()
        with section("building", self.failures):
            self._build()
        if self.failures:
            return self.failures
        with section("warm-up", self.failures):
            self._warm_up()
        with section("hand-off between cards", self.failures):
            self._hand_off()
        with section("targets alone", self.failures):
            self._targets_alone()
        with section("drafters alone", self.failures):
            ready = [Ready(device, self._features(device)) for device in self.devices.drafters]
            self._pipeline("drafters", ready)
        with section("pipeline", self.failures):
            self._pipeline("pipeline", self.targets)
            self._efficiency()
        if self.on_gpu:
            with section("Python's lateness", self.failures):
                self._lateness()
        with section("weights", self.failures):
            self._compare_weights()
        return self.failures

    def _small_questions(self) -> list[str]:
        """Those that need many steps or many processes, not size."""
        if self.options.varied_steps:
            with section(f"{self.options.varied_steps} steps of varied documents", self.failures):
                self._build()
                self._warm_up()
                before = compile_watch.graphs()
                self._pipeline("varied", self.targets, steps=self.options.varied_steps)
                made = compile_watch.graphs() - before
                say(f"{made} recompiles after the warm-up")
                self._compare_weights()
                if made:
                    raise AssertionError(f"{made} recompiles")
        if self.options.races:
            with section("the tracing race, without a warm-up", self.failures):
                pipeline_race.compare(self.options.races, [str(d) for d in self.everywhere])
        return self.failures

    def _build(self) -> None:
        config, layer_ids = _text(self.options), self.geometry.target_layer_ids
        built: dict[torch.device, tuple[Target, SharedHead]] = {}
        for device in dict.fromkeys(self.devices.targets):
            began = time.perf_counter()
            built[device] = build_random_target(
                self.recipe.target.model,
                device,
                self.devices.dtype,
                layer_ids=layer_ids,
                precision=self.options.precision,
            )
            self._wait()
            say(f"target on {device}: {layer_ids[-1] + 1} layers in {time.perf_counter() - began:.1f} s")
        self.targets = [built[device][0] for device in self.devices.targets]
        head = next(iter(built.values()))[1]
        self.replicas = []
        for rank, device in enumerate(self.devices.drafters):
            began = time.perf_counter()
            self.replicas.append(
                Replica(self.recipe, self.geometry, rank, device, head.to(device, self.devices.dtype))
            )
            self._wait()
            took, millions = time.perf_counter() - began, self.geometry.parameter_count() / 1e6
            say(f"drafter {rank} on {device}: {millions:,.1f} M parameters, {took:.1f} s")
        self.rows = Rows(
            self.recipe.data.budget, self.options.documents, min(self.geometry.vocab_size, config.vocab_size)
        )
        self._print_memory()

    def _warm_up(self) -> None:
        if not self.on_gpu:
            return
        fx_threads.forbid_dense_flex()
        row = self.rows.row(0)
        for part in (*dict.fromkeys(self.targets), *self.replicas):
            began, before = time.perf_counter(), compile_watch.graphs()
            if isinstance(part, Replica):
                part.drafter.islands = islands.compiled(part.device)
            part.warm_up(row)
            empty_cache(part.device)
            made = compile_watch.graphs() - before
            say(f"{type(part).__name__} on {part.device}: {made} graphs, {time.perf_counter() - began:.1f} s")
        compile_watch.forbid_recompiles()

    def _features(self, device: torch.device) -> torch.Tensor:
        shape = (self.recipe.data.budget, self.geometry.feature_size)
        draw = torch.Generator(device).manual_seed(0)  # the same in every split, so that losses compare
        return torch.randn(shape, device=device, dtype=self.devices.dtype, generator=draw)

    def _hand_off(self) -> None:
        """Bytes a second of one row's features on an idle link, card to card."""
        pairs = sorted(
            {(t, d) for t in self.devices.targets for d in self.devices.drafters if t != d}, key=str
        )
        if not pairs:
            say("one device: nothing is copied")
        for source, drain in pairs:
            features, buffer = self._features(source), self._features(drain)
            direct = torch.cuda.can_device_access_peer(source, drain)
            with torch.cuda.device(source):  # copies between cards run on the source's stream
                seconds = clock(lambda a=features, b=buffer: b.copy_(a, non_blocking=True), source)
            say(
                f"{source} -> {drain}: {features.nbytes / 2**30:.2f} GiB in {seconds * 1e3:.2f} ms, "
                f"{features.nbytes / seconds / 1e9:,.0f} GB/s, peer access {'yes' if direct else 'NO'}"
            )

    def _targets_alone(self) -> None:
        """Every target's thread with a drafter that takes the features and does nothing."""
        rows = max(2, self.options.steps // 2)
        timers = [Timed(target.device) for target in self.targets]
        threads = [
            threading.Thread(target=timer.rows, args=(target.features, self.rows, rows, number, len(timers)))
            for number, (timer, target) in enumerate(zip(timers, self.targets, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for timer in timers:
            if timer.failure is not None:
                raise timer.failure
        seconds = [timer.seconds for timer in timers]
        self.rates["targets"] = self.world.size * sum(self.recipe.data.budget / s for s in seconds)
        say(f"{self.rates['targets']:,.0f} tok/s; a row takes {', '.join(f'{s:.3f}' for s in seconds)} s")
        flops = target_flops(_text(self.options).to_dict(), self.geometry.target_layer_ids[-1], 1)
        self._print_rate(self.rates["targets"] * flops, self.devices.targets)

    def _pipeline(
        self, name: str, targets: list[Any], steps: int | None = None, settle: int = SETTLE
    ) -> None:
        """Runs the real threads; tok/s of padded rows, so that it compares with the sides alone."""
        steps = settle + (steps or self.options.steps)
        results = []
        recipe = dataclasses.replace(self.recipe, train=dataclasses.replace(self.recipe.train, steps=steps))
        pipeline = Pipeline(
            recipe,
            self.rows,
            targets,
            self.replicas,
            start_step=0,
            stop=threading.Event(),
            on_step=results.append,
            world=self.world,
        )
        before = compile_watch.graphs()
        for device in self.everywhere:
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
                empty_cache(device)
        pipeline.run(lambda: None)
        self._wait()
        steady = results[settle:]
        seconds = sum(result.step_s for result in steady)
        self.rates[name] = len(steady) * recipe.rows_per_step * recipe.data.budget / seconds
        last = steady[-1]
        say(f"{self.rates[name]:,.0f} tok/s; a step takes {seconds / len(steady):.3f} s")
        say(f"gradients meet by: {pipeline.means}; {compile_watch.graphs() - before} recompiles")
        say("busy: " + ", ".join(f"{thread} {share:.1%}" for thread, share in last.busy.items()))
        if last.costs is not None:
            c = last.costs
            say(
                f"row: target {c.target_row:.3f} s, drafter {c.drafter_row:.3f} s; "
                f"exchange and optimizer {c.drafter_step * 1e3:.1f} ms a step"
            )
        if name == "drafters":
            flops = drafter_flops(self.geometry, recipe.data.budget, recipe.train.anchors)
            self._print_rate(self.rates[name] / recipe.data.budget * flops, self.devices.drafters)
        else:
            found = balance.judge(
                self.devices.split, last.busy, last.costs, recipe.rows_per_step, apart=self.devices.apart
            )
            say(f"status would say: {found}")
        shown = results if self.options.losses else (results[0], last)
        say(f"loss {' '.join(f'{result.loss:.6f}' for result in shown)}")
        self._print_memory()

    def _efficiency(self) -> None:
        targets, drafters = self.rates["targets"], self.rates["drafters"]
        if self.devices.apart:
            bound, of = min(targets, drafters), "min(targets alone, drafters alone)"
        else:
            bound, of = 1 / (1 / targets + 1 / drafters), "1/(1/targets + 1/drafters), a card shared"
        table(
            ("", "tok/s"),
            [(name, f"{rate:,.0f}") for name, rate in (*self.rates.items(), ("bound", bound))],
        )
        say(f"efficiency {self.rates['pipeline'] / bound:.1%} of {of}")

    def _lateness(self) -> None:
        found = lateness(
            lambda: self._pipeline("profiled", self.targets, PROFILED, settle=1), self.options.trace
        )
        table(
            ("stream", "kernels", "busy", "launched late", "other gaps"),
            [
                (s.name, s.kernels, f"{s.busy:.1%}", f"{s.late:.2%}", f"{1 - s.busy - s.late:.1%}")
                for s in found
            ],
        )
        say("launched late: the stream had nothing queued because the launch came after its last kernel had")
        say("ended, in gaps under 20 ms; a longer one is a wait for the other side and among the other gaps")

    def _compare_weights(self) -> None:
        first, *others = [replica.storage.weights for replica in self.replicas]
        for rank, weights in enumerate(others, 1):
            if not torch.equal(first, weights.to(first.device)):
                raise AssertionError(f"drafter {rank} differs from drafter 0")
        if not bool(first.isfinite().all()):
            raise AssertionError("weights are not finite")
        say(
            f"{len(self.replicas)} drafter(s), bit-identical"
            if others
            else "one drafter; its weights are finite"
        )

    def _print_rate(self, flops_a_second: float, devices: tuple[torch.device, ...]) -> None:
        if not self.on_gpu:
            return
        self.ceiling = self.ceiling or matrix_rate(self.everywhere[0], seconds=1.0)
        mine = flops_a_second / len(set(devices)) / self.world.size
        kept_up = f"the {self.ceiling / 1e12:.0f} that a matrix product keeps up"
        say(f"{mine / 1e12:.0f} TFLOP/s a card, {mine / self.ceiling:.1%} of {kept_up}")

    def _print_memory(self) -> None:
        if self.on_gpu:
            peaks = {d: torch.cuda.max_memory_allocated(d) / 2**30 for d in self.everywhere}
            say("peak GiB: " + ", ".join(f"{device} {peak:.1f}" for device, peak in peaks.items()))

    def _wait(self) -> None:
        if self.on_gpu:
            for device in self.everywhere:
                torch.cuda.synchronize(device)


def _text(options: argparse.Namespace) -> Any:
    return text_config(Path(config_folder(options.config)))


def _recipe(options: argparse.Namespace) -> tuple[Recipe, DrafterGeometry]:
    """A recipe of the options; the drafter's geometry follows from the target's configuration."""
    config = _text(options)
    depth = config.num_hidden_layers
    small = {"heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 2, "mask_token_id": 7}
    recipe = Recipe(
        name="bench",
        target=TargetConfig(
            model=str(config_folder(options.config)),
            layer_ids=taps(config, options.layers or (depth if depth <= 12 else None)),
            precision=options.precision,
        ),
        data=DataConfig("", "", budget=options.budget, max_document=options.budget),
        drafter=DrafterConfig(**(small if config.vocab_size < 100_000 else {})),
        train=TrainConfig(steps=10_000, anchors=options.anchors, rows_per_step=options.rows_per_step),
        topology=TopologyConfig(split=options.split, devices=options.devices),
    )
    return recipe, resolve(recipe)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qwen3.5-27b", help="under bench/configs, or a model folder")
    parser.add_argument("--random-weights", action="store_true", help="needed: weights are not read here")
    parser.add_argument("--layers", type=int, help="only the target's first so many")
    parser.add_argument("--split", default="1:1", help="targets:drafters (1:1)")
    parser.add_argument("--devices", type=lambda text: tuple(text.split(",")), help="targets' first")
    parser.add_argument("--rows-per-step", type=int, help="default: one for each drafter")
    parser.add_argument("--budget", type=int, default=49152, help="tokens a row")
    parser.add_argument("--anchors", type=int, default=512, help="blocks a row")
    parser.add_argument("--documents", type=int, default=12, help="about so many a row, of varied lengths")
    parser.add_argument("--steps", type=int, default=4, help="timed steps, after two that settle")
    parser.add_argument("--precision", choices=("bf16", "fp8"), help="of the target's products")
    parser.add_argument("--losses", action="store_true", help="print that of every step, to compare splits")
    parser.add_argument("--trace", type=Path, help="keep the profiler's Chrome trace there")
    parser.add_argument("--no-fix", action="store_true", help="leave torch's tracing flag as it is")
    parser.add_argument(
        "--varied-steps", type=int, default=0, help="as many steps of a small target, none compiling"
    )
    parser.add_argument(
        "--races",
        type=int,
        default=0,
        help="as many starts without a warm-up, with the fix and without",
    )
    parser.add_argument("--small", action="store_true", help="every part of it, for a CPU's smoke test")
    options = parser.parse_args(argv)
    if options.small or options.varied_steps or options.races:
        small_config(options)
    elif not options.random_weights:
        parser.error("say --random-weights: this measures speed, no trained weights are read")
    if not Path(config_folder(options.config), "config.json").is_file():
        parser.error(f"--config {options.config}: no config.json in {config_folder(options.config)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
