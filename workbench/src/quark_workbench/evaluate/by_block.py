"""Evaluation of checkpoints larger than memory: all windows pass one block at a time.

The weights of a block are released before the next is read.

In memory are what lies outside the blocks, one block, and the hidden states of all windows; of a comparison,
of one model after the other. The figures are those of `quark_workbench.evaluate.likelihood` and
`quark_workbench.evaluate.compare`, bit for bit: each forward computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor, nn

from quark.calibration.batches import Call
from quark.calibration.forwards import Forward, without_cache
from quark.calibration.lockstep import LockStep
from quark.checkpoint.block_reader import QuantizedCheckpoint
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import UnsupportedError
from quark.models.hf.loading import torch_device, torch_dtype
from quark.models.hf.model_config import model_config
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import make_plan
from quark.plugins.run_events import RunEvents, running
from quark.runs.from_disk import opened_checkpoint
from quark.runs.source import BlockSource
from quark_workbench.evaluate import Comparison, Likelihood, Windows
from quark_workbench.evaluate.comparison import Predictions
from quark_workbench.evaluate.logits import evaluating, next_token_logits
from quark_workbench.evaluate.metrics import TokenMetrics
from quark_workbench.evaluate.perplexity import Scores

__all__ = ["compare_by_block", "likelihood_by_block"]


@attrs.frozen(eq=False)
class _WindowCall(Call):
    """A forward over a batch of windows; what it predicts lands in ``results``."""

    windows: Windows | None = None
    results: list[tuple[Tensor, Tensor, Tensor]] = attrs.field(factory=list)

    def run(self, model: nn.Module) -> None:
        assert self.windows is not None
        self.results.append(next_token_logits(model, self.windows))


def likelihood_by_block(
    checkpoint: Path,
    batches: Iterable[Windows],
    metrics: Sequence[str] = (),
    *,
    device: str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Likelihood:
    """Return the `Likelihood` of a checkpoint, with one block of it in memory at a time.

    Args:
        checkpoint: Directory of a checkpoint, float or quantized.
        batches: Windows of tokens.
        metrics: Names of `quark.metrics`.
        device: Torch device to work on.
        dtype: Of a float model: float32, bfloat16, float16, or auto, which is what the checkpoint says. A
            quantized one has its own.
        trust_remote_code: Whether code that comes with the checkpoint may run.

    Raises:
        CheckpointError, ConfigError: A checkpoint is damaged, or an argument cannot be used.
        UnsupportedError: The layout of a quantized checkpoint cannot be read block by block.
        NonFiniteError: A logit is NaN or Inf.
    """
    scores = Scores(TokenMetrics.of(metrics, has_reference=False))
    windows = list(batches)
    with (
        running("evaluate", source=str(checkpoint)) as events,
        _before_the_head(checkpoint, windows, device, dtype, trust_remote_code, events) as predict,
    ):
        for number, batch in enumerate(windows):
            logits, targets, index = predict(number)
            scores.add(logits, targets, index, batch.words)
    return scores.likelihood()


def compare_by_block(
    checkpoint: Path,
    reference: Path,
    batches: Iterable[Windows],
    metrics: Sequence[str] = (),
    *,
    device: str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Comparison:
    """Return the `Comparison` of two checkpoints, with one block of each in memory at a time.

    Arguments and errors are those of `likelihood_by_block`, and ``reference``, the directory of the
    checkpoint to compare with.
    """
    predictions = Predictions(TokenMetrics.of(metrics, has_reference=True))
    windows = list(batches)
    with ExitStack() as stack:
        events = stack.enter_context(running("evaluate", source=str(checkpoint)))
        predict, expect = (
            stack.enter_context(_before_the_head(path, windows, device, dtype, trust_remote_code, events))
            for path in (checkpoint, reference)
        )
        for number, batch in enumerate(windows):
            logits, targets, index = predict(number)
            predictions.add(logits, expect(number)[0], targets, index, batch.words)
    return predictions.comparison()


@contextmanager
def _before_the_head(
    path: Path, windows: Sequence[Windows], device: str, dtype: str, trust_remote_code: bool, events: RunEvents
) -> Iterator[Any]:
    """Run the forwards of all windows through the blocks; yield a function that predicts one's tokens."""
    events.phase("plan")
    model, source = _opened(path, device, dtype, trust_remote_code)
    blocks = source.blocks
    calls = [_WindowCall(windows=batch) for batch in windows]
    with evaluating(model), without_cache(model), LockStep(model, [b.module for b in blocks], calls, to_the_end=False) as steps:
        events.phase("load")
        source.source.load(None)
        steps.advance(-1)
        for i, block in enumerate(events.blocks(blocks)):
            source.source.load(block)
            steps.advance(i)
            source.source.release(block)
        events.phase("evaluate")
        waiting: dict[int, Forward] = {forward.number: forward for forward in steps.at_entry(len(blocks))}

        def predict(number: int) -> tuple[Tensor, Tensor, Tensor]:
            steps.go_on([waiting.pop(number)])
            return calls[number].results.pop()

        yield predict


@attrs.frozen(eq=False)
class _Blocks:
    """The blocks of a model, and where their tensors come from."""

    blocks: Sequence[Any]
    source: BlockSource


def _opened(path: Path, device: str, dtype: str, trust_remote_code: bool) -> tuple[nn.Module, _Blocks]:
    """Return the model of a checkpoint, of which nothing but headers has been read."""
    target = torch_device(device)
    config = model_config(path, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        if torch_dtype(dtype) not in (None, config.dtype):
            raise UnsupportedError(f"'{path}' is quantized, and block by block it has its own dtype, {config.dtype}: use --dtype auto")
        quantized = QuantizedCheckpoint(path, target, trust_remote_code=trust_remote_code)
        return quantized.model, _Blocks(quantized.blocks, quantized)
    _, stored = opened_checkpoint(path, device, dtype, trust_remote_code=trust_remote_code)
    model = stored.model
    plan = make_plan(model, QConfig(global_quant_config=QLayerConfig()), architecture_of(model))
    stored.prepare(plan)
    return model, _Blocks(decoder_blocks(model, plan.architecture), stored)
