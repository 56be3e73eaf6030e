"""Memory and time of a layout by arithmetic, and the search among layouts. No torch."""
