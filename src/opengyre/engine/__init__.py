"""Token in, token out generation."""
