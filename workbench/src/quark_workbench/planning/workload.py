"""Workload: the FLOPs of a run and the bytes of its statistics, computed from the plan and shapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quark.algorithms import Rounding
from quark.calibration.batches import Call
from quark.calibration.input_groups import InputGroups
from quark.models.plan.decoder_blocks import Block, decoder_blocks, rows_by_block
from quark.models.plan.family import text_config
from quark.models.plan.mixtures import ExpertNames
from quark.models.plan.plan_row import PlanRow
from quark.runs.run import Run
from quark_workbench.planning.narrower_models import experts_per_token

__all__ = ["Calibration", "Task", "Workload", "statistics_bytes", "workload_of"]


@attrs.frozen
class Calibration:
    """The size of the calibration data: the number of sequences, and the tokens in each sequence.

    Attributes:
        sequences: The number of sequences.
        length: The number of tokens in each sequence.
        have_media: A function that returns whether the data have images or sounds. It raises an error if they
            do, but the checkpoint has no processor for them. It is called only if the model needs images or
            sounds.
    """

    sequences: int = 128
    length: int = 512
    have_media: Callable[[], bool] = attrs.field(default=lambda: False, eq=False)

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences."""
        return self.sequences * self.length

    def calls(self) -> list[Call]:
        """Return a call of the model for each sequence, with token ids on the meta device."""
        return [Call((torch.empty(1, self.length, dtype=torch.int64, device="meta"),))] * self.sequences


@attrs.frozen
class Task:
    """The rounding of layers that have the same input. These layers are rounded together.

    Attributes:
        rows: The number N of output channels of all these layers.
        columns: The number K of input channels.
        tokens: The number of calibration tokens that reach the layers.
    """

    rows: int
    columns: int
    tokens: int


@attrs.frozen
class Workload:
    """The work of one run.

    Attributes:
        forwards: How often each calibration token runs through the decoder blocks; 0 without data.
        forward: FLOPs of the matrix products of linear layers and attention in these forward passes. In a
            mixture-of-experts layer, each token adds only the FLOPs of the experts that process it.
        statistics: FLOPs of the Hessians ``Σ x xᵀ [K, K]``. Since they are symmetric, half of each is
            computed.
        solver: FLOPs of column-wise rounding: ``K³ / 3`` for the factorization of each Hessian, and ``N K²``
            for the propagation of errors.
        rounded: The number of weights that are rounded.
        tasks: Dictionary from `Task` to the number of equal tasks in the model.
    """

    forwards: int = 0
    forward: int = 0
    statistics: int = 0
    solver: int = 0
    rounded: int = 0
    tasks: Mapping[Task, int] = attrs.field(factory=dict)

    @property
    def flops(self) -> int:
        """The number of all FLOPs, without elementwise operations of rounding."""
        return self.forward + self.statistics + self.solver


def workload_of(model: nn.Module, run: Run, calibration: Calibration) -> Workload:
    """Return the `Workload` of a run. ``model`` is the model of the plan and may be on the meta device."""
    rounded = sum(math.prod(r.shape) for r in run.plan.distinct if r.has_quantized_weight)
    if not run.needs_data:
        return Workload(rounded=rounded)
    blocks = decoder_blocks(model, run.plan.architecture)
    share = _tokens_of_experts(model, run)
    streams = run.algorithms.streams
    floats = 1 if any(t.needs for t in run.algorithms.transforms.values()) else 0
    forwards = streams * (2 if run.two_passes else 1) + floats
    rows_of = rows_by_block(blocks, run.plan.rows)
    experts = ExpertNames(run.plan.architecture)
    per_token = sum(2.0 * math.prod(r.shape) * (share if experts.projection(r.name) else 1.0) for rows in rows_of for r in rows)
    # Matrices of experts that stay fused have no row.
    fused = [p.numel() for b in blocks for p in b.module.parameters() if p.ndim == 3]
    per_token += sum(2.0 * elements * share for elements in fused) + _attention(model, len(blocks), calibration.length)
    tasks: Counter[Task] = Counter()
    for block, rows in zip(blocks, rows_of, strict=True):
        tasks.update(_tasks(run, block, rows, calibration.tokens, share, experts))
    kinds = len(run.algorithms.rounding.needs)
    return Workload(
        forwards=forwards,
        forward=round(per_token * calibration.tokens * forwards),
        statistics=sum(count * kinds * task.tokens * task.columns**2 for task, count in tasks.items()),
        solver=sum(count * (task.columns**3 // 3 + task.rows * task.columns**2) for task, count in tasks.items()),
        rounded=rounded,
        tasks=tasks,
    )


def statistics_bytes(rounding: Rounding, columns: int) -> int:
    """Return the bytes of all statistics of a layer input with ``columns`` channels.

    The bytes are counted while the statistics are constructed on the meta device.
    """
    with _Allocated() as allocated:
        for kind in rounding.needs:
            kind(columns, torch.device("meta"))
    return allocated.bytes


class _Allocated(TorchDispatchMode):
    """A dispatch mode that counts the bytes of all tensors that torch operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.bytes += sum(t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result


def _tokens_of_experts(model: nn.Module, run: Run) -> float:
    """Return the mean share of tokens that reach an expert, or 1 if the share is unknown."""
    config = text_config(model)
    chosen, experts = experts_per_token(config)
    return 1.0 if run.plan.config.calibrate_all_experts or not chosen or not experts else min(1.0, chosen / experts)


def _attention(model: nn.Module, layers: int, length: int) -> float:
    """Return the FLOPs per token of the two matrix products in attention, in all layers.

    These are queries times keys, and probabilities times values.
    """
    config = text_config(model)
    heads = getattr(config, "num_attention_heads", None) or 0
    width = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) or 0) // max(heads, 1)
    return 4.0 * layers * length * heads * width if isinstance(heads, int) and isinstance(width, int) else 0.0


def _tasks(run: Run, block: Block, rows: Sequence[PlanRow], tokens: int, share: float, experts: ExpertNames) -> Iterator[Task]:
    """Yield the tasks of column-wise rounding in one block."""
    own = {r.name.removeprefix(block.prefix): r for r in rows if r.algorithm}
    if not own or not run.algorithms.compensates:
        return
    groups = InputGroups(run.plan.architecture, run.plan.config.shared_scale_groups).expected(list(own))
    seen: set[str] = set()
    for name, row in own.items():
        if name in seen:
            continue
        members = groups.get(name, (name,))
        seen.update(members)
        reached = max(1, round(tokens * share)) if experts.projection(row.name) else tokens
        yield Task(sum(own[m].shape[0] for m in members), row.shape[1], reached)
