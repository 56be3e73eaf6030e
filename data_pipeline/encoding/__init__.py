"""Turns pieces of text into token ids: where long documents are cut, which encoder is used, what is special."""
