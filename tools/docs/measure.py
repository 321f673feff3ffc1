"""Measure the perplexity of every scheme with round-to-nearest, for the page on accuracy and bits.

    python -m tools.docs.measure MODEL TEXT_DIR docs/data/round_to_nearest.json [--schemes NAME,…]

`benchmarks.perplexity` describes the protocol; this program makes no comparison with the float model. If a
scheme does not fit the model's shapes, the file has the reason. The program skips schemes that are in the
file already, so you can restart a measurement. Remove the file to measure again.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch

from benchmarks.perplexity import sequences
from quark.base.version import VERSION
from quark.errors import ConfigError
from quark.models.hf.loading import load_model
from quark.models.hf.tokenizer import load_tokenizer
from quark.plugins import schemes
from quark.torch import LLMTemplate, ModelQuantizer
from quark_workbench.evaluate import perplexity

CALIBRATION = [("foldoc.txt", 200_000, 8, 512)]
EVALUATION = [("foldoc.txt", 3_500_000, 8, 512), ("devil.txt", 20_000, 8, 512)]
"""File, first character, windows, tokens of a window."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--schemes", help="NAME,… to measure now; by default all")
    args = parser.parse_args()
    logging.getLogger("quark").setLevel(logging.ERROR)
    tokenizer = load_tokenizer(args.model)
    calibration = [sequences(tokenizer, args.text / file, *window) for file, *window in CALIBRATION]
    evaluation = list(torch.cat([sequences(tokenizer, args.text / file, *window) for file, *window in EVALUATION]).split(4))
    result: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"perplexity": {}, "refused": {}}
    result |= {
        "command": "python -m tools.docs.measure SMOLLM2_135M TEXT_DIR docs/data/round_to_nearest.json",
        "model": "SmolLM2-135M, float32",
        "quark": VERSION,
        "torch": str(torch.__version__),
        "calibration": CALIBRATION,
        "evaluation": EVALUATION,
    }
    for scheme in args.schemes.split(",") if args.schemes else ["float", *schemes().names()]:
        if scheme not in {**result["perplexity"], **result["refused"]}:
            try:
                result["perplexity"][scheme] = _measure(args.model, scheme, list(torch.cat(calibration).split(1)), evaluation)
            except ConfigError as error:  # the scheme does not fit the shapes of the model
                result["refused"][scheme] = " ".join(str(error).split()).partition("): ")[0] + ")"
            print(scheme, result["perplexity"].get(scheme) or result["refused"][scheme], flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _measure(path: Path, scheme: str, calibration: list[torch.Tensor], evaluation: list[torch.Tensor]) -> float:
    """Return the perplexity of the model after quantization with a scheme. ``"float"`` stands for the float
    model."""
    model = load_model(path, "float32")
    if scheme != "float":
        config = LLMTemplate.get(model.config.model_type).get_config(scheme=scheme)
        model = ModelQuantizer(config).quantize_model(model, calibration)
    return round(perplexity(model, evaluation), 3)


if __name__ == "__main__":
    main()
