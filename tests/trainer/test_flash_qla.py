"""FlashQLA runs where it is right and faster, and no row waits for the device or a compiler because of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from trainer import kernels, packed_ops
from trainer.kernel_roles import Role, roles
from trainer.packing import Layout

CPU = torch.device("cpu")
ODD = [512, 300, 1, 1000, 64, 235]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def recurrence(config) -> Role:
    return next(role for role in roles(config) if role.name == "recurrence")


def packages(config) -> list[str]:
    return [candidate.package for candidate in recurrence(config).candidates]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (Qwen3_5TextConfig(), ["flash-linear-attention", "flash-qla"]),
        (Qwen3_5TextConfig(linear_value_head_dim=64), ["flash-linear-attention"]),  # 128 alone
        (Qwen3_5MoeTextConfig(), ["flash-linear-attention"]),  # transformers' modules call fla by themselves
    ],
)
def test_it_is_tried_only_where_the_engine_would_call_it(config, wanted: list[str]) -> None:
    assert packages(config) == wanted


def test_where_it_cannot_run_the_delta_rule_is_looked_for_as_ever() -> None:
    """Here there is neither package nor GPU: the finding names both, the mend the one that is needed."""
    if torch.cuda.is_available():
        pytest.skip("both may be here")
    config = Qwen3_5TextConfig(linear_num_key_heads=1, linear_num_value_heads=2)
    line, chosen = kernels.race(recurrence(config), CPU, torch.float32, tokens=256, longest=64)
    assert chosen is packed_ops.document_recurrence
    assert not line.fast
    assert [part.partition(":")[0] for part in line.why.split("; ")] == packages(config)
    assert "flash-linear-attention" in line.mend


@pytest.fixture(scope="module")
def loaded():
    """(role of the 27B, the call), with all its kernels compiled."""
    pytest.importorskip("flash_qla")
    folder = Path(__file__).resolve().parents[2] / "remote_payload" / "bench" / "configs" / "qwen3.5-27b"
    role = recurrence(kernels.text_config(str(folder)))
    return role, role.candidates[1].load()[0]


def arguments(role: Role, lengths: list[int], seed: int = 0) -> tuple:
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    return role.sample(Layout.of(lengths, torch.device("cuda")), draw)


@pytest.mark.gpu
@needs_gpu
def test_its_documents_do_not_see_each_other(loaded) -> None:
    role, call = loaded
    given = arguments(role, ODD)
    wanted = packed_ops.document_recurrence(*(t.float() for t in given[:5]), given[5])
    found = call(*given).float()
    assert (found - wanted).abs().max() < 1e-2 * wanted.abs().max()  # 0.57 % on an H200, fla 0.60 %


@pytest.mark.gpu
@needs_gpu
def test_no_number_of_documents_is_compiled_after_it_was_loaded(loaded) -> None:
    role, call = loaded
    for documents in (1, 2, 3, 4, 5, 9, 30):
        given = arguments(role, [200] * documents)
        began = time.monotonic()
        call(*given)
        torch.cuda.synchronize()
        assert time.monotonic() - began < 3  # nvcc takes 17 s for one


@pytest.mark.gpu
@needs_gpu
def test_a_row_never_waits_for_the_device(loaded) -> None:
    role, call = loaded
    *given, _ = arguments(role, ODD)
    torch.cuda.set_sync_debug_mode("error")
    try:
        row = Layout.of(list(reversed(ODD)), torch.device("cuda"))
        first, second = call(*given, row), call(*given, row)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)  # and what was told once a row holds for the next layer


@pytest.mark.gpu
@needs_gpu
def test_threads_on_streams_of_their_own_get_the_same_bits(loaded) -> None:
    role, call = loaded
    layouts = [ODD, [2112], [1056] * 2, [64] * 33, [700, 1412], [2000, 112]]
    *given, _ = arguments(role, ODD)
    wanted = [call(*given, Layout.of(lengths, torch.device("cuda"))) for lengths in layouts]
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work(first: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for turn in range(24):
                    number = (first + turn) % len(layouts)
                    mine = [t + 0 for t in given]
                    found = call(*mine, Layout.of(layouts[number], torch.device("cuda")))
                    stream.synchronize()
                    if not torch.equal(found, wanted[number]):
                        wrong.append(number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_card_has_the_same_bits(loaded) -> None:
    role, call = loaded
    *given, row = arguments(role, ODD)
    wanted = call(*given, row)
    other = torch.device("cuda:1")
    with torch.cuda.device(other):
        found = call(*(t.to(other) for t in given), Layout.of(ODD, other))
        torch.cuda.synchronize(other)
    assert found.device == other
    assert torch.equal(found.cpu(), wanted.cpu())
