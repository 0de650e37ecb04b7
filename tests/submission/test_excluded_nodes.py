"""A submission leaves bad nodes out and says so; a job that asks for one gets it."""

from __future__ import annotations

import pytest

from toolkit.rundir.bad_nodes import note_bad_node


@pytest.mark.parametrize(
    ("options", "excluded", "said"),
    [
        ([], "--exclude=node3", "node3 is marked bad since run"),
        (["-x", "node[1-2]"], '--exclude="node[1-2],node3"', "excluded"),
        (["-w", "node[3-4]"], "", "kept because the job requests it"),
    ],
)
def test_bad_nodes_are_left_out(toolkit, options: list[str], excluded: str, said: str) -> None:
    run = toolkit.submit(toolkit.job("true"))
    note_bad_node(run, "devcluster", "node3", "/dev/shm: is full")
    note_bad_node(run, "another", "node4", "is full")
    rendered = toolkit("render", toolkit.job("true"), "--site", "devcluster", *options)
    assert rendered.code == 0, rendered
    lines = [line for line in rendered.out.splitlines() if "--exclude" in line]
    assert [line.replace('"', "") for line in lines] == ([f"#SBATCH {excluded}".replace('"', "")] if excluded else [])
    assert said in rendered.err and "node4" not in rendered.err
    assert toolkit.run(run.run_id).path.exists()
