"""Imported once by the fork server, so that a rank starts warm: five seconds per rank become a tenth."""

import deepspeed
import deepspeed.ops
import deepspeed.pipe
import deepspeed.runtime.zero.muon.muon_optimizer  # imported by every ZeRO engine; its decorators pull in inductor
import numpy.random
import torch
import torch._dynamo  # imported by the first torch.optim.Optimizer
import torch.distributed.nn.functional
import torch.utils.checkpoint  # noqa: F401

import megalite.checkpoint.engine
import megalite.engine.engine
import megalite.engine.state
import models.decoder  # noqa: F401

deepspeed.ops.__compatible_ops__  # noqa: B018 - probes for compilers when first read
