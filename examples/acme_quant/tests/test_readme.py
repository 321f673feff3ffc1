"""The code in the README runs, and its report has the metrics that the README names."""

from __future__ import annotations

import re
import types
from pathlib import Path

import acme_quant.plugin
from quark.plugins import Catalog, using
from quark.plugins.discovery import Source, discover
from quark_tiny_model import calibration_batches, tiny_model

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_algorithm_of_the_readme_quantizes_and_reports_what_it_says() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    named = set(re.findall(r'"(\w+)": …', code))
    catalog = Catalog(c for c in discover() if c.source.distribution != "acme-quant")
    catalog.add(acme_quant.plugin, Source("acme-quant"))
    module = types.ModuleType("readme")
    module.__dict__.update(model=tiny_model(), batches_of_token_ids=calibration_batches(3, 32))
    with using(catalog):
        exec(compile(code, "README.md", "exec"), module.__dict__)
    metrics = module.__dict__["model"].quark_report.layers["model.layers.0.mlp.up_proj"]
    assert named
    assert named <= metrics.keys()


def test_every_name_in_code_that_the_readme_explains_exists_in_the_example_or_in_quark() -> None:
    sources = [*Path(__file__).resolve().parents[1].glob("src/**/*.py")]
    text = "\n".join(p.read_text(encoding="utf-8") for p in sources)
    classes = set(re.findall(r"`(Acme\w+)`", README))
    assert classes
    assert sorted(name for name in classes if not re.search(rf"\bclass {name}\b", text)) == []
