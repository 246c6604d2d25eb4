"""The durable record of calls, executions, outcomes and scheduler events."""
