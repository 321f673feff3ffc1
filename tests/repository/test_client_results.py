"""Tables of clients hold the measured results, with every scheme and no empty cell; records claim nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quark.plugins import schemes
from tools.docs import client_results, marks
from tools.docs.sections import ROOT

DATA = client_results.client_results()
PAGE = "docs/reference/clients.md"
RESULT = re.compile(r"[\d.e-]+, \d+ %.*|refused: \d+|not run")


def loaded(client: str, layout: str) -> dict[str, dict[str, Any]]:
    return {name: result for name, result in DATA[client]["results"][layout].items() if "error" in result}


def test_the_page_of_clients_has_the_tables_of_the_data() -> None:
    text = marks.expand((ROOT / PAGE).read_text(encoding="utf-8"), PAGE.removeprefix("docs/"))
    assert client_results.tables() in text
    assert f"]({PAGE})" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("data", [DATA, {}], ids=["measured", "nothing measured"])
def test_every_scheme_is_a_row_of_both_tables_and_every_cell_says_something(data: Any) -> None:
    text = client_results.tables(data)
    for table in text.split("## By layout"):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")]
        assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row[0])) == sorted(client_results.schemes())
        cells = [cell for row in rows for cell in row[1:]]
        assert all(RESULT.fullmatch(cell) for cell in cells)
        assert data or {*cells} == {"not run"}
    numbers = {int(number) for number in re.findall(r"refused: (\d+)", text)}
    assert numbers == set(range(1, len(re.findall(r"^\d+\. .", text, flags=re.MULTILINE)) + 1))


def test_results_are_of_registered_schemes_with_versions() -> None:
    assert DATA.keys() == client_results.COLUMNS.keys()
    for client, own in DATA.items():
        assert own["versions"]
        assert own["results"].keys() <= {*client_results.COLUMNS[client]}
        for results in own["results"].values():
            assert results.keys() <= {*client_results.schemes()}
            assert all(({"error", "greedy"} <= result.keys()) != ({"refused", "by"} <= result.keys()) for result in results.values())


@pytest.mark.parametrize(("client", "layout"), [("transformers", "safetensors"), ("onnxruntime", "onnx"), ("llama.cpp", "gguf")])
def test_records_claim_the_clients_that_load_them(client: str, layout: str) -> None:
    claimed = {record.name for record in schemes() if any(text.partition(" (")[0] == client for text in record.clients)}
    assert claimed & {*client_results.schemes()} == loaded(client, layout).keys()


def test_records_claim_vllm_on_cpus_where_it_loads_the_layout_of_quark_alone() -> None:
    claimed = {record.name for record in schemes() if any("CPU" in text for text in record.clients)}
    alone = {name for name, result in loaded("vLLM on a CPU", "safetensors").items() if "note" not in result}
    assert claimed & {*client_results.schemes()} == alone


def test_a_cell_has_figures_and_where_they_are_from() -> None:
    results = {"vLLM on a CPU": {"versions": {"v": "1"}, "results": {"awq": {"fp8": {"error": 1.2e-07, "greedy": 0.996, "note": "so"}}}}}
    assert "| 1.2e-7, 99 % (as `awq`; so) |" in client_results.tables(results)
