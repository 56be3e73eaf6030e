"""The data of one run: mixes, stages, packed plans, copies of what lies elsewhere."""
