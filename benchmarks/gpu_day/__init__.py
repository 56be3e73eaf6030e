"""Measures megalite on one machine with a GPU, in parts of a few minutes: `python -m benchmarks.gpu_day`.

The entry imports nothing but the standard library, so that it starts where only torch is installed and can say what
else is lacking. docs/gpu_day.md tells how to use it.
"""
