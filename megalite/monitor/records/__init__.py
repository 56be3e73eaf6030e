"""Types of what a run writes about itself, which writers and readers share."""
