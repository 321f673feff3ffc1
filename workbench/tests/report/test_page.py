"""The page is one file, its plots have names and tables, and nothing of a model in it is markup."""

from __future__ import annotations

import copy
import itertools
import re
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest

from quark_workbench.report import page, with_flags

from .reports import contents

RUNS = [("int4_wo_64",), ("mxfp4",), ("int4_wo_64", "awq", "gptaq")]
EVIL = "a\"><script>alert(1)</script><img src=x onerror=alert(2)>.b'&"
VOID = {"meta"}


class Parsed(HTMLParser):
    """The elements of a page, with the elements around each, and errors of nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.text: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), tag
        self.elements.append((tag, dict(attrs), list(self._open)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.text.append((self._open[-1], data))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]


def mixture() -> dict[str, Any]:
    """A report with experts, red flags, and names that are markup."""
    report = copy.deepcopy(contents("int4_wo_64", "gptq"))
    report["experts"]["tokens"] = {f"model.layers.{i}.mlp.experts.{e}.up_proj": 40 * e for i in range(3) for e in range(8)}
    for layer in report["layers"][:3]:
        layer |= {
            "name": EVIL,
            "kind": EVIL,
            "quantized_to": EVIL,
            "output_snr_db": 4.0,
            "to_nearest_because": EVIL,
            "dead": 200,
            "columns": 256,
        }
    report["histograms"][0]["layer"] = report["model"]["name"] = report["settings"]["scheme"] = report["settings"]["command"] = EVIL
    report["settings"]["notes"] = report["settings"]["warnings"] = [EVIL]
    report["settings"]["algorithms"][0] |= {"name": EVIL, EVIL: EVIL}
    report["versions"][EVIL] = EVIL
    report["files"].append({"name": EVIL, "bytes": 3, "sha256": EVIL})
    report["transforms"] = [
        {"name": EVIL, "whole_model": False, "applied": False, "reason": EVIL, "snr_before_db": 1.0, "snr_after_db": 2.0}
    ] * 2
    figure = {"name": EVIL, "value": None, "error": 0.1, "float": 2.0}
    report["evaluation"] = {"samples": 3, "figures": [figure], "reason": EVIL}
    report["tunings"] = [{"name": EVIL, "algorithm": EVIL, "applied": True, "snr_before_db": 1.0, "snr_after_db": 2.0, "codes": 0.01}] * 2
    return with_flags(report)


PAGES = [*map("-".join, RUNS), "mixture"]


@cache
def page_of(name: str) -> str:
    return page(mixture() if name == "mixture" else contents(*RUNS[PAGES.index(name)]))


@pytest.mark.parametrize("name", PAGES)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    parsed = Parsed(page_of(name))
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "use", "image"} & {tag for tag, *_ in parsed.elements}
    assert not [a for _, attributes, _ in parsed.elements for a in attributes if a.startswith("on") or a in ("src", "xlink:href")]
    targets = [a["href"] for a in parsed.named("a")]
    assert all(target is not None and target.startswith("#") for target in targets)
    assert not re.search(r"https?:|@import|url\(|@font-face", page_of(name))
    assert len(page_of(name).encode()) < 1_000_000


@pytest.mark.parametrize("name", PAGES)
def test_ids_are_unique_and_links_lead_somewhere(name: str) -> None:
    parsed = Parsed(page_of(name))
    ids = [attributes["id"] for _, attributes, _ in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = [str(a["href"]).removeprefix("#") for a in parsed.named("a")]
    for attributes in (a for _, a, _ in parsed.elements):
        references += [str(attributes[key]) for key in ("aria-labelledby", "aria-describedby") if key in attributes]
    assert set(references) <= set(ids)


@pytest.mark.parametrize("name", PAGES)
def test_every_plot_has_a_name_a_description_and_a_table(name: str) -> None:
    parsed = Parsed(page_of(name))
    plots = [(attributes, around) for tag, attributes, around in parsed.elements if tag == "svg" and attributes.get("role") == "img"]
    wanted = {"plot-weights", "plot-sizes", "plot-time", "plot-weight-0"}
    wanted |= {"plot-depth", "plot-gain", "plot-outputs", "plot-transforms"} if "gptaq" in name else set()
    wanted |= {"plot-experts", "plot-gain", "plot-outputs", "plot-transforms", "plot-tuning-0"} if name == "mixture" else set()
    assert wanted <= {str(attributes["id"]) for attributes, _ in plots}
    for attributes, around in plots:
        assert {"aria-labelledby", "aria-describedby", "viewbox"} <= attributes.keys()
        assert "section" in around
    drawn = {tag for tag, _, around in parsed.elements if "svg" in around}
    assert {"rect", "path", "text", "title", "desc"} <= drawn
    tables = page_of(name).split("<section")[1:]
    assert all("<table" in section for section in tables if 'role="img"' in section)


@pytest.mark.parametrize("name", PAGES)
def test_every_rectangle_has_a_size_without_which_it_is_not_drawn(name: str) -> None:
    shapes = Parsed(page_of(name)).named("rect")
    assert shapes
    assert [shape for shape in shapes if not {"width", "height"} <= shape.keys()] == []


@pytest.mark.parametrize("name", PAGES)
def test_headings_are_in_order_and_the_page_has_its_landmarks(name: str) -> None:
    parsed = Parsed(page_of(name))
    levels = [int(tag[1]) for tag, *_ in parsed.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert parsed.named("html")[0]["lang"] == "en"
    assert all(len(parsed.named(landmark)) == 1 for landmark in ("header", "main", "footer", "nav"))
    assert all(th.get("scope") in ("col", "row") for th in parsed.named("th"))


def test_names_are_text_and_never_markup() -> None:
    parsed = Parsed(page_of("mixture"))
    assert sum(EVIL in text for _, text in parsed.text) > 10
    assert "<script" not in page_of("mixture")
    assert "onerror=alert(2)>" not in page_of("mixture")


def test_what_a_report_lacks_has_no_section() -> None:
    sections = [a["id"] for a in Parsed(page_of("mxfp4")).named("section")]
    assert sections == ["flags", "layers", "depth", "worst", "sizes", "time", "settings"]


def test_the_page_of_a_mixture_of_thousands_of_experts_stays_small() -> None:
    report = copy.deepcopy(contents("int4_wo_64", "gptq"))
    layer = report["layers"][0]
    report["model"]["blocks"] = [f"model.layers.{i}" for i in range(48)]
    report["layers"] = [
        layer | {"name": f"{b}.mlp.experts.{e}.{p}", "block": b, "kind": f"mlp.experts.*.{p}", "snr_db": 10.0 + e % 7}
        for b in report["model"]["blocks"]
        for e in range(128)
        for p in ("gate_proj", "up_proj", "down_proj")
    ]
    report["experts"]["tokens"] = {layer["name"]: 3 * i for i, layer in enumerate(report["layers"])}
    assert len(page(with_flags(report)).encode()) < 1_000_000


@pytest.mark.parametrize("summary", ["Plan", "Algorithm awq", "Versions and machine"])
def test_settings_are_words_and_stand_like_words(summary: str) -> None:
    table = page_of("int4_wo_64-awq-gptaq").split(f"<summary>{summary}</summary>")[1]
    *heads, last = re.findall(r"<th [^>]*>", table.split("</thead>")[0])
    assert all('class="t"' in head for head in heads)
    assert ('class="t"' in last) is (summary != "Plan"), "whose last column has numbers"


def test_an_entry_of_a_legend_is_a_mark_with_the_class_of_what_it_stands_for() -> None:
    mark = r'<svg viewBox="0 0 14 14" class="plot" aria-hidden="true"><(\w+) [^>]*class="([^"]*)"></\1></svg>'
    entries = re.findall(rf"<li>{mark}([^<]*)</li>", page_of("int4_wo_64-awq-gptaq"))
    assert ("circle", "dot before", "rounded to nearest") in entries
    assert ("rect", "float-area", "float") in entries
    assert ("rect", "p-solve", "solve") in entries
