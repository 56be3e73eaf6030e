"""`megalite verify`: every layout computes what transformers computes, measured here and now.

The way of a verification: a `Problem` (the config's model, made small enough, and fresh random batches) is solved by a
reference on one process and by DeepSpeed engines under every `Layout`; both give `Observations`, global tensors under
canonical names; `judge` compares them quantity by quantity; where one fails, `diagnose` looks for the axis behind it.
"""
