"""The steps of ``quark demo`` for each scheme.

The demo quantizes the bundled model, exports it, loads the export, and compares it with the float model. This
module prints nothing. It imports torch and transformers, so the command imports the module only when it runs.
"""

from __future__ import annotations

import logging
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

import quark_tiny_model as tiny
from quark.base.log import get_logger
from quark.checkpoint import export_safetensors, import_model_from_safetensors
from quark.config.templates import LLMTemplate
from quark.errors import QuarkError
from quark.models.plan.family import model_type_of
from quark.models.plan.plan_row import PlanRow
from quark.plugins import schemes
from quark.runs import ModelQuantizer
from quark.runs.run import plan_run
from quark_workbench.evaluate import Comparison, compare, token_windows
from quark_workbench.evaluate.logits import evaluating
from quark_workbench.report.sizes import tensor_bytes

__all__ = ["DTYPE", "PROMPT", "Bench", "Refusal", "Row", "Size", "job_name", "quiet", "stored_size"]

DTYPE = torch.bfloat16
PROMPT = "And God said, Let there be"


@attrs.frozen
class Size:
    """Sizes of a checkpoint.

    Attributes:
        weight_bytes: Size of the weights of the quantized layers, including scales and zero points.
        total_bytes: Size of all tensors.
        bits: Bits for each element of the quantized layers' weights, including scales and zero points.
    """

    weight_bytes: int
    total_bytes: int
    bits: float


@attrs.frozen(kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        name: Name of the scheme, and of the KV cache's scheme if there is one.
        size: Size of the checkpoint.
        comparison: Metrics that compare the model loaded from disk with the float model.
        seconds: Time to quantize and export.
        reload_equal: Whether the loaded model computes exactly the same logits as the model in memory.
        words: The text that the loaded model generates after `PROMPT`.
    """

    name: str
    size: Size
    comparison: Comparison
    seconds: float
    reload_equal: bool
    words: str


@attrs.frozen(kw_only=True)
class Refusal:
    """A scheme that has no row in the table, because it was refused or failed.

    Attributes:
        name: Name of the scheme, as in `Row`.
        reason: The error message.
        expected: True if planning refused the scheme, because the scheme does not fit the model. False if a
            later step failed.
    """

    name: str
    reason: str
    expected: bool


@attrs.frozen(eq=False)
class Bench:
    """The float model, tokens for calibration and evaluation, and the number of tokens to generate."""

    tokenizer: Any
    reference: nn.Module
    windows: Tensor
    calibration: list[Tensor]
    new_tokens: int

    @classmethod
    def bundled(cls, count: int = 16, length: int = 256, new_tokens: int = 24) -> Bench:
        """Return the bundled model with ``count`` windows of ``length`` tokens, and calibration data."""
        tokenizer = tiny.tiny_tokenizer()
        windows = token_windows(tokenizer, tiny.held_out_text(), length, limit=count)
        with quiet():
            return cls(tokenizer, tiny.tiny_model(DTYPE), windows, tiny.calibration_batches(8, 128), new_tokens)

    def jobs(self) -> list[tuple[str, str | None]]:
        """Return the runs of the demo. A run is a pair of a scheme and the scheme of the KV cache, or None.

        There is one run for each scheme without a quantized KV cache, and one run with a quantized KV cache.
        """
        names = schemes().names()
        caching = [name for name in names if schemes().get(name).kv_cache is not None][:1]
        return [(name, None) for name in names] + [(name, name) for name in caching]

    def float_row(self, quantized: Sequence[PlanRow]) -> Row:
        """Return the row of the float model.

        The row states the float size of the layers that the schemes quantize.
        """
        comparison = compare(self.reference, self.reference, self.windows.split(4))
        size = stored_size(tiny.tiny_model_dir(), quantized)
        return Row(name="float", size=size, comparison=comparison, seconds=0.0, reload_equal=True, words=self._words(self.reference))

    def try_scheme(self, scheme: str, cache: str | None, folder: Path) -> tuple[Row | Refusal, tuple[PlanRow, ...]]:
        """Quantize, export to ``folder``, load the export, and compare it with the float model.

        Return a `Row` and the layers that were quantized. If the scheme was refused or failed, return a
        `Refusal` and no layers.
        """
        name = job_name(scheme, cache)
        planned = False
        try:
            with quiet():
                model = tiny.tiny_model(DTYPE)
                config = LLMTemplate.get(str(model_type_of(model.config))).get_config(scheme=scheme, kv_cache_scheme=cache)
                quantizer = ModelQuantizer(config)
                layers = tuple(r for r in plan_run(model, config).plan.quantized if r.has_quantized_weight)
                planned = True
                return self._carry_out(name, model, quantizer, layers, folder), layers
        except QuarkError as error:
            return Refusal(name=name, reason=str(error), expected=not planned), ()
        except Exception as error:  # a scheme may come from any plugin: a failure must not end the demonstration of the others
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
            tokens = model.generate(**prompt, do_sample=False, max_new_tokens=self.new_tokens)[0, prompt["input_ids"].shape[1] :]
        return " ".join(str(self.tokenizer.decode(tokens)).split())


def job_name(scheme: str, cache: str | None) -> str:
    """Return the name of a run in the table."""
    return scheme if cache is None else f"{scheme} + {cache} KV cache"


def stored_size(folder: Path, layers: Sequence[PlanRow]) -> Size:
    """Compute the sizes of a checkpoint from the headers of the files.

    The size of a weight includes the scales and zero points.
    """
    stored = tensor_bytes(folder)
    prefixes = tuple(f"{layer.name}.weight" for layer in layers)
    weights = sum(size for name, size in stored.items() if name.startswith(prefixes))
    return Size(weights, sum(stored.values()), 8 * weights / max(1, sum(prod(layer.shape) for layer in layers)))


def _same_logits(model: nn.Module, other: nn.Module, tokens: Tensor) -> bool:
    with evaluating(model, other):
        return torch.equal(model(tokens).logits, other(tokens).logits)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress log lines below WARNING and transformers' progress bars, because the demo prints its own
    progress."""
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
