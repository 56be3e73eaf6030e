"""Imports what torch and DeepSpeed import when an engine is built, ahead of time: for a server that forks ranks."""
# ruff: noqa: F401

import deepspeed
import deepspeed.ops
import deepspeed.pipe
import deepspeed.runtime.zero.muon.muon_optimizer  # imported by every ZeRO engine; its decorators pull in inductor
import torch
import torch._dynamo  # imported by the first torch.optim.Optimizer
import torch.utils.checkpoint

deepspeed.ops.__compatible_ops__  # noqa: B018 - looks for compilers when first read
