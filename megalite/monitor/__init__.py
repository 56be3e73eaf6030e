"""Records of a run: metrics, events, goodput, memory, and the observers that make them."""
