"""Turns conversations into tokens and a mask that says which of them a model is to produce.

conversation    a row of JSON                      -> messages, checked
template        a tokenizer's folder               -> its chat template, a frozen value
renderer        messages, template                 -> text, in a process of its own with limits
turns           messages, renderer                 -> text, and the stretches of it that carry loss
encoder         a row of JSON                      -> token ids and one byte of loss for each
"""
