"""Imported once by the fork server, so that a rank starts warm: five seconds of imports per rank become none."""
# ruff: noqa: E402, F401

import signal

# the command ends its ranks; a server that imports would print a traceback
signal.signal(signal.SIGINT, signal.SIG_IGN)

import numpy.random

import launch.verify.rank
import megalite.engine.imports
import megalite.engine.state
import models.decoder
