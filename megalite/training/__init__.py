"""The loop, its state, when it saves."""
