"""The machinery that reads a family's data: names, shapes and layouts of Hugging Face."""
