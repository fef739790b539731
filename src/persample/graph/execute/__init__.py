"""One backward: what it is asked for, factors where samples meet weights, and their way to the parameters."""
