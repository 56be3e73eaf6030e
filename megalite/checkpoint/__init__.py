"""Layout-free files of a run's state and the protocol that commits them."""
