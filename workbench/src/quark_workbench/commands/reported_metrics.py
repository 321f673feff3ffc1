"""The metrics in a report: what ``quark evaluate`` measures, but on the data of ``--calib``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from quark.base.log import get_logger
from quark.calibration.batches import calls, ids_of
from quark.errors import ConfigError, PluginError, QuarkError
from quark.models.hf.skeleton import meta_model
from quark.plugins import metrics
from quark.plugins.run_events import running
from quark_workbench.commands.evaluation import compare_texts, evaluate_samples, evaluate_windows, texts_of
from quark_workbench.commands.evaluation_lines import figures_of
from quark_workbench.commands.run_options import CalibrationChoices, CalibrationData
from quark_workbench.data.media_rows import has_media
from quark_workbench.data.processor import load_processor
from quark_workbench.evaluate import Windows
from quark_workbench.evaluate.outputs import gives_next_tokens
from quark_workbench.evaluate.whole_texts import text_kind
from quark_workbench.report import read_report, write_contents

__all__ = ["MOST_SAMPLES", "add_metrics", "reported_metrics", "without_folders"]

MOST_SAMPLES = 32
"""Largest number of samples, texts or sequences of a run that its full report evaluates."""


def add_metrics(out: Path, float_model: Path, data: CalibrationChoices, *, device: str, trust_remote_code: bool) -> None:
    """Add the result of `reported_metrics` to the report of an export.

    Nothing is done if there is no report, or if the report already has metrics. If the measurement fails, the
    error is logged, and the report has no metrics.
    """
    try:
        report = read_report(out)
        if report is not None and report.get("evaluation") is None:
            measured = reported_metrics(out, float_model, data, device=device, trust_remote_code=trust_remote_code)
            write_contents(report | {"evaluation": measured}, out)
    except Exception as error:  # a complete checkpoint outlives any error of its report
        get_logger(__name__).warning(
            f"The report has no metrics ({type(error).__name__}: {error}); the checkpoint is complete without them."
        )


def reported_metrics(
    out: Path, float_model: Path, data: CalibrationChoices, *, device: str = "cpu", trust_remote_code: bool = False
) -> dict[str, Any]:
    """Return the metrics of an export and of its float model, in the form that a report stores.

    The result has the metrics that ``quark evaluate`` chooses for the model, and all registered metrics of
    predicted tokens. If these metrics cannot be measured, the result says why.

    Args:
        out: Directory of the export.
        float_model: Directory of the float checkpoint from which the export was made.
        data: Options for the data to measure on. At most `MOST_SAMPLES` samples are used.
        device: Torch device.
        trust_remote_code: Whether code that comes with the checkpoints may run.
    """
    where = {"device": device, "dtype": "auto", "trust_remote_code": trust_remote_code, "packed": False}
    paths, notes = (out, float_model), dict[str, str]()
    with running("report", source=str(out)) as events:
        events.phase("evaluate")
        try:
            try:
                result = _result(paths, data, metrics().names(), where)
            except PluginError as error:
                notes = {"reason": f"registered metrics are left out: {without_folders(str(error))}"}
                result = _result(paths, data, [], where)
        except QuarkError as error:
            return {"samples": 0, "figures": [], "reason": without_folders(str(error))}
    return {"samples": result["samples"], "figures": figures_of(result), **notes}


def without_folders(message: str) -> str:
    """Return a message in which each path is cut to its last name, since reports are shared.

    >>> without_folders("'b' in '/home/me/my models/llama' is no file: see /srv/a.txt")
    "'b' in 'llama' is no file: see a.txt"
    """

    def last(path: re.Match[str]) -> str:
        return re.split(r"[/\\]+", path[0].rstrip("/\\"))[-1]

    return "'".join(re.sub(r".*[/\\].*" if i % 2 else r"[^\s\"]*[/\\][^\s\"]*", last, part) for i, part in enumerate(message.split("'")))


def _result(paths: tuple[Path, Path], data: CalibrationChoices, names: list[str], where: dict[str, Any]) -> dict[str, Any]:
    """Return the result of an evaluation. A model that predicts tokens runs block by block."""
    float_model, trusts = paths[1], where["trust_remote_code"]
    model = meta_model(float_model, trust_remote_code=trusts)
    reader = data.of(float_model, model, "auto", trust_remote_code=trusts)
    count, predicts = min(data.num_calib, MOST_SAMPLES), gives_next_tokens(model)
    samples = data.samples(count)
    if any(map(has_media, samples)):
        processor = load_processor(float_model, trust_remote_code=trusts)
        predicts = predicts and not processor.is_ctc
        wanted = names if predicts or processor.is_speech_to_text else []
        return {"samples": len(samples)} | evaluate_samples(paths, samples, wanted, where, by_block=predicts)
    whole = text_kind(float_model, type(model), model.config, reader.tokenizer, data.seq_len)
    if whole is not None:
        texts = texts_of(reader.tokenizer, samples, count)
        return {"samples": len(texts)} | compare_texts(whole, paths, texts, where, by_block=False)
    windows = _windows(reader, count)
    return {"samples": sum(map(len, windows))} | evaluate_windows(paths, windows, names if predicts else [], where, by_block=predicts)


def _windows(reader: CalibrationData, count: int) -> list[Windows]:
    """Return the first ``count`` sequences as windows. All tokens of a window but the first are scored."""
    found = (ids_of(call) for call in calls(reader("the metrics of the report")))
    rows = [row[None] for ids in found if ids is not None and ids.shape[1] > 1 for row in ids]
    if not rows:
        raise ConfigError("no sequence of the data has two tokens, so no prediction can be scored: give longer texts")
    return [Windows(row.cpu(), torch.ones(1, dtype=torch.int64)) for row in rows[:count]]
