"""Pictures of the steps of a run: the stream of blocks, and the forward passes, which pause at each input
group of a block."""

from __future__ import annotations

from quark.plugins import templates
from tools.docs.pictures.svg import BLUE, GREEN, GREY, ORANGE, Drawing

__all__ = ["block_pipeline", "lock_step"]


def block_pipeline() -> Drawing:
    """Draw the steps of each decoder block: source, transforms, calibration and rounding, sink."""
    drawing = Drawing(860, 268)
    drawing.box(118, 36, 620, 150, GREY, 0.06, 8)
    drawing.text(130, 56, "for each decoder block; one is in memory at a time", 12, GREY)
    steps = [
        (136, "source", ["reads the tensors", "of the block"], GREY),
        (286, "transforms", ["rotation, equalization;", "validated, or undone"], ORANGE),
        (436, "calibrate, round", ["statistics of all data,", "then codes, by layer"], BLUE),
        (586, "sink", ["packs and writes,", "or keeps in memory"], GREEN),
    ]
    for x, title, lines, color in steps:
        drawing.box(x, 74, 136, 88, color, 0.18, 6)
        drawing.text(x + 68, 98, title, 13, anchor="middle", bold=True)
        for number, line in enumerate(lines):
            drawing.text(x + 68, 122 + 18 * number, line, 10.5, anchor="middle")
    for x in (272, 422, 572):
        drawing.arrow([(x, 118), (x + 13, 118)])
    drawing.arrow([(654, 162), (654, 176), (204, 176), (204, 163)], GREY)
    for x, lines in ((10, ["configuration", "+ structure", "= plan"]), (756, ["checkpoint,", "or model,", "and a report"])):
        drawing.box(x, 74, 94, 88, GREY, 0.12, 6)
        for number, line in enumerate(lines):
            drawing.text(x + 47, 104 + 18 * number, line, 12, anchor="middle")
    drawing.arrow([(104, 118), (135, 118)])
    drawing.arrow([(722, 118), (755, 118)])
    drawing.text(
        428, 218, "In memory, from disk to disk, with calibration data and without: the same stream of blocks,", 12, GREY, anchor="middle"
    )
    drawing.text(428, 236, "with another source and another sink.", 12, GREY, anchor="middle")
    return drawing


def lock_step() -> Drawing:
    """Draw the forward passes of three samples through one block. These passes pause at each input group."""
    llama = templates().load_architecture("llama")
    groups = [llama.attention_inputs, (llama.attention_output,), llama.mlp_inputs, (llama.mlp_output,)]
    titles = [", ".join(str(name).rpartition(".")[2].removesuffix("_proj") for name in group) for group in groups]
    drawing = Drawing(860, 262)
    places = [230 + 150 * number for number in range(len(groups))]
    for x, title in zip(places, titles, strict=True):
        drawing.box(x - 9, 52, 18, 122, BLUE, 0.12, 4)
        drawing.text(x, 38, title, 13, anchor="middle", bold=True)
        drawing.arrow([(x, 174), (x, 196)], BLUE)
        drawing.text(x, 212, "statistics of all samples", 10.5, GREY, anchor="middle")
        drawing.text(x, 227, "→ scales → round", 10.5, GREY, anchor="middle")
        drawing.text(x, 242, "→ go on", 10.5, GREY, anchor="middle")
    for number in range(3):
        y = 72 + 40 * number
        drawing.text(20, y + 4, f"sample {number + 1}", 12)
        for start, end in zip([96, *places], [*places, 850], strict=True):
            drawing.arrow([(start + (7 if start > 96 else 0), y), (end - 8, y)], GREY)
        for x in places:
            drawing.dot(x, y, 6, BLUE)
    return drawing
