"""A test of the tests: every plausible fault in the list is found by the test that it names."""

import pytest
from faults import BY_ONES, FAULTS

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]

# Without a fault, what is drawn one by one is drawn by test_law itself.
CHECKS = [
    check for check in dict.fromkeys(f.found_by for f in FAULTS) if check not in BY_ONES.values()
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_passes_where_there_is_no_fault(check):
    check()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault, monkeypatch):
    fault.plant(monkeypatch)
    with pytest.raises(AssertionError):
        fault.found_by()
