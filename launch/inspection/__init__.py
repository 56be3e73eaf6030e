"""The runs of a folder, as somebody sees them who does not train: state, progress, and what would be lost."""
