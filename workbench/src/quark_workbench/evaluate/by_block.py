"""Evaluation of checkpoints larger than memory.

Each decoder block processes all windows. The weights of the block are then released, and the next block is
read.

Memory holds the weights outside the blocks, one block, and the hidden states of all windows. A comparison
runs one model after the other. The results equal those of `quark_workbench.evaluate.likelihood` and
`quark_workbench.evaluate.compare` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from quark.calibration.batches import Call
from quark.calibration.forwards import Forward, conducts_forwards, without_cache
from quark.calibration.lockstep import LockStep
from quark.calibration.transform_validation import BlockSource
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import UnsupportedError
from quark.models.hf.loading import torch_device, torch_dtype
from quark.models.hf.model_config import model_config
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import make_plan
from quark.plugins.run_events import RunEvents, running
from quark.runs.from_disk import opened_checkpoint
from quark_workbench.evaluate import Comparison, Likelihood, Windows
from quark_workbench.evaluate.comparison import comparison_of
from quark_workbench.evaluate.logits import NextTokens, evaluating, next_token_logits
from quark_workbench.evaluate.metrics import TokenMetrics
from quark_workbench.evaluate.outputs import gives_next_tokens
from quark_workbench.evaluate.perplexity import likelihood_of
from quark_workbench.evaluate.predictions import Predictions
from quark_workbench.evaluate.quantized_checkpoint import QuantizedCheckpoint

__all__ = ["compare_by_block", "likelihood_by_block"]


@attrs.frozen(eq=False)
class _WindowCall(Call):
    """A forward pass over a batch of windows. It adds its predictions to ``results``."""

    windows: Windows | None = None
    results: list[NextTokens] = attrs.field(factory=list)

    def run(self, model: nn.Module) -> None:
        assert self.windows is not None
        self.results.append(next_token_logits(model, self.windows))


def likelihood_by_block(checkpoint: Path, batches: Iterable[Windows], metrics: Sequence[str] = (), **where: Any) -> Likelihood:
    """Return the `Likelihood` of a text under a checkpoint's model. One block at a time is in memory.

    Args:
        checkpoint: Directory of a checkpoint, float or quantized.
        batches: Windows of tokens.
        metrics: Names of further metrics to measure, from `quark.metrics`.
        where: ``device``, ``dtype``, ``trust_remote_code`` and ``packed``, as in
            `quark.models.hf.loading.load_model`. For a quantized checkpoint, leave ``dtype`` at ``"auto"``.

    Raises:
        CheckpointError, ConfigError: A checkpoint is damaged, or an argument cannot be used.
        UnsupportedError: The layout of a quantized checkpoint cannot be read block by block.
        NonFiniteError: A logit is NaN or Inf.
    """
    return likelihood_of(_predictions([checkpoint], batches, metrics, **where))


def compare_by_block(
    checkpoint: Path, reference: Path, batches: Iterable[Windows], metrics: Sequence[str] = (), **where: Any
) -> Comparison:
    """Return the `Comparison` of two checkpoints. One block of a checkpoint at a time is in memory.

    ``reference`` is the directory of the checkpoint to compare with. Other arguments and the errors are as in
    `likelihood_by_block`.
    """
    return comparison_of(_predictions([checkpoint, reference], batches, metrics, **where))


@conducts_forwards
def _predictions(checkpoints: Sequence[Path], batches: Iterable[Windows], metrics: Sequence[str], **where: Any) -> Predictions:
    """Return the `Predictions` of the first checkpoint, with the second as reference if there are two."""
    predictions = Predictions(TokenMetrics.of(metrics, has_reference=len(checkpoints) > 1))
    windows = list(batches)
    with ExitStack() as stack:
        events = stack.enter_context(running("evaluate", source=str(checkpoints[0])))
        predictors = [stack.enter_context(_before_the_head(path, windows, events, **where)) for path in checkpoints]
        for number, batch in enumerate(windows):
            predictions.add(batch, *(predict(number) for predict in predictors))
    return predictions


@contextmanager
def _before_the_head(path: Path, windows: Sequence[Windows], events: RunEvents, **where: Any) -> Iterator[Callable[[int], NextTokens]]:
    """Run all windows through the blocks. Yield a function that runs the head for one batch of windows.

    The function takes the number of the batch and returns its predictions.
    """
    events.phase("plan")
    model, blocks, source = _opened(path, **where)
    if not gives_next_tokens(model):
        raise UnsupportedError(
            f"a {type(model).__name__} does not predict tokens, and --by-block compares predictions: leave out --by-block"
        )
    calls = [_WindowCall(windows=batch) for batch in windows]
    with evaluating(model), without_cache(model), LockStep(model, [b.module for b in blocks], calls, to_the_end=False) as steps:
        events.phase("load")
        source.load(None)
        steps.advance(-1)
        for i, block in enumerate(events.blocks(blocks)):
            source.load(block)
            steps.advance(i)
            source.release(block)
        events.phase("evaluate")
        waiting: dict[int, Forward] = {forward.number: forward for forward in steps.at_entry(len(blocks))}

        def predict(number: int) -> NextTokens:
            steps.go_on([waiting.pop(number)])
            return calls[number].results.pop()

        yield predict


def _opened(
    path: Path, device: str = "cpu", dtype: str = "auto", trust_remote_code: bool = False, packed: bool = False
) -> tuple[nn.Module, Sequence[Block], BlockSource]:
    """Return the model of a checkpoint, its decoder blocks, and an object that reads the weights of a block.

    Only the headers of files are read.
    """
    target = torch_device(device)
    config = model_config(path, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        if torch_dtype(dtype) not in (None, config.dtype):
            raise UnsupportedError(f"'{path}' is quantized, so --by-block runs it only in its own dtype, {config.dtype}: use --dtype auto")
        quantized = QuantizedCheckpoint(path, target, trust_remote_code=trust_remote_code, packed=packed)
        return quantized.model, quantized.blocks, quantized
    _, stored = opened_checkpoint(path, device, dtype, trust_remote_code=trust_remote_code)
    plan = make_plan(stored.model, QConfig(global_quant_config=QLayerConfig()), architecture_of(stored.model))
    stored.prepare(plan)
    return stored.model, decoder_blocks(stored.model, plan.architecture), stored
