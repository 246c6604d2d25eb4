"""Types, events, commands, configuration, errors and protocols: what every other package agrees on."""
