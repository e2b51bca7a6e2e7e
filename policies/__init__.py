"""Every algorithm of Headrace, pure: no I/O, no clock, no global chance. `now` and `rng` are arguments."""
