"""Answers what a sample holds, and which samples hold a document."""
