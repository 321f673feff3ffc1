"""One check at a time: any behaviour of a plugin in it, and declared failures of its author."""

from __future__ import annotations

import logging
import random
import warnings

import pytest
import torch
from transformers.utils import logging as transformers_logging

from quark.base.log import get_logger
from quark.plugins import ObserverRecord
from quark.plugins.catalog import catalog
from quark_devkit.check import Check, CheckFailedError, NotApplicableError, check, require
from quark_devkit.runner import is_conformant, quietly, run_check
from quark_devkit.subject import Subject

SUBJECT = Subject("observer", "o", "acme-quant", "1", ObserverRecord(name="o", class_name="O", observer="json:dumps"), catalog())


def raising(error: BaseException | None, **more: object) -> Check:
    def run(subject: Subject) -> None:
        if error is not None:
            raise error

    return Check("observer", "does_it", "It does it.", run, **more)  # type: ignore[arg-type]


def outcome(error: BaseException | None, reason: str | None = None, **more: object) -> tuple[str, str]:
    result = run_check(SUBJECT, raising(error, **more), reason)
    assert result.is_failure == (result.outcome in ("failed", "unexpected"))
    return result.outcome, result.message


def test_each_outcome() -> None:
    assert outcome(None) == ("passed", "")
    assert outcome(CheckFailedError("is wrong")) == ("failed", "is wrong")
    assert outcome(NotApplicableError("has none")) == ("not applicable", "has none")
    assert outcome(CheckFailedError("is wrong"), level="advisory") == ("advised", "is wrong")


def test_an_expected_failure_has_to_fail() -> None:
    assert outcome(CheckFailedError("is wrong"), "on purpose") == ("expected", "on purpose")
    assert outcome(None, "on purpose")[0] == "unexpected"
    assert outcome(NotApplicableError("has none"), "on purpose")[0] == "not applicable"


@pytest.mark.parametrize("error", [KeyError("k"), SystemExit(3), RecursionError(), AssertionError("a")], ids=repr)
def test_any_exception_is_a_failure_that_keeps_its_traceback(error: BaseException) -> None:
    result = run_check(SUBJECT, raising(error))
    assert (result.outcome, type(error).__name__ in result.message, "Traceback" in result.details) == ("failed", True, True)


def test_ctrl_c_ends_the_run() -> None:
    with pytest.raises(KeyboardInterrupt):
        run_check(SUBJECT, raising(KeyboardInterrupt()))


def test_an_optional_check_is_asked_only_of_what_declares_the_capability() -> None:
    assert outcome(CheckFailedError("no"), level="optional", needs="streaming")[0] == "not applicable"
    with pytest.raises(ValueError, match="name the capability"):
        raising(None, level="optional")


def test_random_numbers_and_warnings_of_a_check_stay_in_it() -> None:
    def run(subject: Subject) -> None:
        warnings.warn("of the plugin", stacklevel=1)
        torch.rand(3), random.random()

    python, numbers = random.getstate(), torch.get_rng_state()
    assert run_check(SUBJECT, Check("observer", "c", "C.", run)).outcome == "passed"
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), numbers)


def test_every_check_starts_with_the_same_random_numbers() -> None:
    seen = []
    one = Check("observer", "c", "C.", lambda subject: seen.append(float(torch.rand(()))))
    run_check(SUBJECT, one), torch.rand(5), run_check(SUBJECT, one)
    assert seen[0] == seen[1]


def test_nothing_checked_is_not_conformant() -> None:
    assert not is_conformant([])


def test_a_check_is_made_of_a_function_whose_docstring_is_the_requirement() -> None:
    @check("observer")
    def two_words(subject: Subject) -> None:
        """It is
        right.

        More about it.
        """
        require(subject.name, "is not")

    assert (two_words.id, two_words.sentence, two_words.level) == ("observer:two_words", "It is right.", "required")
    with pytest.raises(ValueError, match="must begin with the requirement"):
        check("observer")(lambda subject: None)


def test_nothing_is_shown_inside_and_the_level_and_progress_bars_come_back() -> None:
    logger = get_logger()
    before, bars = logger.level, transformers_logging.is_progress_bar_enabled()
    with quietly():
        assert not logger.isEnabledFor(logging.ERROR)
        assert not transformers_logging.is_progress_bar_enabled()
    assert (logger.level, transformers_logging.is_progress_bar_enabled()) == (before, bars)
    with pytest.raises(KeyError), quietly():
        raise KeyError
    assert logger.level == before
