"""The records of the distribution in this folder pass the conformance suite."""

import pytest

from quark_devkit import (
    FormatConformance,
    LayerTypeConformance,
    LayoutConformance,
    RoundingConformance,
    SchemeConformance,
    TransformConformance,
)

# Four bits at most, stored in eight: the error is that of their values, which is advised of.
pytestmark = [pytest.mark.usefixtures("shared_third_party"), pytest.mark.filterwarnings("ignore:.*rounds a normal weight.*advisory")]


@pytest.mark.slow_runs  # TestCountedNearest makes them
class TestClippedNearest(RoundingConformance):
    subject = "clipped_nearest"


@pytest.mark.slow_runs("resumes_to_the_same_bytes")  # TestInputGain makes it
class TestCountedNearest(RoundingConformance):
    subject = "counted_nearest"


@pytest.mark.slow_runs("composes_with_other_transforms")  # the tests of quark-algos make it
class TestInputGain(TransformConformance):
    subject = "input_gain"


@pytest.mark.slow_runs("runs_from_codes")  # the tests of quark-exporters make it
class TestBox(LayoutConformance):
    subject = "box"


@pytest.mark.slow_runs  # TestBox makes them
class TestSingleFile(LayoutConformance):
    subject = "single_file"


class TestPowers(FormatConformance):
    subject = "third_powers"


class TestTernary(FormatConformance):
    subject = "third_ternary"


class TestRowScaled(FormatConformance):
    subject = "third_row_scaled"


class TestStrided(FormatConformance):
    subject = "third_strided"


class TestPowersScheme(SchemeConformance):
    subject = "third_powers_g32"


class TestTernaryScheme(SchemeConformance):
    subject = "third_ternary_g32"


class TestRowsScheme(SchemeConformance):
    subject = "third_rows_g32"


class TestStridedScheme(SchemeConformance):
    subject = "third_strided_g32"


class TestGated(LayerTypeConformance):
    subject = "gated"
