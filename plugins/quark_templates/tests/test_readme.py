"""README.md says of every model type how its facts are checked, as the tables of the plugin have it."""

from __future__ import annotations

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import quark

from .lacking_families import IN_TRANSFORMERS, why_lacking
from .readme_table import DOCUMENTED, MISSING, OWN_CODE, README, SKELETON, checked_on, parts, rendered, tables
from .skeletons import SKELETONS


def test_the_table_of_families_is_up_to_date() -> None:
    _, table, _ = parts(README.read_text(encoding="utf-8"))
    assert table == rendered(), "run: python plugins/quark_templates/tests/readme_table.py"


def test_a_model_type_is_in_one_group_and_documented_ones_without_a_template_are_listed_as_missing() -> None:
    named = [model_type for table in tables().values() for model_type in table]
    assert len(named) == len(set(named))
    registered = {name for name in quark.templates().names() if name in named or name in DOCUMENTED}
    assert registered == set(named) == {name for name, what in checked_on().items() if what != MISSING}


def test_families_listed_as_checked_on_a_skeleton_have_one() -> None:
    assert {name for name, what in checked_on().items() if what == SKELETON} == set(SKELETONS)


def test_transformers_has_code_of_exactly_the_families_listed_as_checked_on_it() -> None:
    lacking = {name for name in IN_TRANSFORMERS if why_lacking(name)}
    assert {name for name, what in checked_on().items() if what == OWN_CODE} - lacking <= set(CONFIG_MAPPING_NAMES)
    assert not set(SKELETONS) & set(CONFIG_MAPPING_NAMES)


def test_the_documented_types_are_fifty_one() -> None:
    assert len(DOCUMENTED) == len(set(DOCUMENTED)) == 51
