"""Calibration of models. All forward passes of a run advance in lock-step. They pause while statistics are
collected and while layers are rounded.
"""
