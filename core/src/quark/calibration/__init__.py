"""Calibration: forwards in lock-step that pause while statistics are collected and layers are rounded."""
