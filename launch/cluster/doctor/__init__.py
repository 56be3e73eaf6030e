"""The doctor: asks all hosts of a run what could keep them from training together, before anything is started."""
