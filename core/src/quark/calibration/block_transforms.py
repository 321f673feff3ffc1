"""BlockTransforms: applies the transforms of a run to one block.

The transforms get statistics of the float inputs of the block's layers. They can also compute the block's
output error on held-out tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import BlockContext, Metrics, OutputError, Statistic
from quark.calibration.forwards import Forward, current_forward, replaced_forward
from quark.calibration.input_groups import InputGroups, common_groups
from quark.calibration.lockstep import BlockRun, EndOfBlock
from quark.calibration.pause_points import tokens_of
from quark.calibration.plugin_checks import StartedTransform, state_of
from quark.calibration.round_to_nearest import as_rounded, configs_of, tensor_of
from quark.calibration.sample_grid import Sums
from quark.config.architecture import Architecture
from quark.models.plan.decoder_blocks import Block
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import has_static_scale

COMPARED = 256
"""Minimum number of held-out tokens on which outputs are compared, if there are so many. Not all held-out
tokens are needed, because neighbouring tokens have nearly the same error.
"""
ONE_IN = 4
"""At least one of this many held-out tokens is compared. Fewer would save little, because attention computes
all tokens anyway.
"""


@attrs.define(eq=False, slots=False)
class BlockTransforms:
    """Applies transforms to one block.

    Args:
        block_run: The forward passes. They wait at the block's entry, before and after the transforms are
            applied. None if no transform needs statistics.
        block: The block.
        rows: The plan rows of the block's layers.
        transforms: The transforms, in the order in which they are applied.
        architecture: Facts about the model family.
        model_config: As in `quark.algorithms.BlockContext.model_config`.
        is_trial: Whether the block is a copy on which transforms are compared. In such a trial, statistics
            use only the held-out tokens.

    Attributes:
        metrics: Metrics that the transforms report, by full name of a layer or of the block.
        applied: Positions of the transforms that have changed the block.
        error: In a trial, the output error that the transformed block has if it is rounded to nearest. None
            if no transform has measured it.
    """

    _block_run: BlockRun | None
    _block: Block
    _rows: Sequence[PlanRow]
    _transforms: Sequence[StartedTransform]
    _architecture: Architecture | None
    _model_config: Any = None
    _is_trial: bool = False

    def __attrs_post_init__(self) -> None:
        self._configs = configs_of(self._block.name, self._rows)
        self._kinds = tuple(dict.fromkeys(kind for t in self._transforms for kind in t.needs))
        self._statistics: dict[str, dict[type[Statistic], Statistic]] = {}
        self._leaders: dict[str, str] = {}
        self._sums: dict[str, Sums] = {}
        self._called: dict[Forward, list[str]] = {}
        self._one_in = min((kind.one_in for kind in self._kinds), default=1)
        self._thinned = set[Forward]()
        self._mlp: str | None = None
        self._compared_one_in = 1
        self._input_groups = InputGroups()
        # If no token is held out, statistics and validation both use all tokens. Such a validation is better
        # than none.
        holds_out = self._block_run is not None and self._block_run.holds_out
        self._for_statistics: bool | None = self._is_trial if holds_out else None
        self._for_validation: bool | None = True if holds_out else None
        self._references: dict[Forward, Tensor] | None = None
        self._measured: list[tuple[Any, OutputError]] = []
        self.metrics: dict[str, dict[str, Any]] = {}
        self.applied: list[int] = []
        self.error: OutputError | None = None

    def apply(self) -> None:
        """Apply the transforms in order, and then call their ``finish`` methods in reverse order.

        Statistics are collected once, just before the first transform that needs statistics.
        """
        first = next((i for i, t in enumerate(self._transforms) if t.needs), None)
        for position, transform in enumerate(self._transforms):
            if position == first and self._block_run is not None:
                self._collect(self._block_run)
            report = transform.apply(self._context(transform))
            self._report(report)
            if report.get(self._block.name, {}).get("applied", True):
                self.applied.append(position)
        self._statistics = {}
        for transform in reversed(self._transforms):
            self._report(transform.finish(self._context(transform)))
        self.error, self._references = self._known_error(), None

    def _context(self, transform: StartedTransform) -> BlockContext:
        """Return the `BlockContext` for a transform, with the statistics that have been collected so far."""
        assert self._architecture is not None  # a plan with transforms has one
        return BlockContext(
            self._block.name,
            self._block.module,
            self._architecture,
            self._configs,
            self._statistics,
            None if self._references is None else self._output_error,
            None if self._references is None else self._output,
            self._model_config,
            transform.needs,
        )

    def _report(self, report: Mapping[str, Metrics]) -> None:
        for name, metrics in report.items():
            self.metrics.setdefault(name, {}).update(metrics)

    def _collect(self, block_run: BlockRun) -> None:
        """Let every forward pass compute the float block.

        Meanwhile, collect statistics of the inputs of the block's layers, and store the block's output for
        the held-out tokens.
        """
        with ExitStack() as stack:
            for name in self._configs:
                layer = self._block.module.get_submodule(name)
                stack.callback(layer.register_forward_pre_hook(self._update_statistics(name, block_run)).remove)
            # A deterministic run drops no tokens. A matrix product of fewer tokens differs in its last bits,
            # and the result must not depend on the number of ranks, because the first forward pass of each
            # rank computes all tokens.
            self._mlp = None if block_run.grid.ranks.is_deterministic else self._dense_mlp()
            if self._one_in > 1 and self._mlp is not None:
                stack.callback(self._block.module.get_submodule(self._mlp).register_forward_pre_hook(self._thin(self._mlp)).remove)
            forwards = [f for f in block_run.forwards if not f.is_float]
            if self._mlp is not None and not any(has_static_scale(config.input_tensors) for config in self._configs.values()):
                tokens = sum(int(f.call.held_out.sum()) for f in forwards if f.call.held_out is not None)
                self._compared_one_in = max(1, min(tokens // COMPARED, ONE_IN))
            if not self._is_trial:  # the statistics of a trial need all held-out tokens
                stack.enter_context(self._fewer_tokens())
            outputs = block_run.replay(self._validation_tokens, forwards)
        references = {forward: tokens for forward, tokens in outputs.items() if len(tokens)}
        self._references = references if block_run.grid.ranks.any(bool(references)) else None
        for names, leader in common_groups(self._leaders, list(self._configs), block_run.grid.ranks):
            sums = self._sums.pop(leader, None) if leader is not None else None
            if sums is None:  # no token of this rank has reached the layers
                weight: Any = self._block.module.get_submodule(names[0]).weight
                sums = Sums(self._kinds, weight.shape[1], weight.device, block_run.grid)
            self._statistics |= dict.fromkeys(names, sums.of_all_ranks())

    def _update_statistics(self, name: str, block_run: BlockRun) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            forward = current_forward()
            if forward is None:
                return
            self._called.setdefault(forward, []).append(name)
            x = tokens_of(args[0].detach(), forward.call, held_out=self._for_statistics)
            if not len(x):
                return
            leader, is_new = self._input_groups.observe({forward: args[0]}, name)
            leader = self._leaders.setdefault(name, leader)
            if leader not in self._sums:
                self._sums[leader] = Sums(self._kinds, x.shape[-1], x.device, block_run.grid)
            if is_new:
                self._sums[leader].update(x, None, forward.number, self._one_in if forward in self._thinned else 1)
            if self._is_done(forward):
                raise EndOfBlock

        return hook

    def _dense_mlp(self) -> str | None:
        """Return the name of the module that has all projections of a dense MLP and no other layers.

        Return None if the block has no such module.
        """
        facts = self._architecture
        names = [] if facts is None or facts.mlp_output is None else [*facts.mlp_inputs, facts.mlp_output]
        parents = {name.rpartition(".")[0] for name in names}
        if len(parents) != 1 or parents == {""}:
            return None
        (parent,) = parents
        inside = {name for name, _ in self._block.module.named_modules() if name.startswith(f"{parent}.")}
        own = {name for name in self._configs if name.startswith(f"{parent}.")}
        return parent if own and own <= set(names) <= inside else None

    def _thin(self, mlp: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        """Return a hook that drops all tokens of an MLP's input except those that statistics use.

        This is correct because an MLP computes each token separately. The hook acts only on a forward pass
        that will end inside the MLP, after the last layer of the MLP.
        """

        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            forward = current_forward()
            if forward is None or not args or not self._is_of_statistics_alone(forward):
                return None
            first, called = next(iter(self._called.values()), []), self._called.get(forward, [])
            left = first[len(called) :]
            is_like_first = first is not called and first[: len(called)] == called and sorted(first) == sorted(self._configs)
            if not is_like_first or not all(name.startswith(f"{mlp}.") for name in left):
                return None
            self._thinned.add(forward)
            return (args[0][..., :: self._one_in, :], *args[1:])

        return hook

    def _is_of_statistics_alone(self, forward: Forward) -> bool:
        """Return whether a forward pass is used only for statistics. The output of such a pass is not
        compared.
        """
        return bool(self._for_validation) and forward.call.held_out is None

    def _is_done(self, forward: Forward) -> bool:
        """Return whether a forward pass can end, because the rest of the block is not needed.

        A forward pass can end if its output is not compared, and if it has called every layer exactly once.
        The first forward pass must have done the same.
        """
        if not self._is_of_statistics_alone(forward):
            return False
        first, called = next(iter(self._called.values())), self._called[forward]
        return first is not called and len(first) == len(called) == len(self._configs) and set(first) == set(called)

    @contextmanager
    def _fewer_tokens(self) -> Iterator[None]:
        """Make a dense MLP compute only the tokens that are compared. The output for all other tokens is
        zero.

        This is correct because an MLP computes each token separately.
        """
        if self._mlp is None or self._compared_one_in == 1:
            yield
            return
        mlp: Any = self._block.module.get_submodule(self._mlp)
        compute: Callable[..., Any] = mlp.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            current = current_forward()
            step = 1 if current is None or x.ndim != 3 else self._step(current)
            if step == 1:
                return compute(x, *args, **kwargs)
            some = compute(x[:, ::step], *args, **kwargs)
            every = some.new_zeros(*x.shape[:2], some.shape[-1])
            every[:, ::step] = some
            return every

        with replaced_forward(mlp, forward):
            yield

    def _step(self, forward: Forward) -> int:
        """Return the step n if every n-th token of a forward pass is compared.

        The step is 1 unless all tokens of the forward pass are held out.
        """
        call = forward.call
        is_whole = call.held_out is not None and bool(call.held_out.all())
        return self._compared_one_in if is_whole else 1

    def _validation_tokens(self, forward: Forward, output: Any) -> Tensor:
        return tokens_of(tensor_of(output)[..., :: self._step(forward), :], forward.call, held_out=self._for_validation)

    def _output_error(self) -> OutputError:
        """Return the output error, as in `BlockContext.output_error`."""
        assert self._block_run is not None
        assert self._references is not None
        with as_rounded(self._block.module, self._configs), self._fewer_tokens():
            outputs = self._block_run.replay(self._validation_tokens, self._references)
        is_held_out = self._for_validation is not None
        own = [OutputError.of(output, self._references[f], is_held_out=is_held_out) for f, output in outputs.items()]
        error = OutputError.joined([error for errors in self._block_run.grid.ranks.gather(own) for error in errors])
        if self._is_trial:
            self._measured.append((state_of(self._block.module), error))
        return error

    def _known_error(self) -> OutputError | None:
        """Return the output error that was measured when the block had its current values and hooks.

        Return None if no output error was measured in this state of the block.
        """
        if not self._measured:
            return None
        state = state_of(self._block.module)
        known = next((error for measured, error in self._measured if measured == state), None)
        assert self._block_run is not None
        return None if self._block_run.grid.ranks.any(known is None) else known

    def _output(self) -> Tensor:
        """Return the block's output, as in `BlockContext.output`."""
        assert self._block_run is not None
        assert self._references is not None
        with self._fewer_tokens():
            own = list(self._block_run.replay(self._validation_tokens, self._references).values())
        return torch.cat([output for outputs in self._block_run.grid.ranks.gather(own) for output in outputs])
