"""Imports what DeepSpeed imports when an engine is built, ahead of time, so that its memory is known or shared."""
# ruff: noqa: E402, F401

import deepspeed
import deepspeed.ops
import deepspeed.pipe

from megalite.engine.deepspeed.internals import keep_muon_uncompiled

keep_muon_uncompiled()
import deepspeed.runtime.zero.muon.muon_optimizer  # imported by every ZeRO engine
import torch
import torch.utils.checkpoint
