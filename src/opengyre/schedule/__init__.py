"""The scheduler: a pure state machine from events to commands, and the rules that switch cells."""
