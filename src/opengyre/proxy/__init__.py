"""The HTTP face of the policy: dialects, sessions, restoring, rendering, streaming."""
