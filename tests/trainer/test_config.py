"""A recipe is refused in one line with place and mend; its hash covers the trajectory and nothing else."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import config_hash, load_recipe
from trainer.errors import Refusal
from trainer.geometry import resolve, tap_layer_ids

PAYLOAD = Path(__file__).resolve().parents[2] / "remote_payload"


def edited(release: Path, old: str, new: str) -> Path:
    path = release / "recipes/tiny.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return release


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("lr: 0.003", "learning: 0.003", r"tiny\.yaml:\d+: unknown key train\.learning; known: "),
        (
            "anchors: 16",
            "ancors: 16",
            r"tiny\.yaml:\d+: unknown key train\.ancors; did you mean train\.anchors\?",
        ),
        ("steps: 20", "steps: many", r"tiny\.yaml:\d+: train\.steps is 'many': it must be a whole number"),
        ("steps: 20", "steps: 0", r"tiny\.yaml:\d+: train\.steps is 0: it must be above 0"),
        ("  steps: 20\n", "", r"tiny\.yaml:\d+: train\.steps is missing: write it"),
        ("heads: 4", "heads: 5", r"drafter\.heads is 5: it must be a multiple of kv_heads 2"),
        ("max_document: 128", "max_document: 1280", r"above data\.budget 256: a document must fit a row"),
        ("  sliding_window: 16\n", "", r"drafter\.sliding_window is missing"),
        ("layers: 2", "layers: 3", r"names 2 layers, drafter\.layers is 3: make them agree"),
        ("steps: 20", "steps: 20\n  steps: 21", r"tiny\.yaml:\d+: train\.steps is written twice, first at"),
        ("target:", "target: [", r"tiny\.yaml:\d+: not YAML"),
        ("compile: 'off'", "compile: sometimes", r"compile is 'sometimes': choose auto, on or off"),
    ],
)
def test_a_bad_recipe_is_refused_with_its_line_and_the_mend(tiny_release, old, new, complaint):
    with pytest.raises(Refusal, match=complaint) as refusal:
        load_recipe("tiny", edited(tiny_release, old, new))
    assert "\n" not in str(refusal.value)


def test_overrides_come_as_a_mapping_or_as_assignments_and_are_checked_alike(tiny_release):
    for overrides in (
        {"train.steps": 7, "compile": "on"},
        ["train.steps=7", "compile=on"],
        {"train.steps": "7"},
    ):
        assert load_recipe("tiny", tiny_release, overrides).train.steps == 7
    assert load_recipe("tiny", tiny_release, ["train.lr=6e-4"]).train.lr == 6e-4
    with pytest.raises(
        Refusal, match=r"override train\.step=7: unknown key train\.step; did you mean train\.steps"
    ):
        load_recipe("tiny", tiny_release, ["train.step=7"])
    for nonsense in ("train.steps", "=7", "train..steps=7"):
        with pytest.raises(Refusal, match=r"write key=value"):
            load_recipe("tiny", tiny_release, [nonsense])
    with pytest.raises(Refusal, match=r"override train\.steps=\[{60}: the value is not a YAML scalar"):
        load_recipe("tiny", tiny_release, ["train.steps=" + "[" * 3000])
    with pytest.raises(Refusal, match=r"override trian\.steps=7: unknown key trian; did you mean train\?"):
        load_recipe("tiny", tiny_release, ["trian.steps=7"])


def test_a_missing_recipe_names_those_that_are_there(tiny_release):
    for name in ("huge", "long" * 1000):  # no file can have the second
        with pytest.raises(Refusal, match=rf"no recipe '{name}' .*; there are: tiny"):
            load_recipe(name, tiny_release)


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("train.checkpoint_every=1", True),
        ("train.eval_every=3", True),
        ("compile=on", True),
        ("topology.queue_rows=5", True),
        ("train.steps=21", False),  # the cosine ends elsewhere
        ("train.seed=1", False),
        ("topology.drafters=2", False),  # a step is as many rows as the recipe names drafters
        ("topology.targets=3", True),
        ("topology.split=2:1", True),
        ("train.rows_per_step=1", True),  # what one drafter makes of a step anyway
        ("train.rows_per_step=2", False),
        ("target.dtype=bfloat16", False),
    ],
)
def test_the_hash_covers_what_changes_the_trajectory(tiny_release, override, same):
    plain = config_hash(load_recipe("tiny", tiny_release))
    assert (config_hash(load_recipe("tiny", tiny_release, [override])) == plain) is same


def describe(*arguments: str) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainer.describe", *arguments],
        cwd=PAYLOAD,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "torch" not in {line.rsplit("|")[-1].strip() for line in done.stderr.splitlines()}
    assert done.stdout.count("\n") == 1
    return done.returncode, json.loads(done.stdout)


def test_describing_a_recipe_needs_no_torch_and_prints_one_json_line(tiny_release, tiny_target):
    arguments = ("tiny", "--release-dir", str(tiny_release), "--overrides")
    code, answer = describe(*arguments, '{"train.steps": 50}')
    recipe = load_recipe("tiny", tiny_release, {"train.steps": 50})
    assert code == 0
    assert answer == {
        "ok": True,
        "name": "tiny",
        "config_hash": config_hash(recipe),
        "model": str(tiny_target),
        "steps": 50,
        "checkpoint_bytes": 12 * resolve(recipe).parameter_count(),
        "budget": 256,
        "hybrid": False,
        "values": json.loads(json.dumps(dataclasses.asdict(recipe))),
    }
    assert describe(*arguments, '{"target.model": "/nowhere"}')[1]["checkpoint_bytes"] is None
    code, answer = describe(*arguments, '{"train.stepz": 50}')
    assert code == 2
    assert answer["ok"] is False
    assert "did you mean train.steps?" in answer["error"]


def test_taps_follow_the_papers_formula():
    assert tap_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert tap_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert tap_layer_ids(30, 1) == (15,)


def test_a_mask_token_that_cannot_serve_is_refused(tiny_release):
    for override, complaint in (
        ("drafter.mask_token_id=260", "has no embedding row: the vocabulary ends at 259"),
        ("drafter.mask_token_id=2", "is the target's end or padding token"),
        ("drafter.mask_token_id=null", "model type 'llama' has no known one"),
    ):
        with pytest.raises(Refusal, match=complaint):
            resolve(load_recipe("tiny", tiny_release, [override]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", []),
        ("layer_types", 3),
        ("num_attention_heads", "x"),
        ("num_key_value_heads", [2]),
        ("vocab_size", True),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -1.0),
        ("max_position_embeddings", "x"),
        ("eos_token_id", "x"),
    ],
)
def test_a_targets_configuration_of_another_kind_is_refused_with_its_key(tmp_path, tiny_release, key, value):
    recipe = load_recipe("tiny", tiny_release)
    config = json.loads((Path(recipe.target.model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(Refusal, match=rf"{key} is "):
        resolve(load_recipe("tiny", tiny_release, {"target.model": str(tmp_path)}))


def test_more_taps_than_layers_are_refused_before_they_are_counted_out(tiny_release):
    with pytest.raises(Refusal, match=r"target\.taps is 1000: .* has 4 layers"):
        resolve(load_recipe("tiny", tiny_release, {"target.layer_ids": None, "target.taps": 1000}))


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("train.lr", ".nan", "write a finite number"),
        ("train.gamma", ".inf", "write a finite number"),
        ("train.beta2", "1.0", "it is a decay, below 1"),
        ("train.lr", 10**400, "it must be a number"),
        ("train.seed", 10**30, "is too large: 9,223,372,036,854,775,807 is the most"),
        ("drafter.sliding_window", 10**30, "is too large: 2,147,483,647 is the most"),
        ("train.lr", 1e308, r"is 1e\+308, which 32 bits do not hold"),
        ("train.gamma", 1e-320, "which 32 bits do not hold"),
        ("topology.cpu_threads", 100_000, "is too large: 1,024 is the most"),
        ("topology.drafters", 10**9, "is too large: 256 is the most"),
        ("topology.split", "999999999:1", "names 999,999,999 targets: 256 are the most"),
        ("drafter.layers", 10**9, "is too large: 1,000 is the most"),
    ],
)
def test_numbers_that_no_optimizer_takes_are_refused(tiny_release, key, value, complaint):
    with pytest.raises(Refusal, match=complaint):
        load_recipe("tiny", tiny_release, {key: value})


def test_every_shipped_recipe_loads():
    names = [path.stem for path in (PAYLOAD / "recipes").glob("*.yaml")]
    assert names
    for name in names:
        assert load_recipe(name, PAYLOAD).name == name


def test_the_split_stays_out_of_the_hash_once_the_rows_of_a_step_are_named(tiny_release):
    rows = "train.rows_per_step=6"
    splits = (["topology.split=5:3"], ["topology.drafters=2"], ["topology.split=auto"])
    hashes = {config_hash(load_recipe("tiny", tiny_release, [rows, *split])) for split in splits}
    assert len(hashes) == 1
