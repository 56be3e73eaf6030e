"""`megalite verify`: checks that every layout computes what transformers computes.

A `ParityProblem` (the config's model, made small enough, and fresh random batches) is solved by a reference on one
process and by DeepSpeed engines under every `ParityLayout`. Both return `Observations`, global tensors under canonical
names; `compare` measures their differences quantity by quantity, and `diagnose` finds the axis that causes a failure.
"""
