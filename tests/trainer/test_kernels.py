"""The proof takes the fastest kernel that is right, and never one that only can be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from trainer import kernels
from trainer.errors import Refusal
from trainer.kernel_roles import Candidate, Role, document_convolution, roles
from trainer.kernels import KernelReport, Line, prove, race, text_config
from trainer.packing import Layout
from trainer.target_islands import causal_convolution

CPU = torch.device("cpu")
CONFIGS = Path(__file__).resolve().parents[2] / "remote_payload" / "bench" / "configs"
HYBRID = str(CONFIGS / "qwen3.5-27b")


class Watch:
    """Seconds that only `sleep` lets pass, so that a loaded machine changes no race."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


WATCH = Watch()


@pytest.fixture(autouse=True)
def _races_on_a_cpu_go_by_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "time", WATCH)


def convolution_role(*candidates: Candidate) -> Role:
    """The 27B's role, sixteen channels narrow, with a reference that anything beats."""
    config = text_config(HYBRID)
    config.linear_num_key_heads = config.linear_num_value_heads = 1
    config.linear_key_head_dim, config.linear_value_head_dim = 4, 8

    def slowly(*arguments: object) -> torch.Tensor:
        WATCH.sleep(0.06)
        return document_convolution(*arguments)

    role = next(role for role in roles(config) if role.name == "convolution")
    changes = {"reference": slowly, "fallback": slowly, "behind": F.conv1d, "candidates": candidates}
    return replace(role, **changes, mend="/opt/python -m pip install flash-linear-attention")


def run(role: Role) -> tuple[Line, object]:
    return race(role, CPU, torch.float32, tokens=256, longest=64)


def working(pause: float = 0.0):
    def convolve(*arguments: object) -> torch.Tensor:
        WATCH.sleep(pause)
        return document_convolution(*arguments)

    return convolve


def test_the_fastest_right_candidate_wins() -> None:
    slower, faster = working(0.01), working()
    role = convolution_role(
        Candidate("slower", lambda: (slower, slower)), Candidate("faster", lambda: (faster, faster))
    )
    line, chosen = run(role)
    assert chosen is faster
    assert line.fast
    assert line.milliseconds < line.reference_milliseconds
    assert (line.why, line.mend) == ("", "")


def test_a_kernel_that_works_is_taken_however_fast_the_reference_is_on_the_sample() -> None:
    slow = working(0.4)
    line, chosen = run(convolution_role(Candidate("slow", lambda: (slow, slow))))
    assert chosen is slow
    assert line.fast
    assert line.milliseconds > line.reference_milliseconds


def test_a_kernel_that_ignores_the_borders_is_not_taken_however_fast() -> None:
    def leaky(x, weight, row):
        return document_convolution(x, weight, Layout.of([len(x)], CPU))

    line, chosen = run(convolution_role(Candidate("leaky", lambda: (leaky, leaky))))
    assert chosen is not leaky
    assert not line.fast
    assert line.why.startswith("leaky: ValueError: its result is wrong by ")
    assert line.mend == "/opt/python -m pip install flash-linear-attention"


def test_one_package_is_enough_and_one_that_breaks_does_no_harm() -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image is available for execution on the device\nstack")

    good = working()
    line, chosen = run(convolution_role(Candidate("broken", broken), Candidate("good", lambda: (good, good))))
    assert chosen is good
    assert line.fast
    assert line.why == "broken: RuntimeError: no kernel image is available for execution on the device"
    assert not KernelReport("cuda:0", (line,), good).state()["slow"]


def test_a_package_that_is_not_there_is_no_news_where_another_works() -> None:
    def absent() -> None:
        import a_package_that_nobody_has  # noqa: F401

    good = working()
    line, _ = run(convolution_role(Candidate("absent", absent), Candidate("good", lambda: (good, good))))
    assert (line.fast, line.why, line.mend) == (True, "", "")


def test_a_kernel_that_fails_on_a_whole_row_alone_is_not_taken() -> None:
    def narrow(x: torch.Tensor, *rest: object) -> torch.Tensor:
        if len(x) > kernels.COMPARED_TOKENS:
            raise RuntimeError("more blocks than a launch may have")
        return document_convolution(x, *rest)

    narrow_one, good = Candidate("narrow", lambda: (narrow, narrow)), working(0.01)
    whole = {"tokens": 2 * kernels.COMPARED_TOKENS, "longest": 4096}
    line, chosen = race(convolution_role(narrow_one), CPU, torch.float32, **whole)
    assert chosen is not narrow
    assert not line.fast
    assert line.why == "narrow: RuntimeError: more blocks than a launch may have"
    both = convolution_role(narrow_one, Candidate("good", lambda: (good, good)))
    line, chosen = race(both, CPU, torch.float32, **whole)
    assert chosen is good
    assert line.fast


def test_what_is_not_installed_is_named_with_the_line_that_installs_it() -> None:
    def absent() -> None:
        import a_package_that_nobody_has  # noqa: F401

    line, _ = run(convolution_role(Candidate("flash-linear-attention", absent)))
    report = KernelReport("cuda:0", (line,), attention=working())
    with pytest.raises(Refusal) as refusal:
        report.require_fast(allow_slow=False)
    text = str(refusal.value)
    assert "\n" not in text
    assert "reference kernels on cuda:0: convolution by torch.conv1d" in text
    assert "flash-linear-attention: a_package_that_nobody_has is not installed" in text
    assert "/opt/python -m pip install flash-linear-attention" in text
    assert "--allow-slow-kernels" in text
    report.require_fast(allow_slow=True)
    (said,) = report.state()["slow"]
    assert said.startswith("convolution: flash-linear-attention: a_package_that_nobody_has is not installed")


def test_the_row_of_a_proof_has_its_length_and_borders_off_the_chunks() -> None:
    for tokens, longest in ((32_768, 4096), (256, 64), (100, 4096), (49_152, 4096)):
        lengths = list(kernels._lengths(tokens, longest))
        assert sum(lengths) == tokens
        assert max(lengths) <= max(longest, 1)
        assert min(lengths) > 0
        assert lengths[-2] % 2 == 1


def test_the_reference_convolution_is_the_layers_own() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn

    torch.manual_seed(0)
    x, weight = torch.randn(50, 6), torch.randn(6, 4)
    found = document_convolution(x, weight, Layout.of([20, 1, 29], CPU))
    alone = [causal_conv1d_fn(p.t()[None], weight, activation="silu")[0].t() for p in x.split([20, 1, 29])]
    assert torch.allclose(found, torch.cat(alone), atol=1e-6)


def test_the_engines_own_convolution_is_the_reference_one() -> None:
    x, weight, row = kernels._arguments(convolution_role(), 256, 64, CPU, torch.float32)
    own = causal_convolution(x, weight, row.positions)
    assert torch.allclose(own, document_convolution(x, weight, row), atol=1e-5)


def test_what_the_engine_has_built_in_is_not_handed_to_it() -> None:
    own = working()
    line, chosen = run(convolution_role(Candidate("torch", lambda: (own, own), built_in=True)))
    assert chosen is None
    assert line.fast
    assert line.milliseconds < line.reference_milliseconds


def test_on_a_cpu_the_reference_is_no_shortcoming(capsys: pytest.CaptureFixture[str]) -> None:
    report = prove(text_config(HYBRID), CPU, torch.float32)
    assert [line.role for line in report.lines] == ["attention", "recurrence", "convolution"]
    assert not report.slow
    assert "torch_chunk_gated_delta_rule" in report.line("recurrence").function
    report.require_fast(allow_slow=False)
    if not torch.cuda.is_available():
        assert kernels.main([HYBRID, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["reports"]
        assert found["fast"]


def test_exit_codes_tell_slow_from_full_from_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Line("recurrence", "torch_chunk_gated_delta_rule", False, 9.0, 9.0, "fla is not installed", "mend")
    monkeypatch.setattr(kernels, "prove", lambda *_, **__: KernelReport("cuda:0", (slow,), working()))
    assert kernels.main([HYBRID]) == kernels.SLOW
    assert "SLOW  recurrence by torch_chunk_gated_delta_rule" in capsys.readouterr().out

    def full(*_: object, **__: object) -> None:
        raise kernels.NoRoom("cuda:0 has 0.1 of 80.0 GiB free")

    monkeypatch.setattr(kernels, "prove", full)
    assert kernels.main([HYBRID, "--json"]) == kernels.NO_ROOM
    assert json.loads(capsys.readouterr().out)["error"].startswith("cuda:0 has")
    assert kernels.main(["no-such-recipe"]) == 2
    assert capsys.readouterr().err.startswith("refused: no recipe 'no-such-recipe'")


@pytest.mark.parametrize("program", ["trainer.__main__", "bench.common"])
def test_without_an_agent_tuning_is_kept_and_the_memo_that_threads_would_share_is_off(program) -> None:
    names = ("TRITON_CACHE_DIR", "TRITON_CACHE_AUTOTUNING", "FLA_CACHE_RESULTS", "FLA_DISABLE_TENSOR_CACHE")
    code = f"import os, {program}; print([os.environ[name] for name in {names}])"
    bare = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run([sys.executable, "-c", code], cwd=CONFIGS.parents[1], env=bare, capture_output=True)
    assert done.stdout.decode().endswith("/.triton/cache', '1', '1', '1']\n"), done.stderr
    fla = [os.environ[name] for name in ("FLA_DISABLE_TENSOR_CACHE", "FLA_FLASH_QLA")]
    assert fla == ["1", "0"]  # set by importing the proof alone


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_role_of_a_hybrid_is_fast_on_this_gpu(dtype: torch.dtype) -> None:
    pytest.importorskip("fla")
    config = text_config(HYBRID)
    device = torch.device("cuda:0")
    prove(config, device, dtype, tokens=8192)  # tuning
    before = torch.cuda.memory_allocated()
    began = time.monotonic()
    report = prove(config, device, dtype, tokens=8192)
    assert time.monotonic() - began < 3
    assert torch.cuda.memory_allocated() == before
    assert report.line("recurrence").function.startswith(("fla.", "flash_qla."))
    slow = {line.role for line in report.slow}
    assert slow == set() if dtype == torch.bfloat16 else slow <= {"attention"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_full_gpu_is_not_taken_for_a_slow_one() -> None:
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - (256 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(kernels.NoRoom, match="too little to try the attention"):
        prove(text_config(HYBRID), torch.device("cuda:0"), torch.bfloat16)
    del filler
    torch.cuda.empty_cache()
