"""Reading PyTorch's graph: what its nodes are, what they saved, how they hang together, and calling one of them."""
