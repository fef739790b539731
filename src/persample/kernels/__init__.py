"""Pure tensor functions that know neither graph nor modules."""
