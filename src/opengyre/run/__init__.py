"""Builds the objects of a command from a configuration and drives them."""
