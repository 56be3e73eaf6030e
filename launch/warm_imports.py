"""Imported once by the fork server, so that a rank starts warm: five seconds of imports per rank become none."""
# ruff: noqa: F401

import numpy.random

import launch.verify.rank
import megalite.engine.imports
import megalite.engine.state
import models.decoder
