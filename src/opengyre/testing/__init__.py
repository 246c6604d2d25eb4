"""Deterministic doubles of the parts of a run, for tests and users."""
