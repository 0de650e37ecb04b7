"""Supervise the ranks of a run inside its Slurm allocation.

A start is one execution of the batch script: each submission, resume, requeue and follow-up job is a new start. It runs
one or more attempts; an attempt is one launch of all ranks. Each rank has a guard, its parent process, which forwards
signals and records how the rank exited. Unmanaged programs (scripts, executables) have none of toolkit's handlers.
"""
