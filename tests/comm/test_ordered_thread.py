"""Work in the order of its submission, until the thread is closed."""

from __future__ import annotations

import pytest

from toolkit.comm.ordered_thread import OrderedThread


def test_work_runs_in_order_and_a_closed_thread_accepts_none():
    thread, done = OrderedThread("test"), []
    futures = [thread.submit(lambda number=number: done.append(number)) for number in range(20)]
    thread.close()
    assert [one.result(timeout=10) for one in futures] == [None] * 20
    assert done == list(range(20))
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(list)
