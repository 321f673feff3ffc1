"""What quark is installed beside: the table holds what was measured, and the comparison of a server on its page can fail."""

from __future__ import annotations

import json
import re
import tomllib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from packaging.requirements import Requirement
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_tiny_model import held_out_text, tiny_model, tiny_tokenizer
from tools.docs import marks
from tools.docs import neighbours as page
from tools.docs.sections import ROOT
from tools.neighbours import NEIGHBOURS
from tools.neighbours.__main__ import is_fine
from tools.neighbours.environments import difference
from tools.neighbours.work import MOST_NATS, PAGE

DATA = page.results()
INSTALL = "docs/how-to/install.md"


def test_the_page_has_the_table_of_the_data() -> None:
    assert page.table() in marks.expand((ROOT / INSTALL).read_text(encoding="utf-8"), INSTALL.removeprefix("docs/"))


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_nothing_of_a_neighbour_changed_and_all_went_well_with_the_release_that_is_named(name: str) -> None:
    assert is_fine(DATA[name])
    assert DATA[name]["versions"][NEIGHBOURS[name].distribution] == NEIGHBOURS[name].requirement.partition("==")[2]
    assert DATA[name]["install"] == f"pip {' '.join(NEIGHBOURS[name].install())}"
    assert {"quantize", "evaluate", "load in transformers", "load a mixture in transformers"} <= DATA[name]["steps"].keys()


def test_a_result_with_a_change_a_complaint_or_a_failure_is_not_fine() -> None:
    fine = DATA["vllm"]
    assert not is_fine(fine | {"changed": ["torch 2.13.0 → 2.14.1"]})
    assert not is_fine(fine | {"complaints": ["quark-core 1.0 has requirement torch>=3"]})
    assert not is_fine(fine | {"steps": {"quantize": "failed: no"}})


def test_what_is_new_changed_or_gone_is_noticed() -> None:
    added, changed = difference({"torch": "2.13.0", "gone": "1", "kept": "1"}, {"torch": "2.14.1", "kept": "1", "attrs": "26"})
    assert added == ["attrs"]
    assert changed == ["torch 2.13.0 → 2.14.1", "gone 1 → none"]


def test_the_extras_of_the_vllm_plugin_allow_the_release_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "plugins/quark_vllm/pyproject.toml").read_text(encoding="utf-8"))["project"]
    tested = Requirement(NEIGHBOURS["vllm"].requirement)
    (version,) = (specifier.version for specifier in tested.specifier)
    for extra in ("cpu", "cuda"):
        (allowed,) = map(Requirement, project["optional-dependencies"][extra])
        assert version in allowed.specifier
        assert any(specifier.operator == "<" for specifier in allowed.specifier), "it builds on classes of vLLM that may change"
    assert Requirement(project["optional-dependencies"]["cpu"][0]).name == tested.name


def test_the_comparison_of_the_page_tells_the_model_from_one_that_is_not_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ModelQuantizer(LLMTemplate.get("llama").get_config("mx6")).quantize_model(tiny_model(torch.bfloat16))
    export_safetensors(model, "served")
    tiny_tokenizer().save_pretrained("served")
    (tmp_path / "text.txt").write_text(held_out_text()[:2000], encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)

    def mean_of(other: nn.Module) -> float:
        with answering(other) as address:
            exec(compile(code.replace("http://127.0.0.1:8000", address), str(PAGE), "exec"), types.ModuleType("page").__dict__)
        return float(re.findall(r"mean ([\d.]+)", capsys.readouterr().out)[0])

    assert mean_of(AutoModelForCausalLM.from_pretrained("served", dtype=torch.float32)) == 0
    assert mean_of(tiny_model(torch.float32)) > 2 * MOST_NATS


@contextmanager
def answering(model: nn.Module) -> Iterator[str]:
    """Yield the address of a server that gives a model's log-probabilities of a prompt in the form that vLLM's has."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            rows = [
                None,
                *({str(token): {"logprob": p}} for token, p in zip(question["prompt"][1:], given(question["prompt"]), strict=True)),
            ]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"prompt_logprobs": rows}]}).encode())

        def log_message(self, *_: object) -> None:
            pass

    def given(ids: list[int]) -> list[float]:
        with torch.no_grad():
            logprobs: Tensor = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logprobs[torch.arange(len(ids) - 1), ids[1:]].tolist()  # type: ignore[no-any-return]

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
