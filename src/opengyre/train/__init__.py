"""Micro-steps, packing, forward-backward, optimizer, publication, checkpoints."""
