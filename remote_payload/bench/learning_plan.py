"""How big a learning run is and where its stages leave their results; the same path on a GPU and on a CPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import learning_text as text


class StageFailed(Exception):
    """A stage ended without its result, for a reason that is said in one line (or in the trainer's own)."""


OVERHEAD_S = 160.0  # on an H200: imports and text 25, kernels 20, start of the trainers 75, check 40
# Of the rest. 2,000 answers were overfitted, held-out tau fell from 2.08 after 20 epochs to 1.85 after 36.
SHARES = {"pretrain": 0.45, "generate": 0.2, "train": 0.35}


@dataclass(frozen=True)
class Plan:
    """Sizes and times. `seconds` of each stage's work proper; `step_s` is a guess that the run corrects."""

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


def plan_of(minutes: float, small: bool) -> Plan:
    rest = max(30.0, minutes * 60 - OVERHEAD_S)
    seconds = {stage: share * rest for stage, share in SHARES.items()}
    if small:
        return Plan(
            config="hybrid-tiny",
            vocabulary=640,
            packages=(),
            samples=400,
            prompt=24,
            tokens=48,
            pretrain_steps=40,
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
                "train": {"lr": 3e-3, "anchors": 16, "gamma": 4, "eval_documents": 4},
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
        pretrain_batch=128,
        pretrain_lr=1.5e-3,
        seconds=seconds,
        conversations=6_000,
        answer_batch=4096,
        heldout=64,
        shortest=16,
        step_s=0.12,
        evaluations=6,
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
            "train": {
                "lr": 1e-3,
                "beta2": 0.99,
                "anchors": 512,
                "gamma": 7,
                "rows_per_step": 2,
                "eval_documents": 32,
            },
            "compile": "on",
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

    def run(self, name: str) -> Path:
        return self.folder / f"run-{name}"

    def keep(self, stage: str, result: dict[str, Any]) -> None:
        path = self.folder / f"{stage}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def done(self, stage: str) -> dict[str, Any] | None:
        path = self.folder / f"{stage}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
