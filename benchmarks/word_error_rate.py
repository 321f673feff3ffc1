"""Measure the word error rate of a speech model before and after quantization.

    python -m benchmarks.word_error_rate MODEL TEXT OUT_DIR [--runs none/int4_wo_64,gptq/int4_wo_64,none/fp8]

espeak-ng speaks sentences of TEXT, a file of ``benchmarks.texts``. Calibration uses sentences from the first
half of TEXT, and evaluation uses sentences from the second half. A run is ``ALGORITHMS/SCHEME``, with
algorithms joined by ``+``; ``quark quantize`` quantizes the model. Standard errors come from a bootstrap over
sentences, and the error of a difference from pairs of values for the same sentence. The program writes the
sounds, the checkpoints and the transcripts to OUT_DIR. It does not make them again if they exist.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import torch

from benchmarks.speech import RATE, spoken
from quark.checkpoint.transformers_loading import load_checkpoint
from quark_workbench.data import read_samples
from quark_workbench.data.processor import load_processor
from quark_workbench.evaluate.metrics import Mean
from quark_workbench.evaluate.sample_windows import sample_windows
from quark_workbench.evaluate.word_error_rate import rate_difference, transcripts, word_error_rate, word_errors

RUNS = "none/int4_wo_64,none/fp8,gptq/int4_wo_64,awq+gptq/int4_wo_64"
_SENTENCE = re.compile(r"(?<=[.!?] )[A-Z](?:[a-z]|[,;:]? |[a-z]'(?=[a-z]))+[a-z][.!?](?= )")
_FEWEST_WORDS, _MOST_WORDS = 7, 20


def sentences(text: str, half: int, count: int) -> list[str]:
    """Return sentences of 7 to 20 words. They are spread evenly over one half of a text.

    Only the first letter of a sentence is a capital.

    Args:
        text: The text.
        half: 0 for calibration, 1 for evaluation.
        count: Number of sentences.

    Raises:
        ValueError: The half has fewer than ``count`` such sentences.
    """
    size = len(text) // 2
    part = " ".join(text[half * size : (half + 1) * size].split())
    found = [one for one in dict.fromkeys(_SENTENCE.findall(part)) if _FEWEST_WORDS <= len(one.split()) <= _MOST_WORDS]
    if len(found) < count:
        raise ValueError(f"one half of the text has {len(found)} lowercase sentences, fewer than {count}: give a longer text")
    return [found[i * len(found) // count] for i in range(count)]


def write_sounds(folder: Path, texts: list[str]) -> Path:
    """Write a sound file for each text; return the path of ``rows.jsonl``, which has their words."""
    rows = folder / "rows.jsonl"
    if rows.exists():
        return rows
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        samples = (spoken(text, "en") * 32_768).to(torch.int16)
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(samples.numpy().tobytes())
    rows.write_text("".join(json.dumps({"audio": f"{n}.wav", "text": text}) + "\n" for n, text in enumerate(texts)), encoding="utf-8")
    return rows


def errors_of(model: Path, run: str, rows: tuple[Path, Path], out: Path, dtype: str) -> list[tuple[int, int]]:
    """Quantize as a run says, transcribe, and return the number of errors and of words in each sentence.

    An empty ``run`` is the float model. ``rows`` are the files with the sentences for calibration and for
    evaluation. The checkpoint and the transcripts are written to ``out``, and used again if they exist.
    """
    algorithms, _, scheme = run.partition("/")
    name = run.replace("/", "-") or "float"
    samples: list[Any] = list(read_samples(rows[1]))
    result = out / f"{name}.json"
    if not result.exists():
        checkpoint = out / name if run else model
        if not checkpoint.exists():
            given = [part for algorithm in algorithms.split("+") if algorithm != "none" for part in ("--algorithm", algorithm)]
            command = ["quantize", model, checkpoint, "--scheme", scheme, *given, "--calib", rows[0], "--dtype", dtype, "--no-report"]
            subprocess.run([sys.executable, "-m", "quark", *map(str, command)], check=True)
        processor = load_processor(checkpoint)
        written = transcripts(load_checkpoint(checkpoint, dtype), processor, sample_windows(processor, samples), samples)
        result.write_text(json.dumps(written, indent=0) + "\n", encoding="utf-8")
    return [word_errors(said, sample.text) for said, sample in zip(json.loads(result.read_text(encoding="utf-8")), samples, strict=True)]


def table_row(name: str, errors: list[tuple[int, int]], of_float: list[tuple[int, int]]) -> str:
    """Return a line of a table: the word error rate of a run, and its difference from the float model's."""
    rate, difference = word_error_rate(errors), rate_difference(errors, of_float)
    return f"| {name} | {_percent(rate)} | {_percent(difference, '+') if errors is not of_float else ''} |"


def _percent(mean: Mean, sign: str = "") -> str:
    return f"{mean.value:{sign}.1%} ± {mean.error:.1%}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", default=RUNS)
    parser.add_argument("--sentences", type=int, default=50, help="number of sentences for calibration, and for evaluation")
    parser.add_argument("--dtype", default="auto", help="dtype of the float model")
    args = parser.parse_args(arguments)
    text = args.text.read_text(encoding="utf-8", errors="replace")
    folders = [args.out / "calibration", args.out / "evaluation"]
    rows = [write_sounds(folder, sentences(text, half, args.sentences)) for half, folder in enumerate(folders)]
    print("| run | word error rate | difference from float |\n|---|---|---|", flush=True)
    of_float = errors_of(args.model, "", (rows[0], rows[1]), args.out, args.dtype)
    print(table_row("float", of_float, of_float), flush=True)
    for run in args.runs.split(","):
        print(table_row(run, errors_of(args.model, run, (rows[0], rows[1]), args.out, args.dtype), of_float), flush=True)


if __name__ == "__main__":
    main()
