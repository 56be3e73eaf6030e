"""Conversion between Hugging Face folders and checkpoints: `megalite import` and `megalite export`.

Weights are renamed and copied block by block; no layout, rank or launcher is involved.
"""
