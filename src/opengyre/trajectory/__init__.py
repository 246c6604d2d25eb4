"""The prefix-sharing tree of an execution's calls: building, matching, roles, admission, rows."""
