"""The grader: runs hidden tests on a workspace without trusting it."""
