"""Code that leans on DeepSpeed's private parts, each with a test that notices when they change."""
