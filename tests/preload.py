"""Imported once by the fork server, so that a rank starts warm."""

import deepspeed
import deepspeed.pipe  # noqa: F401
import torch  # noqa: F401

import megalite.engine.engine
import megalite.engine.state  # noqa: F401
import models.decoder  # noqa: F401
