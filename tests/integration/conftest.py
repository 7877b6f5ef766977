"""A copy of the project with a sandbox of its own, driven by the commands that a person types."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL_MODEL = ROOT / ".sandbox" / "models" / "smollm2-135m-instruct"
PARTS = ("controller", "remote_payload", "inventory.yaml", "tasks.py", "pyproject.toml")


@dataclass
class Project:
    """`folder` is a clean copy of the tree; its sandbox lies in `sandbox` and dies with the fixture."""

    folder: Path
    sandbox: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PCTRUN_SANDBOX": str(self.sandbox), "NO_COLOR": "1", "COLUMNS": "200"}

    def start(self, *arguments: str, **given: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "invoke", *arguments]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, text=True, **given)

    def invoke(self, *arguments: str, code: int | None = 0, timeout: float = 600, **given: Any) -> str:
        """What it printed on stdout; `code` is the exit code it must have (None: any)."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **given}
        with self.start(*arguments, **pipes) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        said = f"invoke {' '.join(arguments)}\nexit {process.returncode}\n{out}\n{err}"
        assert code is None or process.returncode == code, said
        assert "Traceback" not in err, said
        return out

    def ask(self, task: str, *arguments: str, code: int | None = 0) -> dict[str, Any]:
        """The one box's part of the `--json` document, which keeps its published schema."""
        document: dict[str, Any] = json.loads(self.invoke(task, *arguments, "--json", code=code))
        schema = json.loads((ROOT / "docs/schema" / f"{document['task']}.json").read_text("utf-8"))
        jsonschema.validate(document, schema)
        return document["boxes"][0] if "boxes" in document else document

    def status(self) -> dict[str, Any]:
        return self.ask("status", code=None)

    def sh(self, script: str, code: int | None = 0) -> str:
        """Run a shell script in the container."""
        return self.invoke("exec", "sh", "--arg=-c", f"--arg={script}", code=code)

    def wait_for(
        self, fact: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 300
    ) -> dict[str, Any]:
        """Look until `fact(status)` holds."""
        ends = time.monotonic() + timeout_s
        while not fact(seen := self.status()):
            assert time.monotonic() < ends, f"waited {timeout_s} s in vain: {what}; last seen {seen}"
            time.sleep(0.2)
        return seen


def _project(folder: Path) -> Project:
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(source, folder / "tree" / part, ignore=ignored)
        else:
            (folder / "tree").mkdir(exist_ok=True)
            shutil.copy2(source, folder / "tree" / part)
    return Project(folder / "tree", folder / "sandbox")


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The converted SmolLM2-135M; `make model` puts it there."""
    if not (REAL_MODEL / "tokenizer.json").is_file():
        pytest.skip("no target model: make model")
    return REAL_MODEL


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    made = _project(tmp_path_factory.mktemp("whole"))
    (made.sandbox / "models").mkdir(parents=True)
    yield made
    made.invoke("sandbox.down", "--wipe", "--yes", code=None)


@pytest.fixture(scope="module")
def tiny(project: Project, real_model: Path) -> Project:
    """The same with a target of random weights that takes milliseconds a step, and a recipe that uses it.

    Its tokenizer and template are SmolLM2's, so the examples are tokenised for real.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = project.sandbox / "models" / "tiny"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy2(real_model / name, folder / name)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "vocab_size": 49152, "head_dim": 16, "tie_word_embeddings": True}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    recipe = (project.folder / "remote_payload/recipes/smollm2-135m.yaml").read_text("utf-8")
    recipe = recipe.replace("/models/smollm2-135m-instruct", "/models/tiny")
    (project.folder / "remote_payload/recipes/tiny.yaml").write_text(recipe, "utf-8")
    inventory = (project.folder / "inventory.yaml").read_text("utf-8")
    small = "overrides: {compile: 'off', drafter.heads: 2, drafter.kv_heads: 1, drafter.head_dim: 16, "
    small += (
        "data.budget: 512, train.anchors: 8, train.checkpoint_every: 5, train.eval_every: 0, target.taps: 2}"
    )
    changed = inventory.replace("recipe: smollm2-135m\n", f"recipe: tiny\n    {small}\n", 1)
    (project.folder / "inventory.yaml").write_text(changed, "utf-8")
    return project
