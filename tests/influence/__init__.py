"""Which examples made the model what it is."""
