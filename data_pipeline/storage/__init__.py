"""Token files: the .bin/.idx pair, the marks of loss, the description beside it, copies of remote ones."""
