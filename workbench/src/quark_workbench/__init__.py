"""The ``quark`` commands for models and checkpoints: quantize, evaluate, report, choose mixed precision."""
