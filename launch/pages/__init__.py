"""Parts that every HTML page shares: figures as SVG, curves, the frame around them. They know no run."""
