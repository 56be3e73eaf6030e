"""One optimizer step on DeepSpeed's engines: building it, running it, reading its result."""
