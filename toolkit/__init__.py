"""Batch work on Slurm and MPI clusters, from a job file to a trained and resumed model."""

__version__ = "0.1.0"
