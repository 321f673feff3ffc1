"""A branching adds a float computation, such as a low-rank product, in parallel to layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self, TypeVar, cast

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms.statistics import Statistic
from quark.base.finite import is_finite
from quark.config.algorithm import AlgoConfig, StoredAlgoConfig
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.templates.algorithms import algo_config_from_dict
from quark.models.layers import Branch, counts_as, linear_weight
from quark.models.layers.quantized_layers import BRANCH
from quark.plugins import algorithms
from quark.plugins.attribution import Origin, attributed, origin
from quark.plugins.record_fields import described

S = TypeVar("S", bound=Statistic)


@attrs.frozen(eq=False)
class BranchSite:
    """The facts about a linear layer that decide whether it gets a branch.

    These facts are available before a run starts, and also when a checkpoint is loaded.

    Attributes:
        name: Full name of the layer.
        shape: Shape of the weight, ``[out, in]``.
        dtype: Dtype of the weight.
        config: Quantization of the layer.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    config: QLayerConfig

    @classmethod
    def of(cls, name: str, layer: nn.Module, config: QLayerConfig) -> Self | None:
        """Return the site of ``layer``, whose weight is still float.

        Return None if the layer is not linear, or if ``config`` does not quantize the weight.
        """
        if counts_as(layer) is not nn.Linear or config.weight is None:
            return None
        rows, columns = linear_weight(layer).shape
        return cls(name, (rows, columns), linear_weight(layer).dtype, config)


@attrs.frozen(eq=False)
class BranchTask:
    """One layer that gets a branch.

    Attributes:
        site: The layer.
        weight: The float weight after the transforms, ``[out, in]``.
        statistics: Mapping from a class of statistics to the statistic of the layer's input. It is empty if
            no calibration token has reached the layer.
        rounded: The rounded weight, ``[out, in]``, or None before rounding.
    """

    site: BranchSite
    weight: Tensor
    statistics: Mapping[type[Statistic], Statistic]
    rounded: Tensor | None = None

    def statistic(self, kind: type[S]) -> S | None:
        """Return the statistic of the class ``kind``, or None if no token has reached the layer."""
        return cast("S | None", self.statistics.get(kind))


class Branching(ABC):
    """Gives linear layers a `quark.models.layers.Branch`. Its output is added to the output of the layer.

    A subclass defines `branch` and `tensors`. In the algorithm's settings class, ``runs_with_model()`` must
    return True. A run has at most one branching.

    Attributes:
        needs: Classes of the statistics of layer inputs that the branching needs. If ``needs`` is empty, the
            branching needs no calibration data.
    """

    needs: Sequence[type[Statistic]] = ()

    @abstractmethod
    def branch(self, site: BranchSite) -> Branch | None:
        """Return the branch of a layer, with tensors on the meta device, or None if the layer gets no branch.

        A run calls this method before it quantizes anything, and a program that loads the checkpoint calls it
        again. During both calls, torch's default device is the meta device. The names, shapes and dtypes of
        the tensors determine the layout of the files, so they must depend on ``site`` alone. All tensors must
        be parameters or persistent buffers.
        """

    def weight_to_round(self, task: BranchTask) -> Tensor:
        """Return the weight to round, with the shape and dtype of the float weight.

        By default, return the float weight itself. The branch can then compensate the rounding error.
        Override this method to move a part of the weight to the branch before rounding.
        """
        return task.weight

    @abstractmethod
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        """Return a dictionary from each name in the ``state_dict()`` of the branch to the tensor's value.

        A run calls this method after it has rounded the layer. The result must not depend on the state of the
        program, such as the state of torch's random number generator.
        """


@attrs.frozen(eq=False)
class CheckedBranching:
    """A wrapper that checks the results of a plugin's branching. Errors name the plugin.

    Attributes:
        name: Registered name of the algorithm.
        branching: The branching of the plugin.
        whose: The algorithm and its plugin, for messages.
    """

    name: str
    branching: Branching
    whose: Origin

    def add_to(self, layer: nn.Module, site: BranchSite | None, device: torch.device | str = "meta") -> None:
        """Add the branch that the branching declares for a layer, if any. All tensors of a branch are zeros.

        Raises:
            PluginError: The branching returned an object that is not a branch, or a branch whose tensors
                cannot be stored in a checkpoint.
        """
        if site is None:
            return
        with attributed(f"declaring the branch of '{site.name}'", self.whose), torch.device("meta"):
            branch = self.branching.branch(site)
        if branch is None:
            return
        if not isinstance(branch, Branch):
            raise self.whose.error(
                f"gives '{site.name}' {described(branch)} instead of a branch: return a quark.models.layers.Branch or None"
            )
        tensors = {**dict(branch.named_parameters()), **dict(branch.named_buffers())}
        if strange := sorted(tensors.keys() ^ branch.state_dict().keys()) or [n for n, t in tensors.items() if not t.is_meta]:
            raise self.whose.error(
                f"gives '{site.name}' a branch whose tensor '{strange[0]}' is not on the meta device, or not in its state_dict(). "
                "Make each tensor a parameter or a persistent buffer, and create it without a device"
            )
        if BRANCH in {**layer._modules, **layer._parameters, **layer._buffers}:
            raise self.whose.error(
                f"cannot put a branch beside '{site.name}', because the layer already has a member '{BRANCH}': exclude the layer"
            )
        layer._modules[BRANCH] = branch.to_empty(device=device).requires_grad_(False)
        with torch.no_grad():
            for tensor in branch.state_dict().values():
                tensor.zero_()

    def weight_to_round(self, task: BranchTask) -> Tensor:
        """Return the result of `Branching.weight_to_round`.

        Raises:
            PluginError: The shape or dtype of the result differs from the float weight, or the result
                contains NaN or Inf.
        """
        with attributed(f"taking the branch from the weight of '{task.site.name}'", self.whose):
            weight = self.branching.weight_to_round(task)
        self._refuse_misfit(task, "weight", weight, task.weight)
        return weight

    @torch.no_grad()
    def fill(self, branch: nn.Module, task: BranchTask) -> None:
        """Set the tensors of ``branch`` to the result of `Branching.tensors`.

        Raises:
            PluginError: The names, shapes or dtypes of the tensors differ from the declared ones, or a value
                is not finite.
        """
        with attributed(f"making the branch of '{task.site.name}'", self.whose):
            made, declared = dict(self.branching.tensors(task)), branch.state_dict(keep_vars=True)
        if made.keys() != declared.keys():
            raise self.whose.error(
                f"makes {', '.join(map(repr, made)) or 'no tensors'} for the branch of '{task.site.name}', but has declared "
                f"{', '.join(map(repr, declared)) or 'none'}: return the tensors that `branch` declares"
            )
        for name, tensor in made.items():
            self._refuse_misfit(task, name, tensor, declared[name])
            declared[name].copy_(tensor)

    def _refuse_misfit(self, task: BranchTask, name: str, tensor: Tensor, declared: Tensor) -> None:
        if (tensor.shape, tensor.dtype) != (declared.shape, declared.dtype):
            wanted = f"{declared.dtype}{list(declared.shape)}"
            raise self.whose.error(
                f"makes '{name}' for '{task.site.name}' as {tensor.dtype}{list(tensor.shape)}, but has declared {wanted}: "
                "return tensors of the declared shape and dtype"
            )
        if tensor.is_floating_point() and not is_finite(tensor.detach()):
            raise self.whose.error(f"makes a '{name}' for '{task.site.name}' that holds NaN or Inf: return finite values")


def branching_of(config: QConfig) -> CheckedBranching | None:
    """Return the branching in the configuration of a run or a checkpoint, or None if it contains none."""
    for settings in config.algo_config or ():
        if settings.name in algorithms() and algorithms().get(settings.name).kind == "branch":
            return checked_branching(settings)
    return None


def checked_branching(settings: AlgoConfig) -> CheckedBranching:
    """Return the branching for ``settings``. The settings may come from a checkpoint."""
    own = algo_config_from_dict(settings.to_dict()) if isinstance(settings, StoredAlgoConfig) else settings
    whose, processor = origin("algorithms", settings.name), algorithms().load_processor(settings.name)
    with attributed("being made of its settings", whose):
        branching = processor(own)
    if not isinstance(branching, Branching):
        raise whose.error(f"makes {described(branching)}, which is not a branching: derive its class from quark.algorithms.Branching")
    if not own.runs_with_model():
        raise whose.error("has settings whose runs_with_model() is False, so readers would not find its branches: return True")
    return CheckedBranching(algorithms().get(settings.name).name, branching, whose)
