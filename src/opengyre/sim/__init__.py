"""The scheduler under a virtual clock: cost models, workloads, baselines."""
