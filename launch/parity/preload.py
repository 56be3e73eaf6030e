"""Modules that the fork server imports once, which saves five seconds of imports per rank."""
# ruff: noqa: E402, F401

import signal

# the command stops its ranks; a server interrupted while importing would print a traceback
signal.signal(signal.SIGINT, signal.SIG_IGN)

import numpy.random

import launch.parity.rank
import megalite.engine.parameter_state
import megalite.engine.preload
import models.decoder
