"""Flags of a report, which are red or amber findings. Each flag has a threshold and advice.

Every threshold is a constant, whose docstring has the reason for its value. Flags come from measurements of
single layers and blocks; only an evaluation of the model shows whether the result of a run is good.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["AMBER", "RED", "THRESHOLDS", "flags_of"]

RED, AMBER = "red", "amber"

LOW_SNR_RED = 10.0
"""dB. The error has a tenth of the energy of the weight (or output), as with 2-bit weights, which few models
survive.
"""
LOW_SNR_AMBER = 15.0
"""dB. 4-bit formats reach 16 to 21 dB for normally distributed weights; below, the layer has outliers or at
most 3 bits.
"""
DEPTH_RED = 3.0
"""In dB. At this ratio, the error has half the energy of the hidden states, so the model is broken."""
DEPTH_AMBER = 10.0
"""In dB. At this ratio, the error has a tenth of the energy of the hidden states."""
PEAK_TO_RMS = 40.0
"""Weight ÷ root mean square: with such a peak, one step of a 4-bit grid is 5 standard deviations.
"""
SCALE_RATIO = 64.0
"""Scale ÷ median scale: the group (or channel) has outliers 6 bits above the others, and rounds its other
values coarsely.
"""
INPUT_PEAK_TO_RMS = 100.0
"""Input value ÷ root mean square: with such a peak, one 8-bit step is nearly the root mean square.
"""
DEAD_AMBER = 0.01
"""Share of input channels that were always 0 in calibration: a few are normal in trained models, 1 % means
too few data.
"""
DEAD_RED = 0.1
"""Share of input channels that were always 0: the rounding ignores a tenth of the layer's inputs.
"""
FEW_TOKENS = 0.05
"""Share of the mean number of tokens per expert below which an expert counts as starved, as in the log's
warning.
"""
DOMINANT = 0.5
"""Share of the summed relative error of all layers that the dominant layers have together."""
DOMINANT_LAYERS = 0.05
"""Dominant layers are named if they are at most this share of all layers, so that excluding them costs
little.
"""
GIVEN_UP = 0.5
"""Share of layers rounded to nearest instead of by the algorithm, above which the algorithm does not work.
"""

THRESHOLDS = {name.lower(): value for name, value in dict(globals()).items() if isinstance(value, float)}
"""Dictionary from name in lower case to value, for all constants above."""

Layers = Sequence[Mapping[str, Any]]


def flags_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the flags of a report. Red flags come before amber flags.

    Args:
        report: The contents of the report, without flags.

    Returns:
        A dictionary for each flag, with ``level`` (``red`` or ``amber``), ``code``, ``title``, ``advice`` and
        ``layers``. The worst layer is the first.
    """
    layers, found = report["layers"], list[dict[str, Any]]()
    for rule in _RULES:
        found += rule(layers, report)
    found += [_flag(AMBER, "plan", warning, "Look at the plan: quark quantize … --dry-run.") for warning in report["settings"]["warnings"]]
    return sorted(found, key=lambda flag: flag["level"] != RED)


def _harm(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    found = report.get("model_error")
    if found and found["does_harm"]:
        error = "a number that is not finite" if found["error"] is None else f"{found['error']:.3g}"
        title = (
            f"The model is worse than round-to-nearest: the error after its last block is {error} instead of {found['nearest_error']:.3g}"
        )
        yield _flag(
            RED,
            "harm",
            title,
            "Leave out the algorithm, use another algorithm, or use more data. Then compare the results with quark evaluate.",
        )


def _low_ratio(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    what = {"snr_db": "weights", "output_snr_db": "outputs on held-out tokens"}
    advice = "Exclude these layers (--exclude), or give them more bits (--layer PATTERN=SCHEME, or a smaller group)."
    # Calibrated rounding lets weights differ more so that outputs differ less. So weights count only if the
    # outputs of the layer are unknown.
    unseen = [layer for layer in layers if layer.get("output_snr_db") is None]
    for key, name in what.items():
        known = sorted((x for x in (unseen if key == "snr_db" else layers) if x.get(key) is not None), key=lambda layer: layer[key])
        worse = [layer for layer in known if layer[key] < LOW_SNR_RED]
        bad = [layer for layer in known if LOW_SNR_RED <= layer[key] < LOW_SNR_AMBER]
        for level, chosen, limit in ((RED, worse, LOW_SNR_RED), (AMBER, bad, LOW_SNR_AMBER)):
            if chosen:
                lowest = f"the lowest is {chosen[0][key]:.1f} dB"
                title = f"Signal-to-noise ratio of the {name} below {limit:g} dB in {_count(chosen, layers)}; {lowest}"
                yield _flag(level, f"low_{key}", title, advice, chosen)


def _depth(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    known = [row for row in report["depth"]["blocks"] if row["snr_db"] is not None]
    if known and (worst := min(known, key=lambda row: row["snr_db"]))["snr_db"] < DEPTH_AMBER:
        level = RED if worst["snr_db"] < DEPTH_RED else AMBER
        title = f"The hidden states after {worst['block']} have a signal-to-noise ratio of {worst['snr_db']:.1f} dB against the float model"
        advice = "Give more bits to the blocks before the curve falls, or use a calibrated rounding. Then run quark evaluate."
        yield _flag(level, "depth", title, advice)


def _dominant(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    key = "output_snr_db" if any(layer.get("output_snr_db") is not None for layer in layers) else "snr_db"
    errors = sorted(((10 ** (-layer[key] / 10), i) for i, layer in enumerate(layers) if layer.get(key) is not None), reverse=True)
    total, so_far = sum(error for error, _ in errors), 0.0
    for number, (error, _) in enumerate(errors, 1):
        so_far += error
        if number > max(1, DOMINANT_LAYERS * len(errors)) or len(errors) < 1 / DOMINANT_LAYERS:
            return
        if so_far >= DOMINANT * total:
            chosen = [layers[i] for _, i in errors[:number]]
            title = f"{_count(chosen, layers)} {'has' if number == 1 else 'have'} {so_far / total:.0%} of the summed relative error"
            advice = "Give only these layers a wider scheme (--layer NAME=SCHEME): it costs little and gains most."
            yield _flag(AMBER, "dominant", title, advice, chosen)
            return


def _unreached(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    chosen = [layer for layer in layers if layer.get("unreached")]
    if chosen:
        title = f"No calibration token reached {_count(chosen, layers)}: rounded to nearest"
        yield _flag(RED, "unreached", title, "Use more varied data, or --calibrate-all-experts.", chosen)


def _starved_experts(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    counts = report["experts"]["tokens"]
    mean = sum(counts.values()) / max(len(counts), 1)
    starved = sorted((count, name) for name, count in counts.items() if count < FEW_TOKENS * mean)
    for level, names in ((RED, [n for c, n in starved if c == 0]), (AMBER, [n for c, n in starved if c > 0])):
        if names:
            what = "no token" if level == RED else f"less than {FEW_TOKENS:.0%} of the mean of {mean:.0f} tokens"
            title = f"{len(names)} of {len(counts)} layers of experts got {what}"
            yield _flag(level, "expert_tokens", title, "Use more data, or --calibrate-all-experts.", [{"name": name} for name in names])


def _given_up(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    chosen = sorted((x for x in layers if x.get("to_nearest_because")), key=lambda x: -(x.get("held_out_error") or 0))
    if chosen:
        tried = [layer for layer in layers if layer.get("algorithm")]
        level = RED if len(chosen) > GIVEN_UP * len(tried) else AMBER
        title = f"{_count(chosen, tried)} rounded to nearest: the algorithm was worse on held-out tokens, or failed"
        advice = "Use more calibration data, closer to the use of the model, or another algorithm."
        yield _flag(level, "given_up", title, advice, chosen)


def _damped(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    chosen = [layer for layer in layers if (layer.get("attempts") or 1) > 1]
    if chosen:
        title = f"The algorithm raised the damping in {_count(chosen, layers)}, up to {max(layer['damping'] for layer in chosen):g}"
        yield _flag(AMBER, "damping", title, "Use more calibration data, or a larger damping from the start.", chosen)


def _dead(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    shares = [(layer["dead"] / layer["columns"], i) for i, layer in enumerate(layers) if layer.get("dead") and layer.get("columns")]
    chosen = [(share, layers[i]) for share, i in sorted(shares, reverse=True) if share > DEAD_AMBER]
    if chosen:
        worst = chosen[0][0]
        title = f"Input channels that were always 0: more than {DEAD_AMBER:.0%} in {_count(chosen, layers)}, up to {worst:.0%}"
        yield _flag(RED if worst > DEAD_RED else AMBER, "dead", title, "Use more varied calibration data.", [layer for _, layer in chosen])


_OUTLIERS = (
    ("weight_outliers", "peak_to_rms", "Weights with a peak above {:g} times their root mean square"),
    ("scale_outliers", "scale_ratio", "Scales above {:g} times the median scale"),
    ("input_outliers", "input_peak_to_rms", "Quantized inputs with a peak above {:g} times their root mean square"),
)
"""Code of a flag, the metric of a layer, which is also the name of its threshold, and the title."""


def _outliers(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for code, key, title in _OUTLIERS:
        of_inputs, limit = code == "input_outliers", THRESHOLDS[key]
        rounded = [layer for layer in layers if layer.get("input_quantized") or not of_inputs]
        chosen = sorted((layer for layer in rounded if (layer.get(key) or 0) > limit), key=lambda layer: -layer[key])
        if chosen:
            of_weights = "Use smaller groups, or a rotation, which spreads outliers."
            advice = "Use an equalization or a rotation, or scales per token or per block." if of_inputs else of_weights
            yield _flag(AMBER, code, f"{title.format(limit)} in {_count(chosen, layers)}", advice, chosen)


def _few_tokens(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    chosen = [layer for layer in layers if layer.get("few_tokens")]
    if chosen:
        title = f"Fewer calibration tokens than input channels in {_count(chosen, layers)}"
        yield _flag(AMBER, "few_tokens", title, "Use more calibration data: --num-calib, --seq-len.", chosen)


def _transforms(layers: Layers, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    left_out = [t for t in report["transforms"] if t.get("applied") is False]
    if left_out:
        reason = next((str(t["reason"]) for t in left_out if t.get("reason")), "it did not reduce the error on held-out tokens")
        title = f"A transform was left out in {len(left_out)} of {len(report['transforms'])} places: {reason}"
        yield _flag(AMBER, "transform_left_out", title, "The result is fine; another preset may be better.", left_out)
    if any(t.get("held_out") is False for t in report["transforms"]):
        title = "Transforms were validated on the tokens that they were fitted to, since there were too few to hold any out"
        yield _flag(AMBER, "not_held_out", title, "Use more calibration data.")


_RULES = (
    _harm,
    _low_ratio,
    _depth,
    _dominant,
    _unreached,
    _starved_experts,
    _given_up,
    _damped,
    _dead,
    _outliers,
    _few_tokens,
    _transforms,
)


def _count(chosen: Sequence[Any], layers: Sequence[Any]) -> str:
    return f"{len(chosen)} of {len(layers)} layers"


def _flag(level: str, code: str, title: str, advice: str, layers: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"level": level, "code": code, "title": title, "advice": advice, "layers": [str(layer["name"]) for layer in layers]}
