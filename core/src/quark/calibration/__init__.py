"""Calibration: forward passes run in lock-step and pause while statistics are collected and layers are
rounded.
"""
