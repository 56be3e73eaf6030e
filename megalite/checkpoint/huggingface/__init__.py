"""Hugging Face folders: names, shapes, weights and tokenizers, read and written block by block."""
