"""Imports for the fork server of multiprocessing, from which the ranks of `megalite verify` are forked.

Ranks then start with torch and DeepSpeed imported, which saves five seconds each.
"""
# ruff: noqa: E402, F401

import signal

# the command stops its ranks; a server interrupted while importing would print a traceback
signal.signal(signal.SIGINT, signal.SIG_IGN)

import numpy.random
import torch._dynamo  # by recomputation and by ZeRO-3, in each rank again if it were not here

import launch.parity.rank
import megalite.engine.deepspeed.preload
import megalite.engine.parameter_state
import models.decoder
from megalite.config import Config

Config.model_rebuild()  # the validators, which each rank would build again
