"""What the demo does with each scheme: quantize the bundled model, export it, load the export, compare. No printing here.

Imports torch and transformers; the command imports this module when it runs.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from quark.errors import QuarkError
from quark.evaluate import Comparison, compare, token_windows
from quark.evaluate.logits import evaluating
from quark.hf.shards import check_shards
from quark.log import get_logger
from quark.planning.family import model_type_of
from quark.planning.plan import PlanRow
from quark.plugins import schemes
from quark.runs import ModelQuantizer
from quark.templates import LLMTemplate
from quark.testing import tiny
from quark.torch import export_safetensors, import_model_from_safetensors

__all__ = ["DTYPE", "PROMPT", "Bench", "Refusal", "Row", "Size", "job_name", "one_thread", "quiet", "stored_size"]

DTYPE = torch.bfloat16
PROMPT = "And God said, Let there be"


@attrs.frozen
class Size:
    """What a checkpoint takes on disk: bytes of the given layers' weights and of all tensors; bits per weight of those layers."""

    weight_bytes: int
    total_bytes: int
    bits: float


@attrs.frozen(kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        name: Scheme, and that of the cache if it has one.
        size: On disk.
        comparison: The model loaded from disk beside the float model.
        seconds: To quantize and to export.
        reload_equal: Whether the loaded model's logits equal those of the model in memory, bit for bit.
        words: How the loaded model goes on after `PROMPT`.
    """

    name: str
    size: Size
    comparison: Comparison
    seconds: float
    reload_equal: bool
    words: str


@attrs.frozen(kw_only=True)
class Refusal:
    """A scheme that gave no row.

    Attributes:
        name: As in `Row`.
        reason: Why.
        expected: Whether it was refused before any work, since it does not fit the model, rather than broken.
    """

    name: str
    reason: str
    expected: bool


@attrs.frozen(eq=False)
class Bench:
    """The float model, and the tokens that every scheme is tried with."""

    tokenizer: Any
    reference: nn.Module
    windows: Tensor
    calibration: list[Tensor]

    @classmethod
    def bundled(cls, count: int = 16, length: int = 256) -> Bench:
        """The bundled model, ``count`` windows of ``length`` tokens to evaluate on and others to calibrate with."""
        tokenizer = tiny.tiny_tokenizer()
        windows = token_windows(tokenizer, tiny.held_out_text(), length, limit=count)
        with quiet():
            return cls(tokenizer, tiny.tiny_model(DTYPE), windows, tiny.calibration_batches(8, 128))

    def jobs(self) -> list[tuple[str, str | None]]:
        """Scheme and cache scheme of each run: every registered scheme, and the first that can hold a cache once more with it."""
        names = schemes().names()
        caching = [name for name in names if schemes().get(name).kv_cache is not None][:1]
        return [(name, None) for name in names] + [(name, name) for name in caching]

    def float_row(self, quantized: Sequence[PlanRow]) -> Row:
        """The first row: the model as it comes, its size that of the layers which the schemes quantize."""
        comparison = compare(self.reference, self.reference, self.windows.split(4))
        size = stored_size(tiny.tiny_model_dir(), quantized)
        return Row(name="float", size=size, comparison=comparison, seconds=0.0, reload_equal=True, words=self._words(self.reference))

    def try_scheme(self, scheme: str, cache: str | None, folder: Path) -> tuple[Row | Refusal, tuple[PlanRow, ...]]:
        """Quantize, export to ``folder``, load, compare; and which layers got quantized weights."""
        name = job_name(scheme, cache)
        planned = False
        try:
            with quiet():
                model = tiny.tiny_model(DTYPE)
                config = LLMTemplate.get(str(model_type_of(model.config))).get_config(scheme=scheme, kv_cache_scheme=cache)
                quantizer = ModelQuantizer(config)
                layers = tuple(r for r in quantizer.plan(model).quantized if r.config is not None and r.config.weight is not None)
                planned = True
                return self._carry_out(name, model, quantizer, layers, folder), layers
        except QuarkError as error:
            return Refusal(name=name, reason=str(error), expected=not planned), ()
        except Exception as error:  # a scheme may be anybody's: one that breaks must not end the demonstration of the others
            return Refusal(name=name, reason=f"{type(error).__name__}: {error}", expected=False), ()

    def _carry_out(self, name: str, model: nn.Module, quantizer: ModelQuantizer, layers: Sequence[PlanRow], folder: Path) -> Row:
        started = time.perf_counter()
        quantizer.quantize_model(model, self.calibration)
        export_safetensors(model, str(folder))
        seconds = time.perf_counter() - started
        # Attention computed by the same kernel on both sides: kernels differ in their last bits.
        attention = str(getattr(model.config, "_attn_implementation", "eager"))
        loaded = import_model_from_safetensors(None, str(folder), attn_implementation=attention, device="cpu")
        comparison = compare(loaded, self.reference, self.windows.split(4))
        same = _same_logits(model, loaded, self.windows[:2])
        size, words = stored_size(folder, layers), self._words(loaded)
        return Row(name=name, size=size, comparison=comparison, seconds=seconds, reload_equal=same, words=words)

    def _words(self, model: Any) -> str:
        prompt = self.tokenizer(PROMPT, return_tensors="pt")
        with evaluating(model):
            tokens = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
        return " ".join(str(self.tokenizer.decode(tokens)).split())


def job_name(scheme: str, cache: str | None) -> str:
    """How a run is called in the table."""
    return scheme if cache is None else f"{scheme} + {cache} KV cache"


def stored_size(folder: Path, layers: Sequence[PlanRow]) -> Size:
    """Sizes as the files' headers tell them; a weight's scales and zero points count as part of it."""
    stored = {name: _bytes(*entry) for shard in check_shards(folder) for name, entry in shard.tensors.items()}
    prefixes = tuple(f"{layer.name}.weight" for layer in layers)
    weights = sum(size for name, size in stored.items() if name.startswith(prefixes))
    return Size(weights, sum(stored.values()), 8 * weights / max(1, sum(prod(layer.shape) for layer in layers)))


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor whose dtype is written as safetensors does: ``BF16``, ``I32``, ``F8_E4M3``; a ``BOOL`` takes one."""
    digits = re.search(r"\d+", dtype)
    return prod(shape) * (8 if digits is None else int(digits.group())) // 8


def _same_logits(model: nn.Module, other: nn.Module, tokens: Tensor) -> bool:
    with evaluating(model, other):
        return torch.equal(model(tokens).logits, other(tokens).logits)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread until the end of the block: for matrices this small, threads cost more in waiting than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Our remarks below warnings, and the bars of transformers, kept back until the end of the block: the demo says itself what goes on."""
    log = get_logger()
    level, bars = log.level, transformers_logging.is_progress_bar_enabled()
    log.setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        log.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
