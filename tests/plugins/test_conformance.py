"""The algorithms and layouts of the distribution in this folder pass the conformance suite."""

import pytest

from quark.testing import LayoutConformance, RoundingConformance, TransformConformance

pytestmark = pytest.mark.usefixtures("third_party")


class TestClippedNearest(RoundingConformance):
    subject = "clipped_nearest"


class TestCountedNearest(RoundingConformance):
    subject = "counted_nearest"


class TestInputGain(TransformConformance):
    subject = "input_gain"


class TestBox(LayoutConformance):
    subject = "box"


class TestSingleFile(LayoutConformance):
    subject = "single_file"
