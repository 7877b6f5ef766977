"""What the whole pipeline reaches on the cards there are, against each of its sides alone.

    python -m bench.pipeline --config qwen3.5-27b --random-weights --split 1:1 --devices cuda:0,cuda:0
    python -m bench.pipeline --config qwen3.5-27b --random-weights --split 1:1 --devices cuda:0,cuda:1
    python -m bench.pipeline --config qwen3.5-27b --random-weights --split 2:2     # and each 1:1 in it
    python -m bench.pipeline --config qwen3.5-27b --random-weights --splits        # every split of all cards
    python -m bench.pipeline --config qwen3.5-27b --random-weights --split 7:1 --budget 12288
        --anchors 128 --devices cuda:0,cuda:1,cuda:0,cuda:1,cuda:0,cuda:1,cuda:0,cuda:1  # as on eight
    python -m bench.pipeline --varied-steps 500 --races 4
    torchrun --standalone --nproc-per-node 2 -m bench.pipeline --small --rows-per-step 2 --losses
    python -m bench.pipeline --small

The real threads over rows of varied documents: a random-weight target, a real drafter, the real optimizer.
Efficiency is the pipeline's rate over that of its slower side alone. Where both roles share a card they share
its time too, so there it is taken of 1 / (1/targets + 1/drafters). bench.pipeline_processes compares one
process with two.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import pipeline_race, pipeline_splits, pipeline_trace
from bench.common import Goals, clock, concluded, machine, matrix_rate, say, section, table
from bench.pipeline_options import parse, recipe_of, text
from bench.pipeline_parts import Ready, Rows, rows_a_second, run_alone
from bench.random_target import build_random_target
from trainer import balance, compile_watch, fx_threads, islands, world
from trainer.exchange import checksum
from trainer.handoff import empty_cache, on_device
from trainer.leaving import leave
from trainer.pipeline import Pipeline, StepResult
from trainer.replica import Replica
from trainer.target import SharedHead, Target
from trainer.topology import Devices, place
from trainer.work import drafter_flops, target_flops

SETTLE = 2  # steps that fill the channels and do not count
PROFILED = 2  # steps under the profiler: a row of the 27B target is a thousand kernels
EFFICIENCY, LATE = 0.95, 0.03  # goals: of the slower side alone; of a stream's time, at most
SCALING = 0.975  # goal: 1.95 times the rate of a half


def main(argv: list[str] | None = None) -> int:
    """Print everything; 0 if all sections ran and all checks held, 1 if not, 2 for a refusal. Goals that were
    missed are named in the last line: a slow card's rate is no failure."""
    options, goals = parse(argv, __doc__.splitlines()[0]), Goals()

    def run() -> list[str]:
        bench, aside = Bench(options, goals), io.StringIO()
        with contextlib.nullcontext() if bench.world.leads else contextlib.redirect_stdout(aside):
            failures = bench.run()
            bench.keep_results()
        if not failures:
            bench.world.close()
        elif not bench.world.leads:  # what it kept to itself until now
            print(f"process {bench.world.rank} FAILED:\n{aside.getvalue()}", file=sys.stderr)
        return failures

    return concluded(run, goals=goals)


class Bench:
    """One split of the devices, measured section by section."""

    def __init__(self, options: argparse.Namespace, goals: Goals) -> None:
        self.options, self.goals, self.failures = options, goals, list[str]()
        self.recipe, self.geometry = recipe_of(options)
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.devices: Devices = place(self.recipe, self.geometry, rank, size)
        self.world = world.join(rank, size, self.devices.drafters[0])
        self.everywhere = list(dict.fromkeys(self.devices.targets + self.devices.drafters))
        self.on_gpu = self.everywhere[0].type == "cuda"
        goals.judged = self.on_gpu and not options.small  # what takes milliseconds is bound by Python
        self.rates: dict[str, float] = {}
        self.losses: dict[str, list[float]] = {}
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
        wanted = [("building", self._build), ("warm-up", self._warm_up), *self._measurements()]
        for title, measure in wanted:
            with section(title, self.failures):
                measure()
            if self.failures and (self.world.size > 1 or title in ("building", "warm-up")):
                break  # the other processes wait for this one's sums
        return self.failures

    def _measurements(self) -> list[tuple[str, Callable[[], None]]]:
        if self.options.splits:
            return [("every split", lambda: pipeline_splits.try_all(self))]
        parts = [
            ("hand-off between cards", self._hand_off),
            ("targets alone", self._targets_alone),
            ("drafters alone", self._drafters_alone),
            ("pipeline", self._whole),
            ("Python's lateness, copies between cards", self._traced),
            ("weights", self._compare_weights),
            ("scaling", self._scaling),  # last: it leaves drafters behind
        ]
        left_out = set() if self.on_gpu else {self._traced}
        if math.gcd(*self.devices.split) == 1 or self.world.size > 1:
            left_out.add(self._scaling)
        return [part for part in parts if part[1] not in left_out]

    def _small_questions(self) -> list[str]:
        """Those that need many steps or many processes, not size."""
        if self.options.varied_steps:
            with section(f"{self.options.varied_steps} steps of varied documents", self.failures):
                self._build()
                self._warm_up()
                before = compile_watch.graphs()
                self.measure("varied", self.targets, self.replicas, steps=self.options.varied_steps)
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
        config, layer_ids = text(self.options), self.geometry.target_layer_ids
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
            with on_device(part.device):
                part.warm_up(row)
            made = compile_watch.graphs() - before
            say(f"{type(part).__name__} on {part.device}: {made} graphs, {time.perf_counter() - began:.1f} s")
        for device in self.everywhere:
            empty_cache(device)
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
        timers = run_alone(self.targets, self.rows, max(2, self.options.steps // 2))
        rate = torch.tensor(rows_a_second(timers), device=self.devices.drafters[0])
        rate *= self.recipe.data.budget
        self.world.add(rate)  # the cards of the others may be faster or slower
        self.rates["targets"] = float(rate)
        took = ", ".join(f"{timer.seconds:.3f}" for timer in timers)
        say(f"{self.rates['targets']:,.0f} tok/s; a row takes {took} s")
        flops = target_flops(text(self.options).to_dict(), self.geometry.target_layer_ids[-1], 1)
        self._print_rate(self.rates["targets"] * flops, self.devices.targets)

    def _drafters_alone(self) -> None:
        ready = [Ready(device, self._features(device)) for device in self.devices.drafters]
        self.measure("drafters", ready, self.replicas)
        flops = drafter_flops(self.geometry, self.recipe.data.budget, self.recipe.train.anchors)
        self._print_rate(self.rates["drafters"] / self.recipe.data.budget * flops, self.devices.drafters)

    def measure(
        self,
        name: str,
        targets: list[Any],
        replicas: list[Replica],
        *,
        rows: int | None = None,
        steps: int | None = None,
        settle: int = SETTLE,
    ) -> StepResult:
        """Runs the real threads of these parts, `rows` rows a step; the last step's result. tok/s of padded
        rows, so that it compares with the sides alone."""
        steps, rows = settle + (steps or self.options.steps), rows or self.recipe.rows_per_step
        train = dataclasses.replace(self.recipe.train, rows_per_step=rows)
        recipe = dataclasses.replace(self.recipe, train=train)
        results, stop = list[StepResult](), threading.Event()

        def on_step(result: StepResult) -> None:
            results.append(result)
            if len(results) == steps:  # while targets still work: rows that lie ready would count as theirs
                stop.set()

        pipeline = Pipeline(
            recipe, self.rows, targets, replicas,
            start_step=0, stop=stop, on_step=on_step, world=self.world,
        )  # fmt: skip
        before = compile_watch.graphs()
        for device in self.everywhere:
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
                empty_cache(device)
        pipeline.run(lambda: None)
        self._wait()
        steady = results[settle:steps]
        seconds = sum(result.step_s for result in steady)
        self.rates[name] = len(steady) * rows * recipe.data.budget / seconds
        self.losses[name] = [result.loss for result in results[:steps]]
        last, recompiles = steady[-1], compile_watch.graphs() - before
        say(f"{self.rates[name]:,.0f} tok/s; a step takes {seconds / len(steady):.3f} s")
        say(f"gradients meet by: {pipeline.means}; {recompiles} recompiles after step 1 (goal 0)")
        say("busy: " + ", ".join(f"{thread} {share:.1%}" for thread, share in last.busy.items()))
        if last.costs is not None:
            c = last.costs
            say(
                f"row: target {c.target_row:.3f} s, drafter {c.drafter_row:.3f} s; "
                f"exchange and optimizer {c.drafter_step * 1e3:.1f} ms a step"
            )
        shown = self.losses[name] if self.options.losses else (results[0].loss, last.loss)
        say(f"loss {' '.join(f'{loss:.6f}' for loss in shown)}")
        self._print_memory()
        return last

    def _whole(self) -> None:
        last = self.measure("pipeline", self.targets, self.replicas)
        rows = self.recipe.rows_per_step
        found = balance.judge(self.devices.split, last.busy, last.costs, rows, apart=self.devices.apart)
        say(f"status would say: {found}")
        targets, drafters = (self.rates.get(side) for side in ("targets", "drafters"))
        if targets is None or drafters is None:
            raise AssertionError("no efficiency: a side alone was not measured")
        if self.devices.apart:
            bound, of = min(targets, drafters), "min(targets alone, drafters alone)"
        else:
            bound, of = 1 / (1 / targets + 1 / drafters), "1/(1/targets + 1/drafters), a card shared"
        table(
            ("", "tok/s"),
            [(name, f"{rate:,.0f}") for name, rate in (*self.rates.items(), ("bound", bound))],
        )
        reached = self.rates["pipeline"] / bound
        goal = self.goals.verdict("efficiency", f"≥ {EFFICIENCY:.0%}", reached >= EFFICIENCY)
        say(f"efficiency {reached:.1%} of {of}; {goal}")

    def _scaling(self) -> None:
        """The same parts, fewer of them: 2:2 against each 1:1 in it: no two cards are equally fast."""
        times = math.gcd(*self.devices.split)
        t, d = (side // times for side in self.devices.split)
        rows, parts = max(1, self.recipe.rows_per_step // times), [f"part {n + 1}" for n in range(times)]
        for n, name in enumerate(parts):
            mine = self.targets[n * t : (n + 1) * t], self.replicas[n * d : (n + 1) * d]
            self.measure(name, *mine, rows=rows)
        mean = statistics.mean(self.rates[name] for name in parts)
        reached, wanted = self.rates["pipeline"] / mean, SCALING * times
        whole = f"{t}:{d} -> {self.devices.split[0]}:{self.devices.split[1]}"
        goal = self.goals.verdict("scaling", f"≥ {wanted:.2f} x", reached >= wanted)
        say(f"scaling {whole}: {reached:.3f} x; {goal}")

    def _traced(self) -> None:
        def run() -> None:
            self.measure("profiled", self.targets, self.replicas, steps=PROFILED, settle=1)

        events = pipeline_trace.profiled(run, self.options.trace if self.world.leads else None)
        found = pipeline_trace.streams(events)
        table(
            ("stream", "kernels", "busy", "launched late", "other gaps"),
            [
                (s.name, s.kernels, f"{s.busy:.1%}", f"{s.late:.2%}", f"{1 - s.busy - s.late:.1%}")
                for s in found
            ],
        )
        worst = max((s.late for s in found), default=0.0)
        say("launched late: the stream had nothing queued because the launch came after its last kernel had")
        say("ended, in gaps under 20 ms; a longer one is a wait for the other side and among the other gaps")
        goal = self.goals.verdict("launched late", f"≤ {LATE:.0%}", worst <= LATE)
        say(f"launched late at most {worst:.2%}; {goal}")
        crossings = pipeline_trace.crossings(events)
        if not crossings:
            say("no copies between cards in the trace")
        for c in crossings:
            rate = c.size / c.seconds / 1e9
            say(f"{c.way}: {c.copies} copies at {rate:,.0f} GB/s take {c.share:.2%} of the time; there ran")
            say(f"kernels on the source in {c.beside_source:.1%} of it, on the drain in {c.beside_drain:.1%}")

    def _compare_weights(self) -> None:
        first, *others = [replica.storage.weights for replica in self.replicas]
        for rank, weights in enumerate(others, 1):
            if not torch.equal(first, weights.to(first.device)):
                raise AssertionError(f"drafter {rank} differs from drafter 0")
        if not bool(first.isfinite().all()):
            raise AssertionError("weights are not finite")
        if len(set(self.world.spread(checksum(first)).tolist())) > 1:
            raise AssertionError("the processes' weights differ")
        drafters = len(self.replicas) * self.world.size
        say(f"{drafters} drafters, bit-identical" if drafters > 1 else "one drafter; its weights are finite")

    def keep_results(self) -> None:
        if self.options.results is not None and self.world.leads:
            told = {"rates": self.rates, "losses": self.losses}
            self.options.results.write_text(json.dumps(told), encoding="utf-8")

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


if __name__ == "__main__":
    leave(main())
