"""The pipelined engine: programs of passes, and the messages between stages."""
