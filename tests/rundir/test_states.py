"""Every row of the table of endings, under every budget."""

import pytest

from toolkit.rundir.states import ENDINGS, Cause, Next, RunState, decide

BUDGETS = {"crashes": 2, "walltimes": 2, "preemptions": 2}
# Written down once more by hand: what each end leads to while its budget lasts, and what stands when it does not.
EXPECTED = {
    Cause.COMPLETED: (Next.END, RunState.COMPLETED, 0),
    Cause.CRASHED: (Next.RESTART, RunState.FAILED, 137),
    Cause.ENVIRONMENT: (Next.END, RunState.FAILED, 137),
    Cause.STALLED: (Next.RESTART, RunState.FAILED, 125),
    Cause.REFUSED: (Next.END, RunState.FAILED, 137),
    Cause.SUPERVISOR_FAILED: (Next.END, RunState.FAILED, 125),
    Cause.SUPERVISOR_LOST: (Next.AWAIT, RunState.LOST, 125),
    Cause.NODE_LOST: (Next.AWAIT, RunState.FAILED, 125),
    Cause.NODE_UNFIT: (Next.REQUEUE, RunState.FAILED, 125),
    Cause.LAUNCH_FAILED: (Next.RESTART, RunState.FAILED, 125),
    Cause.WALLTIME: (Next.REQUEUE, RunState.TIMEOUT, 140),
    Cause.PREEMPTED: (Next.AWAIT, RunState.PREEMPTED, 143),
    Cause.STOPPED: (Next.END, RunState.STOPPED, 130),
    Cause.CANCELLED: (Next.END, RunState.CANCELLED, 143),
}
every_cause = pytest.mark.parametrize("cause", list(Cause))


def follow(cause, *, budgets=BUDGETS, spent=0, again=Next.REQUEUE, repeated=False, cannot_pass=False):
    row = ENDINGS[cause]
    return decide(
        cause, budgets=budgets, spent={row.budget: spent}, again=again, rank_exit_code=137,
        why_repeated="the same failure" if repeated else "", cannot_pass=cannot_pass,
    )  # fmt: skip


def assert_ends(decision):
    _, state, exit_code = EXPECTED[decision.cause]
    assert (decision.next, decision.final_state, decision.exit_code) == (Next.END, state, exit_code)


def test_every_cause_has_a_row_and_an_expectation():
    assert set(ENDINGS) == set(Cause) == set(EXPECTED)
    assert {row.budget for row in ENDINGS.values()} == {"", *BUDGETS}


def test_every_final_state_is_reached():
    reached = {follow(cause, spent=2).final_state for cause in Cause}
    assert reached == {state for state in RunState if state.final}


@every_cause
@pytest.mark.parametrize("spent", [0, 1])
def test_while_the_budget_lasts(cause, spent):
    decision = follow(cause, spent=spent)
    assert (decision.next, decision.final_state, decision.exit_code) == EXPECTED[cause]
    if decision.next is not Next.END:
        assert f"{1 - spent} left" in decision.reason


@every_cause
@pytest.mark.parametrize("spent", [2, 3])
def test_a_spent_budget_ends_the_run(cause, spent):
    decision = follow(cause, spent=spent)
    assert_ends(decision)
    if ENDINGS[cause].budget:
        assert decision.reason == f"restart.{ENDINGS[cause].budget} = 2 is spent"


@every_cause
def test_a_budget_of_none_ends_at_once(cause):
    assert_ends(follow(cause, budgets=dict.fromkeys(BUDGETS, 0)))


@every_cause
def test_an_unlimited_budget_is_never_spent(cause):
    decision = follow(cause, budgets=dict.fromkeys(BUDGETS, -1), spent=10_000)
    assert decision.next is EXPECTED[cause][0]


@every_cause
def test_where_nobody_can_requeue_another_job_follows(cause):
    usual = EXPECTED[cause][0]
    follows = Next.FOLLOW_UP if usual in (Next.REQUEUE, Next.AWAIT) else usual
    assert follow(cause, again=Next.FOLLOW_UP).next is follows


@every_cause
def test_without_a_requeue_only_restarts_in_the_allocation_remain(cause):
    decision = follow(cause, again=None)
    assert decision.next is (Next.RESTART if EXPECTED[cause][0] is Next.RESTART else Next.END)
    if EXPECTED[cause][0] in (Next.REQUEUE, Next.AWAIT):
        assert "requeue is not allowed" in decision.reason


@every_cause
def test_the_same_failure_twice_without_a_step_ends_the_run(cause):
    assert_ends(follow(cause, repeated=True, budgets=dict.fromkeys(BUDGETS, -1)))


@every_cause
def test_what_would_fail_alike_ends_the_run(cause):
    assert_ends(follow(cause, cannot_pass=True, budgets=dict.fromkeys(BUDGETS, -1)))


def test_a_crash_hands_on_the_ranks_exit_code_and_each_cause_its_own_budget():
    decision = decide(
        Cause.CRASHED, budgets={"crashes": 1, "walltimes": 0, "preemptions": 0},
        spent={"walltimes": 9, "preemptions": 9}, again=Next.REQUEUE, rank_exit_code=3,
    )  # fmt: skip
    assert (decision.next, decision.exit_code) == (Next.RESTART, 3)
