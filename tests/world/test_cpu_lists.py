"""Lists and masks of processors as Linux prints them."""

from hypothesis import given
from hypothesis import strategies as st

from toolkit.world.cpu_lists import cpu_list, read_cpu_list, read_cpu_mask


@given(st.sets(st.integers(0, 300)))
def test_lists_and_masks_of_processors_go_there_and_back(cpus):
    ordered = tuple(sorted(cpus))
    assert read_cpu_list(cpu_list(cpus)) == ordered
    digits = f"{sum(1 << cpu for cpu in cpus):080x}"
    assert read_cpu_mask(",".join(digits[i : i + 8] for i in range(0, 80, 8))) == ordered
    assert read_cpu_list("3-1") is read_cpu_list("1,1") is read_cpu_list("0-99999999") is read_cpu_mask("g") is None
