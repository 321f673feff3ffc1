"""Selection: which scheme each layer gets, under a budget of bits, bytes or divergence. The choice itself is made by a plugin."""

from quark.selection.budget import Budget
from quark.selection.candidates import FLOAT, Candidate, candidates_of
from quark.selection.layer_groups import LayerGroup, layer_groups
from quark.selection.problem import SelectionProblem
from quark.selection.select import select_schemes
from quark.selection.selection import CurvePoint, Selection, SelectionResult
from quark.selection.selector import SchemeSelector, selector_of

__all__ = [
    "FLOAT",
    "Budget",
    "Candidate",
    "CurvePoint",
    "LayerGroup",
    "SchemeSelector",
    "Selection",
    "SelectionProblem",
    "SelectionResult",
    "candidates_of",
    "layer_groups",
    "select_schemes",
    "selector_of",
]
