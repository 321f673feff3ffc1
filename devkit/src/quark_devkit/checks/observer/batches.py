"""Checks of observers that see data in parts: they get unequal batches, are merged in any grouping, or are
sent to another process."""

from __future__ import annotations

import copy
from multiprocessing.reduction import ForkingPickler

import torch

from quark.numbers import Observer
from quark_devkit.check import NotApplicableError, check, complaining, require
from quark_devkit.checks.observer import data_of, examples_of, is_close, observed, observes_once, range_of, same_range
from quark_devkit.example_specs import SHAPE, Example
from quark_devkit.subject import Subject

_BATCHES = (1, 40, 3, 20)
"""Rows of each batch, few or many; together they are all rows of `SHAPE`."""
_COLUMNS = 14336


def _of_several(subject: Subject) -> list[Example]:
    """Return the examples whose observer sees more than one tensor.

    Raises:
        NotApplicableError: The observer of each example sees only one tensor.
    """
    found = [example for example in examples_of(subject) if not observes_once(example)]
    if not found:
        raise NotApplicableError("it observes only one tensor")
    return found


def _of_tokens(subject: Subject) -> list[Example]:
    """Return the examples of `_of_several` in which rows can be tokens: the number of scales does not depend
    on the number of rows.
    """
    rows = [(shape, SHAPE[1]) for shape in (1, SHAPE[0])]
    found = [e for e in _of_several(subject) if len({e.quantizer.granularity.scale_shape(shape) for shape in rows}) == 1]
    if not found:
        raise NotApplicableError("it has a scale for each row, so rows are not tokens")
    return found


@check("observer", since=2, each=_of_several)
def merges_parts_in_any_grouping(example: Example) -> None:
    """Observers of four unequal parts are merged in either of two groupings. The range equals that of one
    observer of all data, up to float32 rounding."""
    parts = [(1 + 2 * seed) * data_of(seed) for seed in range(4)]
    whole = range_of(example, *parts)
    balanced = [observed(example, part) for part in parts]
    for first, second in ((0, 1), (2, 3), (0, 2)):
        balanced[first].merge(balanced[second])
    from_the_end = [observed(example, part) for part in parts]
    for number in (2, 1, 0):
        from_the_end[number].merge(from_the_end[number + 1])
    for how, merged in (("two by two", balanced[0]), ("from the last", from_the_end[0])):
        require(is_close(merged.range(), whole), f"merged of four parts {how}, gives another range than one observer of all data")


@check("observer", since=2, each=_of_several)
def merging_changes_one_alone(example: Example) -> None:
    """If observer A is merged into observer B, the range of A stays the same, even if B then sees more
    data."""
    first, other = observed(example, data_of(1)), observed(example, 3 * data_of(2))
    before = tuple(end.clone() for end in other.range())
    empty = observed(example)
    for one in (first, empty):
        one.merge(other)
        one.observe(9 * data_of(3))
    require(same_range(before, other.range()), "changes the range of another observer, which it has merged")  # type: ignore[arg-type]


@check("observer", since=2, each=examples_of)
def can_be_sent_to_another_process(example: Example) -> None:
    """An observer that is sent to another process of the run, or copied deeply, keeps its range."""
    observer = observed(example, data_of())
    for how, copied in (
        ("sent to another process", lambda: ForkingPickler.loads(ForkingPickler.dumps(observer))),
        ("copied deeply", lambda: copy.deepcopy(observer)),
    ):
        with complaining(f"cannot be {how}", Exception):
            other: Observer = copied()
        require(same_range(other.range(), observer.range()), f"returns a different range once it is {how}")


@check("observer", since=2, each=_of_tokens)
def gives_the_range_of_all_tokens_in_any_batches(example: Example) -> None:
    """Unequal batches of tokens give the same range in any order. If the observer keeps extremes, this is the
    range of one tensor with all tokens."""
    x = data_of(1) * torch.linspace(0.2, 3, SHAPE[0])[:, None]
    batches = x.split(_BATCHES)
    seen, reverse = range_of(example, *batches), range_of(example, *reversed(batches))
    require(is_close(seen, reverse), "gives another range for the same unequal batches in another order")
    if type(example.quantizer.observer()).is_extremes:
        require(is_close(seen, range_of(example, x)), "gives another range for tokens in unequal batches than for all at once")


@check("observer", since=2, each=_of_tokens)
def takes_sequences_of_tokens(example: Example) -> None:
    """Activations of three axes, ``[sequences, tokens, channels]``, give the range of all their tokens."""
    x = data_of(3) * torch.linspace(0.2, 3, SHAPE[0])[:, None]
    with complaining("does not accept activations with three axes", Exception):
        seen = range_of(example, x.view(4, -1, SHAPE[1]))
    require(is_close(seen, range_of(example, x)), "gives another range for sequences of tokens than for the same tokens in one row")


@check("observer", since=2, each=_of_tokens)
def looks_at_every_column(example: Example) -> None:
    """In a row of 14,336 columns, the last columns count as much as the first: any order gives the same
    range.
    """
    granularity = example.quantizer.granularity
    if granularity.scale_shape((3, _COLUMNS)) != granularity.scale_shape((3, SHAPE[1])):
        return
    x = data_of(2, (3, _COLUMNS)) * torch.linspace(0.1, 4, _COLUMNS)
    require(is_close(range_of(example, x), range_of(example, x.flip(-1))), "gives another range for columns in another order")
