"""Readers of other tools' files: each turns a file into executions of recorded or rendered calls."""
