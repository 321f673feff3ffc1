"""`plan` and `estimate_model`, which tell what a run would do, write and need, without reading weights."""

from quark_workbench.planning.model_estimate import estimate_model
from quark_workbench.planning.planned_run import plan
from quark_workbench.planning.workload import Calibration

__all__ = ["Calibration", "estimate_model", "plan"]
