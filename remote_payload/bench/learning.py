"""Does it learn? A hybrid target made here, its own answers, the real trainer, tau by another program too.

    python -m bench.learning --out DIR                 everything, about five minutes on one H200
    python -m bench.learning --out DIR --small         everything on two CPU cores in a minute: the path
    python -m bench.learning train --out DIR           one stage, again if it is done

Without a stage's name all run whose results are not there yet:
  pretrain   a Qwen3.5-type model on the Python sources of this machine
  generate   its own greedy answers: text to train on, text held out
  train      `python -m trainer` with the recipe written beside the run: 1 target and 2 drafters, one device;
             on a GPU a second run beside it, on features of `target.precision: fp8`
  check      tau of the export by the trainer and by bench/greedy_loop.py on the same held-out prompts; what
             fp8 features do to tau, in training and in use
  plot       loss, accuracy and tau against steps and time
Results go to --out: result.json, learning.png, recipes, logs, metrics; models and text to --work.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch

from bench import learning_text as text
from bench.common import config_folder, default_device, machine, say
from bench.learning_plan import Plan, StageFailed, Work, plan_of

EXAMPLES = 2  # answers that are shown


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
    from transformers import AutoTokenizer

    from bench import greedy_loop, learning_target

    plan = work.plan
    tokenizer = AutoTokenizer.from_pretrained(work.target, local_files_only=True)
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
            raise StageFailed(f"no usable answer ({dict(dropped)}): train the target longer")
        with file.open("w", encoding="utf-8") as lines:
            for number, (prompt, answer) in enumerate(good):
                line = learning_target.conversation(tokenizer, f"{name}-{number}", prompt, answer)
                lines.write(json.dumps(line) + "\n")
        result[name] = {
            "conversations": len(good),
            "answer_tokens": sum(len(answer) for _, answer in good),
            "ended": sum(answer[-1] == text.END for _, answer in good) / len(good),
            "dropped": dict(dropped),
            "greedy_by_a_whole_forward": same,
        }
        say(f"  {json.dumps(result[name])}")
        for prompt, answer in good[:EXAMPLES]:
            say("  ---\n" + text.decode(tokenizer, [prompt + answer])[0])
    return result


def train(work: Work) -> dict[str, Any]:
    """On a GPU two drafters at once, on bf16 and on fp8 features: starts and host work overlap."""
    precisions = ("bf16", "fp8") if work.device.type == "cuda" else ("bf16",)
    with ThreadPoolExecutor() as pool:
        runs = {precision: pool.submit(_train, work, precision) for precision in precisions}
    result = {"bf16": runs["bf16"].result()}
    if "fp8" in runs:
        try:
            result["fp8"] = runs["fp8"].result()
        except StageFailed as error:  # the main run stands by itself
            say(f"  fp8: {error}")
            result["fp8"] = {"failed": str(error)}
    return result


def _train(work: Work, precision: str) -> dict[str, Any]:
    from bench import learning_train

    plan = work.plan
    steps = max(plan.evaluations, round(plan.seconds["train"] / plan.step_s))
    every = max(1, steps // plan.evaluations)
    recipe = {
        "target": {
            "model": str(work.target.resolve()),
            "precision": None if precision == "bf16" else precision,
            **plan.recipe["target"],
        },
        "drafter": {"mask_token_id": text.MASK, **plan.recipe["drafter"]},
        "data": {
            "train": str(work.train_file.resolve()),
            "heldout": str(work.heldout_file.resolve()),
            "max_document": plan.tokens + 2,  # the end token and the line break that a template adds
            **plan.recipe["data"],
        },
        "train": {"steps": steps, "eval_every": every, "checkpoint_every": every, **plan.recipe["train"]},
        "topology": {"split": "1:2", "devices": [str(work.device)] * 3},
        "compile": plan.recipe["compile"],
    }
    run = work.run(precision)
    try:
        return learning_train.run(recipe, run, plan.seconds["train"], plan.evaluations, label=precision)
    finally:
        for file in ("recipe.yaml", "train.log", "metrics.jsonl", "state.json"):
            if (run / file).exists():
                shutil.copy(run / file, work.out / f"{precision}.{file}")


def _trained(work: Work) -> dict[str, dict[str, Any]]:
    """The runs of `train` that ended well."""
    done = work.done("train") or {}
    return {name: done[name] for name in ("bf16", "fp8") if "phase" in done.get(name, {})}


def check(work: Work) -> dict[str, Any]:
    from bench import learning_check

    plan = work.plan
    return learning_check.check(
        work.target,
        {name: work.run(name) / "export" for name in _trained(work)},
        learning_check.heldout_documents(work.target, work.heldout_file, plan.tokens),
        tokens=plan.tokens,
        in_curve=plan.recipe["train"]["eval_documents"],
        device=work.device,
    )


def plot(work: Work) -> dict[str, Any]:
    from bench import learning_plot

    curves = {
        # the last step's tau stands in the state; a run that was stopped ends with an earlier one
        f"{name} features": learning_plot.Curve(
            work.run(name) / "metrics.jsonl", run["tau"] if run["phase"] == "finished" else None
        )
        for name, run in _trained(work).items()
    }
    checked = work.done("check")
    learning_plot.draw(
        curves,
        f"Drafter of {work.plan.config}: 1 target and 2 drafters on one device",
        work.out / "learning.png",
        loop=checked["tau_loop_in_curve"] if checked else None,
    )
    return {"picture": "learning.png"}


STAGES: dict[str, Callable[[Work], dict[str, Any]]] = {
    "pretrain": pretrain,
    "generate": generate,
    "train": train,
    "check": check,
    "plot": plot,
}
NEEDS = {"generate": "pretrain", "train": "generate", "check": "train", "plot": "train"}


def main(argv: list[str] | None = None) -> int:
    """0 if tau holds or was not checked, 1 if it does not hold or a stage failed."""
    options = _parse(argv)
    device = torch.device(options.device) if options.device else default_device()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    plan: Plan = plan_of(options.minutes, options.small)
    work = Work(options.work or options.out / "work", options.out, plan, device)
    work.folder.mkdir(parents=True, exist_ok=True)
    work.out.mkdir(parents=True, exist_ok=True)
    say(machine(device))
    began = time.monotonic()
    for stage in [options.stage] if options.stage else STAGES:
        if not options.stage and work.done(stage):
            continue
        if stage in NEEDS and not work.done(NEEDS[stage]):
            say(f"{stage} needs what {NEEDS[stage]} leaves in {work.folder}: run that first")
            return 1
        say(f"== {stage}")
        at = time.monotonic()
        try:
            result = STAGES[stage](work)
        except StageFailed as error:
            say(f"{stage} failed: {error}")
            return 1
        work.keep(stage, {**result, "stage_s": round(time.monotonic() - at, 1)})
        everything = {"machine": machine(device), **{s: work.done(s) for s in STAGES if work.done(s)}}
        (work.out / "result.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
        say(f"   ({time.monotonic() - at:.1f} s, {time.monotonic() - began:.0f} s in all)")
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
    parser.add_argument("--minutes", type=float, default=4.8, help="on a GPU, all stages (default 4.8)")
    parser.add_argument("--device", help="default: the current GPU, else the CPU")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
