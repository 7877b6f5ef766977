"""Does it learn? A hybrid target made here, its own answers, the real trainer, tau by another program too.

    python -m bench.learning --out DIR                 everything, about seven minutes on one H200
    python -m bench.learning --out DIR --small         everything on two CPU cores in a minute: the path
    python -m bench.learning train --out DIR           one stage; stages that are done are not done again

Stages: pretrain (a Qwen3.5-type model on the Python sources of this machine), generate (its own greedy
answers), train (`python -m trainer` with the recipe written to the work folder), check (tau of the export by
the trainer and by bench/greedy_loop.py on the same held-out prompts), plot. Results go to --out: result.json,
metrics.jsonl, recipe.yaml, train.log, learning.png; models and text to --work.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from bench import learning_text as text
from bench.common import config_folder, default_device, machine, say

STAGES = ("pretrain", "generate", "train", "check", "plot")
OVERHEAD_S = 160.0  # on an H200: text 25, tuning of kernels 45, start of the trainer 60, check 30
SHARES = {"pretrain": 0.38, "generate": 0.14, "train": 0.48}  # of the rest


@dataclass(frozen=True)
class Plan:
    """Sizes and times. `step_s` is what a training step is expected to take; the clock stops a slower run."""

    config: str
    vocabulary: int
    packages: tuple[str, ...]
    samples: int
    prompt: int
    tokens: int
    pretrain_steps: int
    pretrain_batch: int
    pretrain_lr: float
    seconds: dict[str, float]
    conversations: int
    answer_batch: int
    heldout: int
    shortest: int
    step_s: float
    evaluations: int
    recipe: dict[str, Any]


def plan_of(options: argparse.Namespace) -> Plan:
    rest = max(30.0, options.minutes * 60 - OVERHEAD_S)
    seconds = {stage: share * rest for stage, share in SHARES.items()}
    if options.small:
        return Plan(
            config="hybrid-tiny",
            vocabulary=640,
            packages=(),
            samples=400,
            prompt=24,
            tokens=48,
            pretrain_steps=12,
            pretrain_batch=16,
            pretrain_lr=1e-2,
            seconds=dict.fromkeys(SHARES, 120.0),
            conversations=48,
            answer_batch=48,
            heldout=4,
            shortest=2,
            step_s=120.0 / 12,
            evaluations=2,
            recipe={
                "target": {"layer_ids": [0, 2, 3]},
                "drafter": {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "block_size": 4},
                "data": {"budget": 128, "min_supervised": 2},
                "train": {
                    "lr": 3e-3,
                    "anchors": 16,
                    "gamma": 4,
                    "eval_documents": 2,
                    "loss_chunk_blocks": 16,
                },
                "compile": "off",
            },
        )
    return Plan(
        config="hybrid-small",
        vocabulary=8192,
        packages=text.PACKAGES,
        samples=60_000,
        prompt=64,
        tokens=256,
        pretrain_steps=100_000,
        pretrain_batch=256,
        pretrain_lr=2e-3,
        seconds=seconds,
        conversations=16_000,
        answer_batch=2048,
        heldout=96,
        shortest=16,
        step_s=options.step_s,
        evaluations=10,
        recipe={
            "target": {"taps": 5},
            "drafter": {
                "layers": 4,
                "heads": 8,
                "kv_heads": 4,
                "head_dim": 64,
                "intermediate_size": 1536,
                "block_size": 16,
            },
            "data": {"budget": 16_384, "min_supervised": 16},
            "train": {"lr": 1e-3, "beta2": 0.99, "anchors": 512, "gamma": 7, "eval_documents": 32},
        },
    )


@dataclass(frozen=True)
class Work:
    """The folder in which one stage leaves what the next one reads."""

    folder: Path
    out: Path
    plan: Plan
    device: torch.device

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def train_file(self) -> Path:
        return self.folder / "conversations.jsonl"

    @property
    def heldout_file(self) -> Path:
        return self.folder / "heldout.jsonl"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def done(self, stage: str) -> dict[str, Any] | None:
        path = self.folder / f"{stage}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def pretrain(work: Work) -> dict[str, Any]:
    from bench import learning_target

    plan, began = work.plan, time.monotonic()
    chosen = text.collect(plan.samples, plan.tokens, plan.packages)
    tokenizer = text.train_tokenizer((unit.text for unit in chosen[::4]), plan.vocabulary)
    known = [unit for unit in chosen if not unit.held_out]
    unknown = [unit for unit in chosen if unit.held_out]
    samples = text.conversations(tokenizer, known, plan.prompt, plan.tokens)
    heldout = text.conversations(tokenizer, unknown, plan.prompt, plan.tokens)
    say(
        f"  {len(samples.ids):,} samples of {samples.lengths.mean():.0f} tokens from {len(chosen):,} units, "
        f"{len(heldout.ids):,} held out, in {time.monotonic() - began:.1f} s"
    )
    prompts = {"known": samples.ids[:, : plan.prompt], "heldout": heldout.ids[:, : plan.prompt]}
    numpy.savez(work.folder / "prompts.npz", **prompts)

    model = learning_target.new_target(config_folder(plan.config), len(tokenizer), work.device)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    say(f"  {plan.config}: {millions:.1f} M parameters")
    result = learning_target.pretrain(
        model,
        samples,
        steps=plan.pretrain_steps,
        seconds=plan.seconds["pretrain"],
        batch=plan.pretrain_batch,
        lr=plan.pretrain_lr,
    )
    dtype = torch.bfloat16 if work.device.type == "cuda" else torch.float32
    model.to(dtype).save_pretrained(work.target)
    tokenizer.save_pretrained(work.target)
    return {"samples": len(samples.ids), "parameters_m": millions, **result}


def generate(work: Work) -> dict[str, Any]:
    from bench import greedy_loop, learning_target

    plan = work.plan
    tokenizer = _tokenizer(work)
    prompts = numpy.load(work.folder / "prompts.npz")
    model = learning_target.load(work.target, work.device)
    limit = plan.tokens - plan.prompt

    # Held-out text comes from whole forwards of one shape, as bench/greedy_loop.py verifies: exactly greedy.
    forward = greedy_loop.causal_lm(model, [0])
    length = -(-plan.tokens // 64) * 64

    def exactly(_: Any, part: torch.Tensor, limit: int) -> torch.Tensor:
        found = greedy_loop.greedy(forward, part.tolist(), [limit] * len(part), text.END, length)
        return torch.tensor([row + [text.PAD] * (limit - len(row)) for row in found])

    result: dict[str, Any] = {}
    for name, file, ask, wanted in (
        ("heldout", work.heldout_file, exactly, plan.heldout),
        ("known", work.train_file, learning_target.answer, plan.conversations),
    ):
        chosen = torch.from_numpy(prompts[name].astype(numpy.int64))
        chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(2))]
        chosen = chosen[: wanted + wanted // 3].to(work.device)  # a third more: some will not be usable
        say(f"· answers to {len(chosen):,} prompts ({name})")
        found = learning_target.answers(
            model, chosen, limit=limit, batch=plan.answer_batch, seconds=plan.seconds["generate"], ask=ask
        )
        asked = chosen.tolist()[: len(found)]
        same = learning_target.agreement(model, asked[:1024], found[:1024], 256)
        kept, dropped = learning_target.usable(tokenizer, found, plan.shortest)
        good = [(p, a) for p, a in zip(asked, kept, strict=True) if a is not None][:wanted]
        if not good:
            raise RuntimeError(f"no usable answer ({dict(dropped)}): train the target longer")
        with file.open("w", encoding="utf-8") as lines:
            for number, (prompt, answer) in enumerate(good):
                line = learning_target.conversation(tokenizer, f"{name}-{number}", prompt, answer)
                lines.write(json.dumps(line) + "\n")
        tokens = sum(len(answer) for _, answer in good)
        ended = sum(answer[-1] == text.END for _, answer in good)
        result[name] = {
            "conversations": len(good),
            "answer_tokens": tokens,
            "ended": ended / len(good),
            "dropped": dict(dropped),
            "greedy_by_a_whole_forward": same,
        }
        say(f"  {json.dumps(result[name])}")
        for prompt, answer in good[:2]:
            say("  ---\n" + text.decode(tokenizer, [prompt + answer])[0])
    return result


def train(work: Work) -> dict[str, Any]:
    from bench import learning_train

    plan = work.plan
    steps = max(plan.evaluations, round(plan.seconds["train"] / plan.step_s))
    every = max(1, steps // plan.evaluations)
    recipe = {
        "target": {"model": str(work.target.resolve()), **plan.recipe["target"]},
        "drafter": {"mask_token_id": text.MASK, **plan.recipe["drafter"]},
        "data": {
            "train": str(work.train_file.resolve()),
            "heldout": str(work.heldout_file.resolve()),
            "max_document": plan.tokens + 2,  # the end token and the line break that a template adds
            **plan.recipe["data"],
        },
        "train": {"steps": steps, "eval_every": every, "checkpoint_every": every, **plan.recipe["train"]},
        "topology": {"targets": 1, "drafters": 2, "devices": [str(work.device)] * 3},
        **{name: value for name, value in plan.recipe.items() if isinstance(value, str)},
    }
    # starting and warming up come on top of the training's own seconds; evaluations too
    result = learning_train.run(recipe, work.folder, 120.0 + 1.25 * plan.seconds["train"])
    for name in ("recipe.yaml", "train.log", "run/metrics.jsonl", "run/state.json"):
        shutil.copy(work.folder / name, work.out)
    return result


def check(work: Work) -> dict[str, Any]:
    from bench import learning_check

    result = learning_check.check(
        work.target,
        work.run / "export",
        work.heldout_file,
        prompt=work.plan.prompt,
        tokens=work.plan.tokens,
        documents=work.plan.heldout,
        device=work.device,
    )
    say(
        f"  tau: trainer {result['tau_trainer']:.4f} ({result['cycles_trainer']:,} cycles), "
        f"greedy loop {result['tau_loop']:.4f} ({result['cycles_loop']:,} cycles), "
        f"difference {result['difference']:+.4f}; committed text equals greedy text in "
        f"{result['committed_equals_greedy']} of {result['documents']}"
    )
    return result


def plot(work: Work) -> dict[str, Any]:
    from bench import learning_plot

    trained, checked = work.done("train") or {}, work.done("check") or {}
    metrics = learning_plot.read_metrics(work.run / "metrics.jsonl")
    finished = trained.get("phase") == "finished"
    learning_plot.draw(
        metrics,
        f"Drafter of {work.plan.config}: {len(metrics):,} steps, 1 target and 2 drafters on one device",
        work.out / "learning.png",
        final_tau=trained.get("tau") if finished else None,
        loop=checked.get("tau_loop"),
    )
    return {"picture": "learning.png"}


RUN: dict[str, Callable[[Work], dict[str, Any]]] = {
    "pretrain": pretrain,
    "generate": generate,
    "train": train,
    "check": check,
    "plot": plot,
}


def main(argv: list[str] | None = None) -> int:
    """0 if tau holds (or no check was asked for), 1 if it does not or a stage failed."""
    options = _parse(argv)
    device = torch.device(options.device) if options.device else default_device()
    work = Work(options.work or options.out / "work", options.out, plan_of(options), device)
    work.folder.mkdir(parents=True, exist_ok=True)
    work.out.mkdir(parents=True, exist_ok=True)
    say(machine(device))
    began = time.monotonic()
    for stage in [options.stage] if options.stage else STAGES:
        if work.done(stage) is not None and not options.stage:
            say(f"== {stage}: done already")
            continue
        say(f"== {stage}")
        at = time.monotonic()
        result = RUN[stage](work)
        result["stage_s"] = round(time.monotonic() - at, 1)
        (work.folder / f"{stage}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        everything = {"machine": machine(device), **{s: work.done(s) for s in STAGES if work.done(s)}}
        (work.out / "result.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
        say(f"   ({result['stage_s']} s, {time.monotonic() - began:.0f} s in all)")
    checked = work.done("check")
    return 0 if checked is None or checked["holds"] else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", nargs="?", choices=STAGES, help="only this one, again if it is done")
    parser.add_argument("--out", type=Path, required=True, help="where the results go")
    parser.add_argument("--work", type=Path, help="models and text between the stages (default OUT/work)")
    parser.add_argument("--minutes", type=float, default=7.0, help="on a GPU, all stages (default 7)")
    parser.add_argument("--step-s", type=float, default=0.08, help="expected seconds of a training step")
    parser.add_argument("--device", help="default: the current GPU, else the CPU")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    return parser.parse_args(argv)


def _tokenizer(work: Work) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(work.target, local_files_only=True)


if __name__ == "__main__":
    sys.exit(main())
