"""BlockBranches: makes the branches of a block's layers. A branch is made when its layer is rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import attrs
from torch import nn

from quark.algorithms import BranchSite, BranchTask, Statistic, float_weight, weight_quantizer
from quark.algorithms.branching import CheckedBranching
from quark.models.layers import QuantizedLayer, linear_weight


@attrs.frozen(eq=False)
class BlockBranches:
    """Makes branches from float weights, rounded weights and statistics of inputs.

    Attributes:
        branching: The algorithm that makes the branches, or None if layers get no branches.
        float_layer: A function that takes the full name of a layer and returns the float layer.
    """

    branching: CheckedBranching | None
    float_layer: Callable[[str], nn.Module]

    @property
    def needs(self) -> Sequence[type[Statistic]]:
        """The classes of the statistics that the algorithm needs in order to make branches."""
        return () if self.branching is None else self.branching.branching.needs

    @contextmanager
    def made(
        self, layers: Mapping[str, QuantizedLayer], statistics: Mapping[type[Statistic], Statistic] = MappingProxyType({})
    ) -> Iterator[None]:
        """Prepare the weights before the body of the ``with`` statement, and fill the branches after it.

        The body must round all ``layers``. Before it, each layer with a branch gets the weight that is to be
        rounded.

        Args:
            layers: Layers by full name, with float weights. Layers without a branch are not changed.
            statistics: Statistics of the layers' input, by class.
        """
        tasks = {name: self._task(name, layer, statistics) for name, layer in layers.items() if layer.branch is not None}
        for name, task in tasks.items():
            assert self.branching is not None
            if (weight := self.branching.weight_to_round(task)) is not task.weight:
                layers[name].weight = nn.Parameter(weight, requires_grad=False)
        yield
        for name, task in tasks.items():
            layer, branch = layers[name], layers[name].branch
            assert self.branching is not None
            assert branch is not None
            rounded = weight_quantizer(layer).rows_of(float_weight(layer), None)
            self.branching.fill(branch, attrs.evolve(task, rounded=rounded.detach()))

    def _task(self, name: str, layer: QuantizedLayer, statistics: Mapping[type[Statistic], Statistic]) -> BranchTask:
        float_layer = self.float_layer(name)
        site = BranchSite.of(name, float_layer, layer.layer_config)
        assert site is not None
        return BranchTask(site, linear_weight(float_layer).detach(), statistics)
