"""Record sessions of the program as pictures: ``python -m tools.docs.sessions docs/pictures``.

Each session runs the real program on the tiny model, in an empty folder and a terminal of fixed width. The
library rich writes the session as SVG. Some plots in the report that the session ``quantize`` writes also
become pictures. Times in the pictures depend on the machine that ran the program.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from quark_tiny_model import held_out_text, tiny_model_dir

__all__ = ["PLOTS", "SESSIONS", "plot", "recorded"]

SESSIONS: dict[str, tuple[tuple[str, ...], int]] = {
    "demo": (("quark demo",), 112),
    "quantize": (
        (
            "quark quantize path/to/model out --scheme int4_wo_64 --algorithm gptq --calib text.txt --num-calib 16 --seq-len 128",
            "quark evaluate out --reference path/to/model --text text.txt --seq-len 128 --limit 32",
        ),
        118,
    ),
}
"""Commands of each picture, and the columns of its terminal."""

PLOTS = ("outputs", "gain")
"""Plots of the report that become pictures."""

_PROGRESS = re.compile(r"^ *\d+/\d+ .*\n", flags=re.MULTILINE)
_FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Consolas, "DejaVu Sans Mono", Menlo, monospace; font-size: {char_height}px;
  line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#292929"/>
<g transform="translate(9, 9)" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
"""rich's own frame, without fonts from the web."""


def recorded(commands: tuple[str, ...], columns: int, folder: Path) -> str:
    """Return a picture of commands and their output.

    Args:
        commands: Command lines. ``path/to/model`` is the tiny model.
        columns: Width of the terminal.
        folder: An empty folder, in which the commands run.
    """
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    environ = os.environ | {"COLUMNS": str(columns), "FORCE_COLOR": "1", "TERM": "xterm-256color", "TQDM_DISABLE": "1"}
    shutil.copytree(tiny_model_dir(), folder / "path/to/model")
    (folder / "text.txt").write_text(held_out_text(), encoding="utf-8", newline="\n")
    for command in commands:
        console.print(Text(f"$ {command}", style="bold"))
        words = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(words, cwd=folder, env=environ, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        console.print(Text.from_ansi(_PROGRESS.sub("", done.stdout).rstrip()))
    return console.export_svg(title="quark", code_format=_FRAME, unique_id="t")


def plot(report: str, name: str) -> str:
    """Return a plot from a report as a picture, with the colours for a light page."""
    style = re.search(r"<style>(.*?)</style>", report, flags=re.DOTALL)
    drawn = re.search(rf'<svg id="plot-{name}".*?</svg>', report, flags=re.DOTALL)
    assert style is not None
    assert drawn is not None
    light = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", style[1])
    colors = dict(re.findall(r"--([\w-]+): ([^;]+);", light))
    rules = "\n".join(re.findall(r"\.(?:plot|h\d)[^{}]*\{[^{}]*\}", light))
    rules = re.sub(r"var\(--([\w-]+)\)", lambda match: colors[match[1]], rules)
    head, _, body = drawn[0].partition(">")
    width, height = re.findall(r'viewBox="0 0 (\S+) (\S+)"', head)[0]
    size = f'width="{width}" height="{height}"'
    frame = f'{head} {size} xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif">'
    return f'{frame}<style>{rules}</style><rect width="100%" height="100%" fill="#ffffff"/>{body}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--names", nargs="*", default=list(SESSIONS), help="names of pictures; default: all")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        with tempfile.TemporaryDirectory() as folder:
            picture = recorded(*SESSIONS[name], Path(folder))
            (args.folder / f"{name}.svg").write_text(picture, encoding="utf-8", newline="\n")
            page = Path(folder) / "out/quark_report.html"
            if page.exists():
                report = page.read_text(encoding="utf-8")
                (args.folder / "report.html").write_text(report, encoding="utf-8", newline="\n")
                for kind in PLOTS:
                    (args.folder / f"report-{kind}.svg").write_text(plot(report, kind), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
