"""The pages, the schema and the first config, made from the options."""
