"""Every case of the telemetry table has a test, or a reason why not."""

from tests.telemetry import test_cases_amd, test_cases_nvidia, test_scenarios
from tests.telemetry.cases import COVERED, NOT_COVERED, cases


def test_every_case_is_covered():
    assert test_cases_amd and test_cases_nvidia and test_scenarios
    assert set(cases()) - COVERED - set(NOT_COVERED) == set()
    assert all(NOT_COVERED.values())
