"""Tokenizers: trained here, or read from a folder as transformers reads it."""
