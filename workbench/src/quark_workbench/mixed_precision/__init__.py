"""Selection of a scheme for each layer under a budget of bits, of bytes or of KL divergence.

A selector, which a plugin registers, chooses the schemes.
"""

from quark_workbench.mixed_precision.candidates import FLOAT, Candidate, candidates_of
from quark_workbench.mixed_precision.problem import Budget, LayerGroup, SelectionProblem, layer_groups
from quark_workbench.mixed_precision.select import select_schemes
from quark_workbench.mixed_precision.selection import CurvePoint, SchemeSelector, Selection, SelectionResult, selector_of

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
