"""One execution at run time: workspace, sandbox, shim and harness, evaluation."""
