"""A split is understood in every way it can be written; auto is arithmetic; rows go where all expect them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer import topology
from trainer.balance import Costs, best_split, judge
from trainer.config import load_recipe
from trainer.errors import Refusal
from trainer.geometry import DrafterGeometry, resolve
from trainer.schedule import Schedule
from trainer.topology import auto_split, place
from trainer.work import drafter_flops, target_flops

QWEN_27B = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attn_output_gate": True,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
}


@pytest.mark.parametrize("gpus", [0, 1, 4])
@pytest.mark.parametrize(
    ("overrides", "split"),
    [
        (["topology.split=5:3"], (5, 3)),
        (["topology.split='5:3'"], (5, 3)),
        (["topology.targets=5", "topology.drafters=3"], (5, 3)),
        (["topology.drafters=2"], (1, 2)),
    ],
)
def test_a_named_split_is_taken_as_it_stands(tiny_release, monkeypatch, gpus, overrides, split):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    recipe = load_recipe("tiny", tiny_release, overrides)
    devices = place(recipe, resolve(recipe))
    assert devices.split == split
    names = [str(d) for d in devices.targets + devices.drafters]
    assert names == [f"cuda:{i % gpus}" if gpus else "cpu" for i in range(sum(split))]
    assert devices.apart is (gpus >= sum(split))
    assert recipe.rows_per_step == split[1]


def test_a_split_in_a_file_is_no_number_in_base_60(tiny_release):
    path = tiny_release / "recipes/tiny.yaml"
    path.write_text(path.read_text() + "topology:\n  split: 5:3\n")
    assert load_recipe("tiny", tiny_release).topology.named == (5, 3)


def test_devices_are_named_targets_first_and_process_by_process(tiny_release, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    named = ["topology.split=1:2", "topology.devices=[cuda:3, cuda:0, cuda:1]"]
    recipe = load_recipe("tiny", tiny_release, named)
    devices = place(recipe, resolve(recipe))
    assert str(devices) == "1:2 (targets cuda:3; drafters cuda:0 cuda:1)"
    assert devices.apart
    recipe = load_recipe("tiny", tiny_release, ["topology.split=1:1"])
    second = place(recipe, resolve(recipe), process=1, processes=2)
    assert str(second) == "1:1 (targets cuda:2; drafters cuda:3)"


def test_one_device_written_in_two_ways_is_one_device(tiny_release, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    recipe = load_recipe("tiny", tiny_release, ["topology.split=1:1", "topology.devices=[cuda, cuda:0]"])
    devices = place(recipe, resolve(recipe))
    assert str(devices) == "1:1 (targets cuda:0; drafters cuda:0)"
    assert devices.targets == devices.drafters and not devices.apart
    recipe = load_recipe("tiny", tiny_release, ["topology.split=1:1", "topology.devices=[cpu, cpu:0]"])
    assert str(place(recipe, resolve(recipe))) == "1:1 (targets cpu; drafters cpu)"
    both = "topology.devices=[cuda:1, cuda, cuda:1, cuda:0]"
    recipe = load_recipe("tiny", tiny_release, ["topology.split=1:1", both])
    with pytest.raises(Refusal, match="first drafters on cuda:0 cuda:0, and NCCL wants a GPU for each"):
        place(recipe, resolve(recipe), process=1, processes=2)


def test_processes_that_share_two_gpus_have_one_each_and_never_the_same_first_drafter(
    tiny_release, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    recipe = load_recipe("tiny", tiny_release, ["topology.split=1:1"])
    both = [str(place(recipe, resolve(recipe), process, processes=2)) for process in range(2)]
    assert both == ["1:1 (targets cuda:0; drafters cuda:0)", "1:1 (targets cuda:1; drafters cuda:1)"]
    crossed = ["topology.split=1:1", "topology.devices=[cuda:0, cuda:1, cuda:0, cuda:1]"]
    recipe = load_recipe("tiny", tiny_release, crossed)
    with pytest.raises(Refusal, match="first drafters on cuda:1 cuda:1, and NCCL wants a GPU for each"):
        place(recipe, resolve(recipe), process=0, processes=2)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["topology.split=5-3"], r"topology\.split is '5-3': write targets:drafters such as 5:3, or auto"),
        (["topology.split=0:3"], r"write targets:drafters"),
        (["topology.split=5:3", "topology.targets=5"], r"stands beside topology\.targets"),
        (["topology.devices=[cpu, cpu]"], r"topology\.devices needs topology\.split"),
        (["topology.split=1:2", "topology.devices=[cpu, cpu]"], r"names 2 devices: name 3"),
        (["topology.split=1:1", "topology.devices=[cpu, cpu, cpu, cpu]"], r"names 4 devices, 1 process"),
        (["topology.split=1:1", "topology.devices=[cpu, tpu]"], r"'tpu' is no device: write cpu, or cuda:0"),
        (["topology.split=1:1", "topology.devices=[cpu, cuda:-1]"], r"'cuda:-1' is no device"),
        (["topology.split=1:1", "topology.devices=[cuda:0, cuda:256]"], r"cuda:256 is not here, torch"),
        (["topology.split=1:1", "topology.devices=[cuda:0, cuda:129]"], r"cuda:129 is not here, torch"),
        (["topology.split=1:1", "topology.devices=[cuda:0, cuda:7]"], r"cuda:7 is not here, torch sees 2"),
        (["topology.split=1:1", "topology.devices=[cpu, cuda:0]"], r"only cpu or only cuda devices"),
    ],
)
def test_a_topology_that_cannot_be_is_refused_with_the_mend(tiny_release, monkeypatch, overrides, complaint):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Refusal, match=complaint):
        recipe = load_recipe("tiny", tiny_release, overrides)
        place(recipe, resolve(recipe))


def test_the_arithmetic_of_the_27b_target_is_its_parameters():
    assert target_flops(QWEN_27B, 63, 1) == pytest.approx(2 * 24.35e9, rel=1e-3)
    assert target_flops(QWEN_27B, 61, 100) < 100 * target_flops(QWEN_27B, 63, 1)


def test_the_arithmetic_of_a_drafter_row_is_what_torch_counts():
    """fc, one product a weight; the counter sees every product of the real forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    g = DrafterGeometry(
        hidden_size=64,
        vocab_size=512,
        num_target_layers=6,
        target_layer_ids=(1, 3),
        block_size=8,
        mask_token_id=3,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        layer_types=("full_attention",) * 2,
        sliding_window=None,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=None,
    )
    tokens, anchors = 256, 16
    with FlopCounterMode(display=False) as counter:
        row_products(g, tokens, anchors)
    assert drafter_flops(g, tokens, anchors) == counter.get_total_flops()


def row_products(g: DrafterGeometry, tokens: int, anchors: int) -> None:
    """Every matrix product of a row, forward and backward, in plain torch: an independent account."""
    slots = anchors * g.block_size

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, requires_grad=True)

    context = torch.randn(tokens, g.feature_size) @ weight(g.feature_size, g.hidden_size)
    block = torch.randn(slots, g.hidden_size, requires_grad=True)
    total = torch.zeros(())
    for _ in range(g.layers):
        query = block @ weight(g.hidden_size, g.heads * g.head_dim)
        for _ in ("keys", "values"):
            projection = weight(g.hidden_size, g.kv_heads * g.head_dim)
            total = total + (context @ projection).sum() + (block @ projection).sum()
        block = block + query @ weight(g.heads * g.head_dim, g.hidden_size)
        gate, up = (block @ weight(g.hidden_size, g.intermediate_size) for _ in range(2))
        block = block + (gate * up) @ weight(g.intermediate_size, g.hidden_size)
    drafted = block.unflatten(0, (anchors, g.block_size))[:, 1:].flatten(0, 1)
    head = torch.randn(g.hidden_size, g.vocab_size)  # frozen
    (total + (drafted @ head).sum()).backward()


@pytest.mark.parametrize(("gpus", "split"), [(0, (1, 1)), (1, (1, 1)), (2, (1, 1)), (8, (7, 1))])
def test_auto_weighs_both_sides(tiny_release, monkeypatch, gpus, split):
    recipe = load_recipe("tiny", tiny_release, ["train.rows_per_step=3"])
    ratio = 14.6  # of the 27B target and its drafter at 49,152 tokens and 512 anchors
    monkeypatch.setattr(topology, "rows_ratio", lambda *_: ratio)
    assert auto_split(recipe, resolve(recipe), gpus) == split


def test_auto_leaves_no_drafter_without_rows(tiny_release, monkeypatch):
    monkeypatch.setattr(topology, "rows_ratio", lambda *_: 0.3)
    for rows, drafters in ((1, 1), (2, 2), (8, 4)):  # four have two rows each, and so would seven
        recipe = load_recipe("tiny", tiny_release, [f"train.rows_per_step={rows}"])
        assert auto_split(recipe, resolve(recipe), 8) == (8 - drafters, drafters)


def test_auto_refuses_a_target_whose_arithmetic_it_does_not_know(tiny_release, monkeypatch):
    recipe = load_recipe("tiny", tiny_release)
    known = topology.target_text_config(recipe.target.model)
    monkeypatch.setattr(topology, "target_text_config", lambda model: known | {"num_attention_heads": None})
    with pytest.raises(Refusal, match=r"has no 'num_attention_heads', .*: name the split"):
        auto_split(recipe, resolve(recipe), 2)
    other = known | {"layer_types": ["linear_attention"] * 4}
    monkeypatch.setattr(topology, "target_text_config", lambda model: other)
    with pytest.raises(Refusal, match=r"has no 'linear_num_key_heads', .*: name the split"):
        auto_split(recipe, resolve(recipe), 2)


def test_the_best_split_is_the_best_of_all():
    costs = Costs(target_row=4.0, drafter_row=2.0, drafter_step=0.1)
    best = best_split(costs, 8, 4)
    assert all(costs.row(*best, 4) <= costs.row(8 - d, d, 4) for d in range(1, 5))
    assert costs.row(4, 4, 4) == pytest.approx(1.0)
    assert costs.row(5, 3, 4) == pytest.approx((2 * 2.0 + 0.1) / 4)  # one drafter has two rows of the step
    assert best == (4, 4)


def busy(targets: list[float], drafters: list[float]) -> dict[str, float]:
    return {
        "loader": 0.1,
        **{f"target-{n}": share for n, share in enumerate(targets)},
        **{f"drafter-{n}": share for n, share in enumerate(drafters)},
    }


def test_the_starving_side_is_named_with_the_better_split():
    costs = Costs(target_row=4.0, drafter_row=0.4, drafter_step=0.05)
    found = judge((5, 3), busy([1.0] * 5, [0.2, 0.2, 0.2]), costs, 3, apart=True)
    assert (found.starving, found.wait["drafters"]) == ("drafters", 0.8)
    assert (found.advice, found.gain) == ("7:1", pytest.approx(0.4, abs=0.01))
    costs = Costs(target_row=1.0, drafter_row=3.0)
    found = judge((3, 1), busy([0.3, 0.3, 0.3], [0.99]), costs, 4, apart=True)
    assert (found.starving, found.advice) == ("targets", "2:2")


def test_without_need_there_is_no_advice():
    costs = Costs(target_row=1.0, drafter_row=1.0)
    found = judge((2, 2), busy([0.95, 0.97], [0.96, 0.94]), costs, 2, apart=True)
    assert (found.starving, found.advice, found.gain) == (None, None, 0.0)
    shared = judge((1, 1), busy([1.0], [0.2]), Costs(1.0, 0.1), 1, apart=False)
    assert (shared.starving, shared.advice) == ("drafters", None)  # one GPU: no other split
    early = judge((1, 1), busy([1.0], [0.2]), None, 1, apart=True)
    assert early.row_s == {} and early.advice is None


@given(rows=st.integers(1, 9), drafters=st.integers(1, 4), processes=st.integers(1, 3))
def test_every_row_has_exactly_one_place(rows, drafters, processes):
    schedules = [Schedule(rows, drafters, p, processes) for p in range(processes)]
    seen = []
    for step in range(3):
        for process, schedule in enumerate(schedules):
            turns = schedule.step(step)
            assert [t.row for t in turns] == sorted(t.row for t in turns)
            mine = [schedule.of_drafter(step, d) for d in range(drafters)]
            assert sorted(itertools.chain(*mine), key=lambda t: t.row) == turns
            for turn in turns:
                place = turn.row - step * rows
                assert place % (drafters * processes) == process * drafters + turn.drafter
            seen += [t.row for t in turns]
    assert sorted(seen) == list(range(3 * rows))
