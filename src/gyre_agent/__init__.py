"""The reference harness: a coding agent that knows a base URL and nothing of the trainer."""
