"""Write every picture as a file: ``python -m tools.docs.pictures FOLDER``."""

import sys
from pathlib import Path

from tools.docs.pictures import PICTURES

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name, draw in PICTURES.items():
    (folder / f"{name}.svg").write_text(draw().svg(name), encoding="utf-8")
