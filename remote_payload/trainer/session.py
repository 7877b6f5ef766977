"""One run from its recipe to its export: reads, proves, warms up, trains, and says what it is doing."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from trainer import acceptance, balance, checkpoint, fx_threads, islands, memory, report, resumable, world
from trainer.compile_watch import CompileWatch, forbid_recompiles
from trainer.config import Recipe
from trainer.data import Corpus, Document, RowOrder, load_corpus, load_tokenizer
from trainer.errors import Refusal
from trainer.export import export
from trainer.finding import FAIL
from trainer.geometry import DrafterGeometry, resolve
from trainer.handoff import empty_cache, on_device
from trainer.masks import check_tiles
from trainer.pipeline import Pipeline, StepResult
from trainer.record import RunRecord
from trainer.replica import Replica
from trainer.target import Target
from trainer.target_loading import load_targets
from trainer.topology import Devices, place
from trainer.verify import summary, verify


class Stopped(Exception):
    """A stop was asked for before the first step: nothing was lost, nothing is to be saved."""


class Session:
    """What a run holds while it lives. `stop` may be set by a signal at any time. `place_in_world`: rank and
    number of the processes that take the run's steps together; only the first saves, evaluates, exports."""

    def __init__(
        self,
        recipe: Recipe,
        release_dir: Path,
        record: RunRecord,
        stop: threading.Event,
        place_in_world: tuple[int, int] = (0, 1),
        *,
        allow_slow_kernels: bool = False,
    ) -> None:
        self.recipe, self.release_dir, self.record, self.stop = recipe, release_dir, record, stop
        self.allow_slow_kernels = allow_slow_kernels
        self.geometry: DrafterGeometry = resolve(recipe)
        self.devices: Devices = place(recipe, self.geometry, *place_in_world)
        self.world = world.join(*place_in_world, self.devices.drafters[0], stop)
        self.watch = CompileWatch()
        self._compiles_before = self.watch.snapshot()
        self._steady: deque[StepResult] = deque(maxlen=50)
        self._tau: float | None = None
        self._best: tuple[float, int] | None = None  # tau and step of the best checkpoint
        self._stop_announced = False
        self._sealer = checkpoint.Sealer()

    def run(self, resume: Path | None) -> str:
        """Returns the phase it ended in: finished or stopped. Raises Refusal, or ThreadFailed for a crash."""
        try:
            self._prepare(resume)
        except Stopped:
            return "stopped"
        if self.world.any(self.stop.is_set()):
            return "stopped"
        if self.start_step < self.recipe.train.steps:
            self.record.phase("training")
            print(report.HEADER, flush=True)
            pipeline = Pipeline(
                self.recipe,
                self.order,
                self.targets,
                self.replicas,
                start_step=self.start_step,
                stop=self.stop,
                on_step=self._on_step,
                stands_still=self._stands_still,
                world=self.world,
            )
            pipeline.run(self._announce_stop)
        if self._steps_done < self.recipe.train.steps:
            return "stopped"
        if self.world.leads:
            self._finish()
        return "finished"

    def close(self) -> None:
        self._sealer.wait()
        self.world.close()

    def _stage(self, detail: str, phase: str = "starting") -> None:
        if self.stop.is_set() and self.world.size == 1:  # several processes agree on it before the first step
            raise Stopped
        self.record.phase(phase, detail)
        print(f"· {detail}", flush=True)

    def _tell(self, text: str) -> None:
        """Progress within a stage; a stop need not wait for its end."""
        if self.stop.is_set() and self.world.size == 1:
            raise Stopped
        self.record.progress(detail=text)
        print(f"  {text}", flush=True)

    def _prepare(self, resume: Path | None) -> None:
        recipe = self.recipe
        torch.set_num_threads(recipe.topology.cpu_threads)
        tracing = fx_threads.install()
        fx_threads.set_dynamo_limits()
        self.watch.start()
        self.record.watch_compiles(self.watch.snapshot)
        self.record.progress(topology=str(self.devices), kernels={"fx_threads": tracing})
        if self.devices.drafters[0].type == "cuda":
            check_tiles(recipe.data.budget, recipe.train.anchors * self.geometry.block_size)

        idle = len(self.devices.drafters) * self.world.size - recipe.rows_per_step
        if idle > 0:
            self.record.note(f"{idle} drafter(s) idle: train.rows_per_step is {recipe.rows_per_step}")
        self._stage(f"reading conversations {recipe.data.train}")
        tokenizer = load_tokenizer(recipe.target.model)
        self.train = self._corpus(tokenizer, recipe.data.train)
        self.heldout = self._corpus(tokenizer, recipe.data.heldout)

        self.config = {
            **resumable.identity(recipe, self.release_dir),
            "geometry": dataclasses.asdict(self.geometry),
        }
        resume = self._choose_checkpoint(resume)
        made = resumable.config_of(resume) if resume else {}
        self.order = RowOrder(
            self.train.documents,
            budget=recipe.data.budget,
            seed=recipe.train.seed,
            starts=made.get("epoch_starts", (0,)),
        )
        events = recipe.log.tensorboard and self.world.leads
        line = made.get("metrics") if self.world.leads else None
        for step, tau in self.record.begin(self.start_step, resume, line, tensorboard=events):
            self._tau = tau
            self._note_best(step)

        self._stage(f"loading target {recipe.target.model}")
        self.targets, heads = self._load_targets()
        self._stage("proving that packed documents do not change each other")
        for target in dict.fromkeys(self.targets):
            target.check_packing(self.train.documents, recipe.data.budget)

        millions = self.geometry.parameter_count() / 1e6
        self._stage(f"building {len(self.devices.drafters)} drafter(s) of {millions:.1f} M parameters")
        needed = memory.check_drafters(recipe, self.geometry, self.devices.drafters, self.devices.dtype)
        print("  need " + ", ".join(f"{gib} GiB on {device}" for device, gib in needed.items()), flush=True)
        self.replicas = [
            Replica(recipe, self.geometry, rank, device, heads[rank])
            for rank, device in enumerate(self.devices.drafters)
        ]
        if resume is not None:
            self._stage(f"resuming from {resume}")
            for replica in self.replicas:
                checkpoint.load(resume, self.start_step, replica.drafter, replica.optimizer)
        self._warm_up(tracing)

    def _choose_checkpoint(self, resume: Path | None) -> Path | None:
        """The one that was asked for, or the newest whole one before it, which every status then says."""
        self.start_step = self._steps_done = 0
        if resume is None:
            return None
        self._stage(f"proving checkpoint {resume}")
        place, self.start_step, passed_over = checkpoint.newest_whole(resume, self.config)
        self._steps_done = self.start_step
        self.record.progress(
            step=self.start_step, last_checkpoint={"step": self.start_step, "path": str(place)}
        )
        if passed_over:
            self.record.note(f"resumed at step {self.start_step} instead: {passed_over[0]}")
            for line in passed_over:
                print(f"  {line}", flush=True)
            print(f"  resuming from {place} instead", flush=True)
        return place

    def _corpus(self, tokenizer: Any, name: str) -> Corpus:
        data = self.recipe.data
        corpus = load_corpus(
            self.release_dir / name,
            tokenizer,
            max_document=data.max_document,
            min_supervised=data.min_supervised,
        )
        vocabulary = self.geometry.vocab_size
        if corpus.highest >= vocabulary:
            raise Refusal(
                f"{name}: token {corpus.highest} is beyond the target's vocabulary of {vocabulary}: "
                f"{self.recipe.target.model} holds the tokenizer of another model"
            )
        print(f"  {name}: {corpus.summary()}", flush=True)
        return corpus

    def _load_targets(self) -> tuple[list[Target], list[Any]]:
        """One model per distinct target device; threads on the same device share its frozen weights."""
        devices = list(dict.fromkeys(self.devices.targets))
        targets, head = load_targets(
            self.recipe.target.model,
            self.geometry,
            devices,
            self.devices.dtype,
            self.recipe.data.max_document,
            tokens=self.recipe.data.budget,
            precision=self.recipe.target.precision,
            allow_slow_kernels=self.allow_slow_kernels,
            on_progress=self._tell,
        )
        loaded = dict(zip(devices, targets, strict=True))
        heads = {
            device: head.to(device, self.devices.dtype) for device in dict.fromkeys(self.devices.drafters)
        }
        return [loaded[d] for d in self.devices.targets], [heads[d] for d in self.devices.drafters]

    def _warm_up(self, tracing: dict[str, Any]) -> None:
        """Compile and tune for each device in turn, before any thread runs: compiles are serial anyway, and
        racing them is how tracing state leaks."""
        device = self.devices.drafters[0]
        wanted, reason = islands.decide(self.recipe.compile, device)
        if wanted:
            fx_threads.forbid_dense_flex()
            row = self.order.row(self.start_step * self.recipe.rows_per_step)
            targets = dict.fromkeys(self.targets) if device.type == "cuda" else {}  # eager on the CPU
            parts: list[Target | Replica] = [*targets, *self.replicas]
            for number, part in enumerate(parts, 1):
                role = "target" if isinstance(part, Target) else f"drafter {part.rank}"
                self._stage(f"{number} of {len(parts)}: {role} on {part.device}", "warming-up")
                if isinstance(part, Replica):
                    part.drafter.islands = islands.compiled(device)
                with on_device(part.device):
                    part.warm_up(row)
            for used in dict.fromkeys(part.device for part in parts):  # a card's row ran beside the next part
                empty_cache(used)
            seen = self.watch.snapshot()
            print(f"  {seen['count']} compile(s) in {seen['seconds']:.1f} s", flush=True)
            forbid_recompiles()
        else:
            self.record.note(reason)
            print(f"  {reason}", flush=True)
        self.record.progress(
            kernels={
                "fx_threads": tracing,
                **self.targets[0].kernels.state(),
                "drafter_attention": "flex, compiled" if device.type == "cuda" else "dense",
                "compiled": wanted,
            }
        )
        self._compiles_before = self.watch.snapshot()

    def _stands_still(self, steps_done: int) -> bool:
        """Whether the weights after this step are to be saved or evaluated."""
        train = self.recipe.train
        return self.world.leads and any(
            _due(steps_done, every) for every in (train.checkpoint_every, train.eval_every)
        )

    def _announce_stop(self) -> None:
        if self.stop.is_set() and not self._stop_announced:
            self._stop_announced = True
            self.record.phase("stopping", "finishing the step in flight")
            print("· stop asked for: finishing the step in flight, then a checkpoint", flush=True)

    def _on_step(self, result: StepResult) -> None:
        """Runs in drafter 0's thread between two steps."""
        train = self.recipe.train
        self._steps_done = result.steps_done
        hits = self.watch.limit_hits()
        if hits:
            raise RuntimeError(f"a compiled function fell back to eager: {hits[0]}")
        compiled, self._compiles_before = self.watch.grew_since(self._compiles_before), self.watch.snapshot()
        if not compiled and result.steps_done > self.start_step + 1:  # the first step fills the channels
            self._steady.append(result)
        step_time = statistics.median(r.step_s for r in self._steady) if self._steady else None
        rate = (
            sum(r.tokens for r in self._steady) / sum(r.step_s for r in self._steady)
            if self._steady
            else None
        )
        self.record.progress(
            step=result.steps_done,
            loss=round(result.loss, 5),
            step_time_s=step_time,
            tokens_per_s=rate,
            pipeline=self._balance(result) if self._steady else None,
        )
        print(report.step_line(result, train.steps, rate, step_time), flush=True)
        if _due(result.steps_done, report.HEADER_EVERY) and not result.last:
            print(report.HEADER, flush=True)
        line = {
            "step": result.steps_done,
            "time": time.time(),
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens": result.tokens,
            "step_s": round(result.step_s, 4),
            "compile": compiled,
            "accuracy": result.accuracy,
            "busy": result.busy,
        }
        if self.world.leads and (_due(result.steps_done, train.checkpoint_every) or result.last):
            self._save(result, line)
        evaluated = self.world.leads and _due(result.steps_done, train.eval_every) and not result.last
        if evaluated:
            self._evaluate()
            self._note_best(result.steps_done)
        self.record.metric(**line, **({"tau": self._tau} if evaluated else {}))
        if not result.last:
            self.record.phase("training")

    def _balance(self, result: StepResult) -> dict[str, Any]:
        rows = -(-self.recipe.rows_per_step // self.world.size)
        found = balance.judge(self.devices.split, result.busy, result.costs, rows, apart=self.devices.apart)
        return found.as_state()

    def _save(self, result: StepResult, line: dict[str, Any]) -> None:
        """A disk that is full now may have room at the next checkpoint; only the last one must not fail."""
        try:
            self._checkpoint(result.steps_done, line)
        except Refusal as refusal:
            if result.last:
                raise
            self.record.note(str(refusal))
            print(f"· {refusal}; training goes on", flush=True)

    def _checkpoint(self, step: int, line: dict[str, Any]) -> None:
        self.record.phase("checkpointing", f"step {step}")
        leader = self.replicas[0]
        self._sealer.wait()
        path = checkpoint.save(
            self.record.run_dir / "checkpoints",
            step,
            leader.drafter,
            leader.optimizer,
            {**self.config, "epoch_starts": self.order.starts, "metrics": line},
            self.recipe.train.keep_checkpoints,
            best=self._best[1] if self._best else None,
        )
        self.record.progress(last_checkpoint={"step": step, "path": str(path)})
        self._sealer.seal(path)
        print(f"· checkpoint {path.name}", flush=True)

    def _note_best(self, step: int) -> None:
        """An evaluation speaks for the checkpoint of its own step; the best of these is kept."""
        so_far = self._best[0] if self._best else 0.0
        if _due(step, self.recipe.train.checkpoint_every) and (self._tau or 0.0) > so_far:
            self._best = self._tau, step

    def _evaluate(self) -> None:
        documents: list[Document] = self.heldout.documents[: self.recipe.train.eval_documents]
        if not documents:
            return
        self.record.phase("evaluating", f"{len(documents)} held-out documents")
        leader = self.replicas[0]
        found = acceptance.evaluate(
            leader.drafter,
            leader.head,
            documents,
            self.targets[0].features_alone,
            device=leader.device,
            dtype=leader.dtype,
        )
        self._tau = found.tau
        self.record.progress(tau=found.tau)
        print(
            f"· tau {found.tau:.3f} over {found.documents} held-out documents, {found.cycles:,} cycles",
            flush=True,
        )

    def _finish(self) -> None:
        self._evaluate()
        self.record.phase("checkpointing", "exporting the drafter")
        path = export(self.replicas[0].drafter, self.geometry, self.record.run_dir / "export")
        print(f"· exported {path}", flush=True)
        findings = verify(path, self.recipe.target.model)
        print(f"  verify: {summary(findings)}", flush=True)
        for finding in findings:
            if finding.verdict == FAIL:
                self.record.note(f"the export: {finding.what}: {finding.mend}")
                print(f"  {finding}", flush=True)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
