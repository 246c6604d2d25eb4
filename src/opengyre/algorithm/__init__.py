"""Advantages of a group, weights of tokens, losses."""
