"""Imported once by the fork server, so that a rank starts warm: five seconds of imports per rank become none."""
# ruff: noqa: F401

import deepspeed
import deepspeed.ops
import deepspeed.pipe
import deepspeed.runtime.zero.muon.muon_optimizer  # imported by every ZeRO engine; its decorators pull in inductor
import numpy.random
import torch
import torch._dynamo  # imported by the first torch.optim.Optimizer
import torch.utils.checkpoint

import megalite.engine.engine
import megalite.engine.state
import models.decoder

deepspeed.ops.__compatible_ops__  # noqa: B018 - looks for compilers when first read
