"""Evaluation: tasks and their scoring, methods on shared branches, tool workers, sweeps, reports. Command line: `minips.evaluate`."""
