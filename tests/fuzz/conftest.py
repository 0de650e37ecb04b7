"""Says how many cases the fuzz tests were asked for: `from fuzz_cases import fuzz`, then `@fuzz(share) @given(...)`."""

from fuzz_cases import TOTAL


def pytest_report_header() -> str:
    return f"fuzz: {TOTAL} cases in all (TOOLKIT_FUZZ_CASES)"
