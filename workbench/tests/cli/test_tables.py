"""Tables fit the terminal, a line for each row, and are whole if there is none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quark.base.log import unprintable
from quark_workbench.cli.tables import paragraphs, table

texts = st.text(alphabet="abc ", max_size=40).map(str.strip)
rows = st.lists(st.tuples(st.text(alphabet="ab", min_size=1, max_size=12), texts, texts, texts), min_size=1, max_size=6)
TITLES = ("name", "weight", "activations", "summary")


@given(rows, st.integers(min_value=12, max_value=200))
def test_no_line_is_wider_than_the_terminal_and_every_row_has_one(cells: list[tuple[str, ...]], width: int) -> None:
    lines, _ = table(TITLES, cells, width)
    assert len(lines) == len(cells) + 2
    assert max(map(len, lines)) <= width
    assert [line.split("  ")[0] for line in lines[2:]] == [row[0] for row in cells]


@given(rows)
def test_without_a_terminal_nothing_is_cut_or_left_out(cells: list[tuple[str, ...]]) -> None:
    lines, left_out = table(TITLES, cells)
    assert left_out == []
    assert all(cell in line for row, line in zip(cells, lines[2:], strict=True) for cell in row)


def test_what_does_not_fit_is_cut_then_left_out_and_named() -> None:
    cells = [("fp8", "w" * 20, "a" * 30, "some words")]
    lines, left_out = table(TITLES, cells, 46)
    assert lines[2] == f"fp8   {'w' * 20}  {'a' * 17}…"
    assert left_out == ["summary"]


def test_columns_that_say_nothing_take_no_room() -> None:
    lines, left_out = table(TITLES, [("fp8", "", "", "8 bits"), ("mx6", "", "", "6 bits")], 80)
    assert lines == ["name  summary", "----  -------", "fp8   8 bits", "mx6   6 bits"]
    assert left_out == []


def test_paragraphs_are_wrapped_below_their_heads() -> None:
    entries = [("alpha: float", "the share of the range that moves"), ("beta: int", "")]
    assert paragraphs(entries, 26) == ["  alpha: float", "      the share of the", "      range that moves", "  beta: int"]
    assert paragraphs(entries) == ["  alpha: float", "      the share of the range that moves", "  beta: int"]


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=40)), min_size=1, max_size=4), st.none() | st.integers(24, 80))
def test_no_text_reaches_the_terminal_as_a_command(cells: list[tuple[str, str]], width: int | None) -> None:
    lines, _ = table(("name", "summary"), cells, width)
    assert len(lines) == len(cells) + 2
    assert [unprintable(line) for line in [*lines, *paragraphs(cells, width)]] == [None] * len([*lines, *paragraphs(cells, width)])
