"""Checks of branches: they are declared before any work, made for every layer, and stored in checkpoints."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from quark.algorithms import BranchSite, BranchTask, Statistic
from quark.algorithms.branching import CheckedBranching, checked_branching
from quark.config.algorithm import AlgoConfig
from quark.errors import QuarkError
from quark.models.layers import Branch, QuantizedLayer, QuantLinear
from quark.plugins import schemes
from quark_devkit.algorithm_runs import HARM, logit_error, others, run_with, settings_of, valid_settings
from quark_devkit.check import check, complaining, require
from quark_devkit.checks import algorithm
from quark_devkit.option_effects import digest
from quark_devkit.random_states import random_states_kept
from quark_devkit.small_models import coarse_scheme, fitting_schemes, quantized, run_config
from quark_devkit.subject import Subject
from quark_devkit.transformed_models import different_parameters
from quark_devkit.whole_runs import require_same_by_two_ranks

_SHAPES = ((96, 64), (64, 128), (1, 64), (64, 64))
"""Shapes of weights: more outputs than inputs, fewer, and one."""
_CALLS = 30


@check("branch")
def is_made_of_its_settings(subject: Subject) -> None:
    """The processor, called with settings, returns a `quark.algorithms.Branching`. ``runs_with_model()`` of
    the settings returns True."""
    _branching(subject)


checks_of_settings = tuple(map(check("branch"), algorithm.OF_SETTINGS))


calibration_is_declared = check("branch")(algorithm.calibration_is_declared)


@check("branch")
def is_declared_by_its_arguments_alone(subject: Subject) -> None:
    """A second object with the same settings declares the same names, shapes and dtypes, even if the layers
    come in another order and torch has another default dtype. Readers of checkpoints rely on this."""
    sites = [_site(shape, dtype) for shape in _SHAPES for dtype in (torch.float32, torch.bfloat16)]
    first = [_declared(_branching(subject), site) for site in sites]
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(torch.bfloat16 if before is not torch.bfloat16 else torch.float32)
        other = _branching(subject)
        again = [_declared(other, site) for site in reversed(sites)][::-1]
    different = [site for site, one, two in zip(sites, first, again, strict=True) if one != two]
    where = "" if not different else f"weight {list(different[0].shape)} of {different[0].dtype}"
    require(not different, f"declares other tensors for a {where} the second time: compute names, shapes and dtypes from the site alone")


@check("branch")
def makes_what_it_declares(subject: Subject) -> None:
    """A branching makes the tensors that it has declared, for layers of any shape and dtype, with and without
    statistics of the input. The tensors are finite. The float weight and the statistics, which other
    algorithms use too, stay unchanged."""
    branching = _branching(subject)
    for shape in _SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for tokens in (None, 0, 5, 300):
                _made(branching, _site(shape, dtype), tokens)


@check("branch", since=2)
def computes_for_inputs_of_any_shape(subject: Subject) -> None:
    """A branch returns an output with the shape of the layer's output, for inputs with two or three axes,
    with one token, and without tokens. The input stays unchanged, and the branch keeps no reference to it."""
    branching = _branching(subject)
    for dtype in (torch.float32, torch.bfloat16):
        site = _site((96, 64), dtype)
        branch = _layer(branching, site).branch
        for shape in ((5, 64), (2, 3, 64), (1, 64), (0, 64)) if branch is not None else ():
            assert branch is not None
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            before, alive = x.clone(), weakref.ref(x)
            with complaining(f"has a branch that cannot compute from {list(shape)} in {dtype}", Exception), torch.no_grad():
                y, rest = branch(x), branch.rest(x)
            require(y.shape == (*shape[:-1], 96), f"has a branch that makes {list(y.shape)} of an input {list(shape)} and 96 outputs")
            require(
                (rest.shape, rest.dtype) == (x.shape, x.dtype), f"has a branch whose rest of {list(shape)} has shape {list(rest.shape)}"
            )
            require(torch.equal(x, before), "has a branch that changes its input, which other layers read")
            del x, y, rest
            gc.collect()
            require(alive() is None, "has a branch that keeps its input alive")


@check("branch", since=2)
def computes_the_same_at_every_call(subject: Subject) -> None:
    """A branch and its deep copy return the same output for an input at every call, whatever they computed
    before."""
    branching, shape = _branching(subject), (5, 64)
    branch = _made(branching, _site((96, 64), torch.float32), 300)
    if branch is None:
        return
    one, other = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    copied = copy.deepcopy(branch)
    with torch.no_grad():
        first, of_other = branch(one).clone(), copied(other)
        same = torch.equal(branch(other), of_other) and all(torch.equal(branch(one), first) for _ in range(_CALLS))
    require(same, "has a branch whose output depends on its earlier calls")


@check("branch")
def makes_branches_in_every_format(subject: Subject) -> None:
    """A run with the algorithm finishes for each kind of weights."""
    for scheme in fitting_schemes():
        with complaining(f"cannot finish a run in {scheme}", QuarkError):
            quantized(run_config(scheme, valid_settings(subject)))


@check("branch", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Different values of an option give different models. A value may be refused instead, and an option may
    be declared to change only the cost."""

    def results(settings: AlgoConfig) -> Iterator[str]:
        yield digest(*quantized(run_config(coarse_scheme(), settings)).state_dict().values())

    algorithm.options_have_effects(subject, results)


@check("branch", level="advisory")
def adds_something(subject: Subject) -> None:
    """At least one layer of the small model has a branch, and at least one branch is not zero."""
    branches = _branches(quantized(run_with(subject)))
    require(branches, "puts no branch beside any layer of the small model, so the other checks show little")
    floats = (t for branch in branches.values() for t in branch.state_dict().values() if t.is_floating_point())
    require(any(bool(t.any()) for t in floats), "makes only branches whose tensors are zero")


statistics_are_sums_over_tokens = check("branch")(algorithm.statistics_are_sums_over_tokens)
does_no_harm = check("branch")(algorithm.does_no_harm)


@check("branch")
def composes_with_others(subject: Subject) -> None:
    """A run with the branches and any registered rounding or transform finishes. The error of the logits is
    at most 1.5 times the error with that rounding or transform alone."""
    scheme = coarse_scheme()
    for other, settings in (*others(subject, "rounding"), *others(subject, "transform")):
        ratio = logit_error(scheme, settings, valid_settings(subject)) / logit_error(scheme, settings)
        require(ratio <= HARM, f"makes the error of the logits {ratio:.3g} times as large as the {other.kind} '{other.name}' alone")


@check("branch")
def is_deterministic(subject: Subject) -> None:
    """Two runs give the same parameters, to the bit, and leave the random states of the process as they
    are."""
    config = run_with(subject)
    with random_states_kept():
        different = different_parameters(quantized(config), quantized(config))
    require(not different, f"makes a different '{different[0] if different else ''}' in a second run")


@check("branch")
def is_the_same_on_two_ranks(subject: Subject) -> None:
    """Two processes that share the calibration samples compute the same tensors as one process does, to the
    bit."""
    require_same_by_two_ranks(run_with(subject))


works_on_an_accelerator = check("branch", level="advisory")(algorithm.works_on_an_accelerator)
checks_of_runs = tuple(map(check("branch"), algorithm.OF_RUNS))


def _branching(subject: Subject) -> CheckedBranching:
    return checked_branching(settings_of(subject))


def _site(shape: tuple[int, int], dtype: torch.dtype) -> BranchSite:
    return BranchSite("model.layers.0.mlp.up_proj", shape, dtype, schemes().load_config(coarse_scheme())())


def _declared(branching: CheckedBranching, site: BranchSite) -> Mapping[str, object]:
    """Return the shape and the dtype of each tensor that a branch declares, by name."""
    layer = _layer(branching, site)
    branch = layer.branch
    return {} if branch is None else {name: (tuple(t.shape), t.dtype) for name, t in branch.state_dict().items()}


def _layer(branching: CheckedBranching, site: BranchSite) -> QuantizedLayer:
    rows, columns = site.shape
    layer = QuantLinear.from_float(torch.nn.Linear(columns, rows, dtype=site.dtype), site.config)
    branching.add_to(layer, site, "cpu")
    return layer


def _sums(statistics: Mapping[type[Statistic], Statistic]) -> list[str]:
    """Return a digest of each statistic's tensors. Attributes of other types are left out, since they may be
    caches."""
    return [digest(*(value for value in vars(one).values() if isinstance(value, Tensor))) for one in statistics.values()]


def _made(branching: CheckedBranching, site: BranchSite, tokens: int | None) -> Branch | None:
    """Return the branch for a layer.

    The branch is filled from statistics of ``tokens`` tokens, or without statistics if ``tokens`` is None.
    """
    branch = _layer(branching, site).branch
    if branch is None:
        return None
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(site.shape, generator=generator).to(site.dtype)
    statistics: dict[type[Statistic], Statistic] = {}
    for kind in branching.branching.needs if tokens is not None else ():
        statistics[kind] = kind(site.shape[1], torch.device("cpu"))
        statistics[kind].update(torch.randn(tokens or 0, site.shape[1], generator=generator).to(site.dtype))
    task, kept, known = BranchTask(site, weight, statistics), weight.clone(), _sums(statistics)
    with complaining(f"cannot make the branch of a weight {list(site.shape)} of {site.dtype} from {tokens} tokens", QuarkError):
        to_round = branching.weight_to_round(task)
        rounded = (to_round.float() * 2).round().div(2).to(site.dtype)
        branching.fill(branch, BranchTask(site, weight, statistics, rounded))
    require(torch.equal(weight, kept), "changes the float weight")
    require(known == _sums(statistics), "changes a statistic, which other algorithms use too")
    return branch


def _branches(model: Any) -> dict[str, Branch]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Branch)}
