"""Finding the samples: where each of them lies in every cotangent, and whether they meet."""
