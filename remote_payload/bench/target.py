"""How fast and how right the target engine is at full size, in one run that also tells where the time goes.

    python -m bench.target --config qwen3.5-27b --random-weights
    python -m bench.target --config qwen3.5-27b --random-weights --precision fp8 --reference
    python -m bench.target --config qwen3.5-27b --random-weights --only lean,fp8
    python -m bench.target --small

TFLOP/s count 2 x parameters of the layers that run x tokens (attention's own products are left out), and the
share is of the rate that an 8192³ bf16 product reaches in the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from bench import target_parity, target_parts
from bench.common import (
    CEILING_SIZE,
    clock,
    concluded,
    config_folder,
    default_device,
    machine,
    matrix_rate,
    peak_memory,
    print_kernel_times,
    say,
    section,
    table,
)
from bench.random_target import random_decoder, small_hybrid, taps, text_config
from bench.target_parity import print_agreement
from trainer.data import Document, Row, pack
from trainer.kernels import prove
from trainer.target import TOLERANCE, Target, build, module_engine

SECTIONS = ("parity", "reference", "lean", "profile", "parts", "fp8")
UNASKED = ("parity", "lean", "profile", "parts")
PARITY_TOKENS = 3000  # of the row on which transformers' own modules are the judge


def main(argv: list[str] | None = None) -> int:
    """Print everything; 0 if all sections ran and all comparisons held, 1 if not, 2 for a refusal."""
    options = _parse(argv)
    return concluded(lambda: Bench(options).run(), "comparisons")


class Bench:
    """One model on one device, measured section by section."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = default_device()
        on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.options, self.failures = options, []
        self.config = small_hybrid() if options.small else text_config(config_folder(options.config))
        self.layer_ids = taps(self.config, options.layers)
        self.vocabulary = self.config.vocab_size
        self.ceiling = 0.0
        self.rates: dict[str, float] = {}

    def run(self) -> list[str]:
        say(machine(self.device))
        with section("ceiling", self.failures):
            self._measure_ceiling()
        with section("kernels", self.failures):
            longest = self.options.tokens // self.options.documents
            self.kernels = prove(
                self.config, self.device, self.dtype, tokens=self.options.tokens, longest=longest
            )
            for line in self.kernels.lines:
                say(str(line))
        with section("model", self.failures):
            decoder = self._make()
        row, wanted = self._row(self.options.tokens, self.options.documents), self.options.only
        if "parity" in wanted:
            with section("parity with transformers' own modules", self.failures):
                self._parity(decoder)
        if "reference" in wanted and self.device.type == "cuda":  # elsewhere it cannot pack
            with section("transformers' own modules, same kernels", self.failures):
                self._reference(decoder, row)
        exact: Tensor | None = None
        if "lean" in wanted:
            with section("lean path", self.failures):
                exact = self._lean(decoder, row)
        if "parts" in wanted:
            with section("parts of one layer", self.failures):
                target_parts.measure(decoder, self.config, row, self.device, self.dtype, self.kernels)
        if "fp8" in wanted:
            with section("lean path, fp8", self.failures):
                self._eight_bit(decoder, row, exact)
        return self.failures

    def _measure_ceiling(self) -> None:
        size = CEILING_SIZE if self.device.type == "cuda" else 256
        self.ceiling = matrix_rate(self.device, self.dtype, size)
        say(f"matrix product {size}³: {self.ceiling / 1e12:.3g} TFLOP/s")
        if not self.options.small:
            kept_up = matrix_rate(self.device, self.dtype, size, seconds=2.0)
            say(f"kept up for 2 s: {kept_up / 1e12:.3g} TFLOP/s")

    def _make(self) -> nn.Module:
        began = time.perf_counter()
        decoder = random_decoder(self.config, self.layer_ids[-1] + 1, self.device, self.dtype)
        _synchronize(self.device)
        self.parameters = sum(p.numel() for layer in decoder.layers for p in layer.parameters())
        say(
            f"{len(decoder.layers)} layers of {self.parameters / 1e9:.2f} B parameters, taps "
            f"{list(self.layer_ids)}, random in {time.perf_counter() - began:.1f} s"
        )
        return decoder

    def _row(self, tokens: int, documents: int) -> Row:
        """Documents of equal length, but for a few tokens that leave padding."""
        draw = torch.Generator().manual_seed(0)
        size = tokens // documents
        lengths = [size] * (documents - 1) + [size - 8]
        return pack([self._document(draw, n) for n in lengths], tokens)

    def _document(self, draw: torch.Generator, length: int) -> Document:
        ids = torch.randint(3, self.vocabulary, (length,), generator=draw)
        return Document(ids, torch.ones(length, dtype=torch.bool), "random")

    def _parity(self, decoder: nn.Module) -> None:
        """The engine against the unmodified classes over the same weights, packed and each document alone;
        on the device in the run's dtype with the same kernels."""
        engine = module_engine(decoder, self.layer_ids, self.kernels)
        own = Target(engine, self.layer_ids, self.device, self.dtype, self.kernels, TOLERANCE[self.dtype])
        lean = build(decoder, self.layer_ids, self.device, self.dtype, self.kernels)
        lengths = [1100, 70, 400] if self.device.type == "cuda" else [100, 7, 40]
        target_parity.by_layer(decoder, self.config, lengths, self.dtype, self.kernels)
        draw = torch.Generator().manual_seed(1)
        size = PARITY_TOKENS if self.device.type == "cuda" else 240
        documents = [self._document(draw, n) for n in (size // 3 + 17, size // 7, size // 2 - 30)]
        row = pack(documents, size)
        with torch.no_grad():
            found = torch.cat([lean.features_alone(d.ids) for d in documents])
            wanted = torch.cat([own.features_alone(d.ids) for d in documents])
            packed = lean.features(row)[: len(wanted)]
        print_agreement("alone, lean against transformers", found, wanted, self.layer_ids)
        print_agreement("packed against alone", packed, found, self.layer_ids)
        lean.check_packing(documents, size)
        say(f"check_packing holds (allowed {TOLERANCE[self.dtype]:.0e})")

    def _reference(self, decoder: nn.Module, row: Row) -> None:
        engine = module_engine(decoder, self.layer_ids, self.kernels)
        own = Target(engine, self.layer_ids, self.device, self.dtype, self.kernels, TOLERANCE[self.dtype])
        self._measure("transformers", own, row, repeats=1)

    def _measure(self, name: str, target: Target, row: Row, repeats: int = 3) -> Tensor:
        began = time.perf_counter()
        if name != "transformers":
            target.warm_up(row)  # compares the compiled islands with the eager ones, too
        else:
            target.features(row)
        _synchronize(self.device)
        first = time.perf_counter() - began
        with peak_memory(self.device) as peak:
            seconds = clock(lambda: target.features(row), self.device, repeats=repeats)
        tokens = len(row.ids)
        rate = 2 * self.parameters * tokens / seconds
        self.rates[name] = tokens / seconds
        table(
            ("", "tok/s", "TFLOP/s", "of ceiling", "seconds", "first call s", "peak GiB"),
            [(
                name, f"{tokens / seconds:,.0f}", f"{rate / 1e12:.1f}", f"{rate / self.ceiling:.1%}",
                f"{seconds:.3f}", f"{first:.1f}", f"{peak[0]:.1f}" if peak else "-",
            )],
        )  # fmt: skip
        features = target.features(row)
        if not bool(features[: row.tokens].isfinite().all()):
            raise RuntimeError(f"{name}: features are not finite")
        return features[: row.tokens]

    def _lean(self, decoder: nn.Module, row: Row) -> Tensor:
        target = build(decoder, self.layer_ids, self.device, self.dtype, self.kernels)
        found = self._measure("lean", target, row)
        if "profile" in self.options.only:
            print_kernel_times(lambda: target.features(row), self.device)
        return found

    def _eight_bit(self, decoder: nn.Module, row: Row, exact: Tensor | None) -> None:
        target = build(decoder, self.layer_ids, self.device, self.dtype, self.kernels, precision="fp8")
        found = self._measure("fp8", target, row)
        if exact is not None:
            say(f"fp8 is {self.rates['fp8'] / self.rates['lean']:.3f} x the bf16 path's tokens/s")
            print_agreement("fp8 against bf16", found, exact, self.layer_ids)
        if "profile" in self.options.only:
            print_kernel_times(lambda: target.features(row), self.device, kernels=15)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.target", description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qwen3.5-27b", help="under bench/configs, or a model folder")
    parser.add_argument("--random-weights", action="store_true", help="needed: weights are not read here")
    parser.add_argument("--tokens", type=int, default=49152)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--layers", type=int, help="only the first so many")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16", help="fp8 runs bf16 first")
    parser.add_argument("--reference", action="store_true", help="also transformers' own modules, full size")
    parser.add_argument(
        "--only",
        type=lambda text: tuple(text.split(",")),
        help=f"some of {','.join(SECTIONS)} instead of {','.join(UNASKED)} and what other options add",
    )
    parser.add_argument("--small", action="store_true", help="a tiny hybrid, for a CPU")
    options = parser.parse_args(argv)
    if options.small:
        options.tokens, options.documents, options.layers, options.random_weights = 256, 3, 4, True
    if options.only is None:
        options.only = UNASKED + ("reference",) * options.reference + ("fp8",) * (options.precision == "fp8")
    if unknown := set(options.only) - set(SECTIONS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(SECTIONS)}")
    if not options.random_weights:
        parser.error("say --random-weights: this measures speed and agreement, no trained weights are read")
    if not Path(config_folder(options.config), "config.json").is_file():
        parser.error(f"--config {options.config}: no config.json in {config_folder(options.config)}")
    if options.documents > options.tokens // 64:
        parser.error(f"--documents {options.documents}: at least 64 tokens each, {options.tokens} in all")
    return options


if __name__ == "__main__":
    sys.exit(main())
