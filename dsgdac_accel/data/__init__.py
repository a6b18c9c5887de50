"""Which samples a worker gets, in which order, and for how many steps."""
