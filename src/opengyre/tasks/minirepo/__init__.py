"""minirepo: a generated family of tasks. Specifications of small Python packages, graded function by function."""
