"""Audits prepared data: what a sample holds, which samples hold a document, whether every byte is right."""
