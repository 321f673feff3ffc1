"""`benchmarks.defaults`: paired statistics, verdicts, settings as they are written, texts apart, kinds of models, rescaled models."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, PreTrainedModel, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from benchmarks import defaults, model_kinds, speech
from benchmarks.defaults import Setting
from benchmarks.paired import Difference, difference, log_ratio, overall, student_t
from benchmarks.pooling import pooled, row_of
from benchmarks.rescaled import rescale
from benchmarks.texts import windows
from quark_algos.gptq import config as gptq_config
from quark_algos.gptq.config import GPTQConfig, recipe_of
from quark_tiny_model import tiny_model, tiny_model_dir, tiny_tokenizer
from tests.kit.model_classes import random_model
from tools.docs import defaults as page


@pytest.mark.parametrize(("degrees", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (15, 2.1314), (120, 1.9799)])
def test_quantiles_are_those_of_students_distribution(degrees: int, expected: float) -> None:
    assert student_t(degrees) == pytest.approx(expected, rel=1e-4)


def test_the_error_of_a_difference_is_that_of_pairs_and_not_that_of_the_values() -> None:
    hard_and_easy = [1.0, 5.0, 0.2, 9.0]
    shifts = [0.10, 0.12, 0.11, 0.09]
    change = difference(hard_and_easy, [a - b for a, b in zip(hard_and_easy, shifts, strict=True)])
    assert change.mean == pytest.approx(-0.105)
    assert change.error == pytest.approx(math.sqrt(sum((s - 0.105) ** 2 for s in shifts) / 3 / 4))
    assert change.verdict == "better"
    assert difference([a - b for a, b in zip(hard_and_easy, shifts, strict=True)], hard_and_easy).verdict == "worse"


def test_a_difference_within_its_interval_is_no_difference() -> None:
    inside, outside = (Difference(factor * student_t(3) * 0.1, 0.1, 4) for factor in (0.99, 1.01))
    assert (inside.verdict, outside.verdict) == ("equal", "worse")
    assert difference([1.0], [9.0]).verdict == "equal", "one sequence says nothing of others"


def test_equal_values_are_equal() -> None:
    assert difference([1.0, 2.0], [1.0, 2.0]).verdict == "equal"


def test_what_is_measured_on_one_sequence_counts_once() -> None:
    once = [("a", 1.0, 2.0), ("b", 1.0, 4.0), ("c", 1.0, 2.0)]
    assert log_ratio([*once, *once]) == log_ratio(once)
    assert math.exp(log_ratio(once).mean) == pytest.approx(16 ** (1 / 3))
    assert log_ratio([("a", 1.0, 2.0), ("a", 1.0, 0.5)]).mean == pytest.approx(0)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ("better better equal", "better"),
        ("better equal equal", "equal"),
        ("better better worse", "mixed"),
        ("worse worse equal", "worse"),
        ("equal worse equal", "equal"),
    ],
)
def test_a_default_may_change_where_most_cells_win_and_none_loses(verdicts: str, expected: str) -> None:
    assert overall(verdicts.split()) == expected


def cell(model: str, before: list[float], after: list[float]) -> dict[str, object]:
    values = {"now": {"kl": before, "nll": [3.0] * len(before)}, "new": {"kl": after, "nll": [3.1] * len(after)}}
    where = {"model": model, "seed": 0, "scheme": "int4", "calibration": "a", "evaluation": "b"}
    return where | {"cost": {"now": 2.0, "new": 1.0}, "values": values}


def test_the_page_has_a_row_for_each_cell_and_the_verdict_over_all(tmp_path: Path) -> None:
    path = tmp_path / "defaults.json"
    assert page.page(path) == "No comparison has been recorded yet."
    cells = [cell("one", [0.2, 0.4, 0.3], [0.1, 0.2, 0.15]), cell("two", [0.02, 0.04, 0.03], [0.01, 0.05, 0.02])]
    assert math.exp(pooled(cells, "now", "new").mean) == pytest.approx((0.125 * 1 / 2 * 5 / 4 * 2 / 3) ** (1 / 6))
    assert row_of(cells[0], "now", "new").change.mean == pytest.approx(-0.15)
    args = defaults.parser().parse_args([str(tmp_path), "m", "--setting", "now=gptq", "--setting", "new=awq"])
    args.setting, args.calibrate, args.evaluate = [Setting.parse(text) for text in args.setting_texts], ["a"], ["b"]
    for kind in "ab":
        (tmp_path / f"{kind}.txt").write_text(kind, encoding="utf-8")
    defaults.add_comparison(path, args, cells)
    args.device = "cuda"
    defaults.add_comparison(path, args, cells)
    text = page.page(path)
    assert text.count("models on cuda") == 1
    assert "**new: equal**" in text
    assert "cells: 1 better, 1 equal, 0 worse" in text
    assert "| two | 0 | `int4` | a → b | 0.0300 | 20.09 | -0.0033 ± 0.0067, equal | 1.105 |" in text
    assert json.loads(path.read_text(encoding="utf-8"))["comparisons"][0]["settings"]["new"] == "new=awq"


def test_a_setting_is_algorithms_with_options_and_replaced_constants() -> None:
    text = "x=awq+gptq:gptq.damp_percent=0.2,scale_search=mse,quark_algos.gptq.config.BEST_DAMPING=0.3"
    setting = Setting.parse(text)
    config = setting.config("llama", "int4_wo_64")
    (gptq,) = [settings for settings in config.algo_config or [] if isinstance(settings, GPTQConfig)]
    assert (gptq.damp_percent, gptq.scale_search) == (0.2, "mse")
    before = gptq_config.BEST_DAMPING
    with setting.replacing():
        assert recipe_of(gptq).percdamp == 0.2, "what is given counts before the constant of a preset"
        assert recipe_of(GPTQConfig()).percdamp == 0.3
    assert before == gptq_config.BEST_DAMPING


def test_a_function_is_replaced_by_one_that_returns_the_value() -> None:
    setting = Setting.parse("x=gptq:quark.algorithms.statistics.Hessian.shrinkage=[0.0,0.5]")
    from quark.algorithms.statistics import Hessian

    with setting.replacing():
        assert Hessian(4, torch.device("cpu")).shrinkage() == (0.0, 0.5)
    both = Setting.parse('x=gptq:a.b.c={"d":[1,2],"e":3},f=[4,5]')
    assert (both.replaced, both.options) == ({"a.b.c": {"d": [1, 2], "e": 3}}, {"f": (4, 5)})
    assert Hessian(4, torch.device("cpu")).shrinkage() == (1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gptq", "is not a setting"),
        ("x=gptq:damp_percent", "has no value"),
        ("x=gptq:dampening=1", "has the option dampening"),
        ("x=none:damp_percent=1", "has the option damp_percent"),
        ("x=gptq:quark_algos.gptq.config.NOTHING=1", "quark_algos.gptq.config.NOTHING does not exist"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(text: str, message: str) -> None:

    def use() -> None:
        setting = Setting.parse(text)
        setting.config("llama", "int4_wo_64")
        with setting.replacing():
            pass

    with pytest.raises(ValueError, match=message):
        use()


def test_texts_of_calibration_and_evaluation_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i:04} of a text\n" for i in range(4000)), encoding="utf-8")
    tokenizer = tiny_tokenizer()
    first, second = (
        {int(number) for row in windows(tokenizer, path, half, 4, 64) for number in re.findall(r"line (\d{4})", tokenizer.decode(row))}
        for half in (0, 1)
    )
    assert max(first) < 2000 <= min(second)
    assert (min(first), min(second)) == (1, 2001), "a window begins with a whole line"
    assert min(n for n in first if n > 500) == 501, "windows are at even distances"
    assert windows(tokenizer, path, 1, 4, 64).shape == (4, 64)
    with pytest.raises(ValueError, match="too few tokens"):
        windows(tokenizer, path, 1, 4, 10**5)


def test_a_setting_may_have_calibration_data_of_its_own(tmp_path: Path) -> None:
    setting = Setting.parse("x=gptq:calibration=a+b,calibration_windows=3,calibration_length=16")
    assert (setting.calibration, setting.sequences, setting.length, setting.options) == ("a+b", 3, 16, {})
    for kind in "ab":
        (tmp_path / f"{kind}.txt").write_text("".join(f"verse {i} of {kind * 8}\n" for i in range(500)), encoding="utf-8")
    for texts, are_of_a in (("a+b", [True, True, False]), ("a+b+b", [True, False, False])):
        kind = model_kinds.LanguageModel(None, tmp_path, tiny_tokenizer(), tmp_path)
        rows = [batch["input_ids"][0] for batch in kind.calibration(texts, 3, 16)]
        assert [row.shape for row in rows] == [(16,)] * 3
        assert ["a" * 8 in tiny_tokenizer().decode(row) for row in rows] == are_of_a


def test_a_rescaled_model_has_other_weights_and_the_same_function() -> None:
    tokens = torch.randint(1000, (2, 32), generator=torch.Generator().manual_seed(0))
    model, other = tiny_model(blocks=1), tiny_model(blocks=1)
    assert rescale(other, 3, tokens) == 4
    one, two = (m.model.layers[0].self_attn.o_proj.weight.detach() for m in (model, other))
    assert float((one - two).norm() / one.norm()) > 0.1
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, other(tokens).logits, rtol=1e-3, atol=1e-3)
    assert rescale(other, 0, tokens) == 0


def test_settings_are_compared_on_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("own", "other"):
        (tmp_path / f"{kind}.txt").write_text("".join(f"{kind} verse {i} of the {kind} book\n" for i in range(2000)), encoding="utf-8")
    out = tmp_path / "defaults.json"
    command = [str(tmp_path), "tiny-llama", "--setting", "coarse=none", "--setting", "fine=none"]
    command += ["--calibrate", "own", "--evaluate", "own,other", "--schemes", "int4_wo_64,int8", "--windows", "2", "--length", "32"]
    defaults.main([*command, "--calibration-windows", "2", "--out", str(out)])
    cells = json.loads(out.read_text(encoding="utf-8"))["comparisons"][0]["cells"]
    assert [(one["scheme"], one["evaluation"]) for one in cells] == [(s, t) for s in ("int4_wo_64", "int8") for t in ("own", "other")]
    assert all(one["values"]["coarse"] == one["values"]["fine"] for one in cells)
    int4, int8 = (sum(one["values"]["fine"]["kl"]) for one in cells[::2])
    assert int4 > int8 > 0
    assert (
        "fine against coarse: KL +0.0 ± 0.0 % over 4 sequences; cells: 0 better, 4 equal, 0 worse; verdict: equal"
        in capsys.readouterr().out
    )


EMBEDDER = BertConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
RECOGNIZER = WhisperConfig(
    vocab_size=1000, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=8, max_source_positions=50, max_target_positions=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip


def saved(model: PreTrainedModel, directory: Path) -> str:
    """Save a model with the tiny tokenizer, and the extractor of a second of sound; return the directory's name."""
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(directory)
    return str(directory)


def test_models_of_other_kinds_are_compared_by_measures_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def spoken(text: str, language: str) -> torch.Tensor:
        heard.append(f"{language}: {text}")
        return torch.randn(8000, generator=torch.Generator().manual_seed(len(text)))

    monkeypatch.setattr(model_kinds, "spoken", spoken)
    for kind in ("devil", "german"):
        (tmp_path / f"{kind}.txt").write_text("".join(f"<{kind}> verse {i} of {{the}} book_\n" for i in range(2000)), encoding="utf-8")
    torch.manual_seed(0)
    models = [
        saved(BertModel(EMBEDDER), tmp_path / "embedder"),
        saved(WhisperForConditionalGeneration(RECOGNIZER), tmp_path / "recognizer"),
    ]
    out = tmp_path / "defaults.json"
    command = [str(tmp_path), *models, str(tiny_model_dir()), "--setting", "four=none", "--setting", "again=none"]
    command += ["--calibrate", "devil", "--evaluate", "german", "--schemes", "int4_wo_32,ptpc_fp8", "--windows", "2", "--length", "24"]
    defaults.main([*command, "--calibration-windows", "1", "--out", str(out)])
    cells = json.loads(out.read_text(encoding="utf-8"))["comparisons"][0]["cells"]
    measured = {(one["model"], one["scheme"]): one["values"]["four"] for one in cells}
    assert [list(measured[model, "ptpc_fp8"]) for model in ("embedder", "recognizer")] == [["distance"], ["kl", "nll"]]
    for model, measure in (("embedder", "distance"), ("recognizer", "kl")):
        int4, fp8 = (measured[model, scheme][measure] for scheme in ("int4_wo_32", "ptpc_fp8"))
        assert len(int4) == len(fp8) == 2
        assert all(0 < better < worse for better, worse in zip(fp8, int4, strict=True)), model
    assert "again against four: KL and 1 − cosine +0.0" in capsys.readouterr().out
    assert {line.partition(":")[0] for line in heard} == {"de", "en"}, "each text is spoken in its language"
    assert not [line for line in heard if set(line) & set("<>{}_\n")]
    text = page.page(out)
    assert "| KL or 1 − cosine, four | perplexity |" in text
    row = next(line for line in text.splitlines() if line.startswith("| embedder | 0 | `int4_wo_32` | devil → german |"))
    assert row.split(" | ")[5] == "", "an embedder has no perplexity"


def test_the_tokens_with_which_a_transcription_begins_are_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_kinds, "spoken", lambda text, language: torch.zeros(8000))
    model = WhisperForConditionalGeneration(RECOGNIZER).eval()
    path = Path(saved(model, tmp_path / "recognizer"))
    kind = model_kinds.kind_of(model)(model, path, tiny_tokenizer(), tmp_path)
    batch = kind.batch(torch.tensor(tiny_tokenizer()("some words")["input_ids"]), "devil")
    assert isinstance(kind, model_kinds.SpeechRecognizer)
    scored = kind.scored(batch)
    words = tiny_tokenizer()("some words", add_special_tokens=False)["input_ids"]
    assert scored.tokens[:, 1:][scored.scored].tolist() == [*words, model.config.eos_token_id]
    with torch.no_grad():
        predicted = kind.predicted(model, batch, scored)
        expected = model(input_features=batch["input_features"], decoder_input_ids=scored.tokens[:, :-1]).logits[
            0, -len(predicted.targets) :
        ]
    assert predicted.targets.tolist() == [*words, model.config.eos_token_id]
    assert torch.allclose(predicted.logits, expected, atol=1e-5)


def test_what_is_measured_of_language_models_alone_is_refused_for_others(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("".join(f"verse {i} of the book\n" for i in range(2000)), encoding="utf-8")
    command = [str(tmp_path), saved(BertModel(EMBEDDER), tmp_path / "embedder"), "--setting", "a=none", "--setting", "b=none"]
    for option in ("--seeds=1", "--blocks=1"):
        with pytest.raises(ValueError, match="embedder is not a language model: give --seeds 0 and no --blocks"):
            defaults.main([*command, "--calibrate", "own", "--evaluate", "own", option])
    with pytest.raises(ValueError, match="a ViTModel is neither a language model, nor"):
        model_kinds.kind_of(random_model("ViTModel"))


def test_speech_is_made_of_a_text_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("espeak-ng") and shutil.which("sox"):
        samples = speech.spoken("good morning", "en")
        assert 0.3 < len(samples) / speech.RATE < 3
        assert 0.05 < float(samples.abs().max()) <= 1
        with pytest.raises(ValueError, match=r"takes longer to speak than a model's window of 30 s"):
            speech.spoken("good morning " * 60, "en")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="espeak-ng and sox"):
        speech.spoken("good morning", "en")
