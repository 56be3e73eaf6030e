"""`megalite import` and `megalite export`: a Hugging Face folder becomes a checkpoint, and a checkpoint such a folder.

Weights are renamed and copied block by block; no layout, rank or launcher is involved.
"""

from launch.convert.exporting import export_hugging_face, open_newest, plan_export, tokenizer_of
from launch.convert.importing import import_hugging_face, plan_import
from launch.convert.model_folder import DTYPES, ModelFolder, open_model_folder
from launch.convert.serial import Read, global_shapes, named_layer, serial_model
from launch.convert.summary import ConversionPlan, ConvertSummary

__all__ = [
    "DTYPES",
    "ConversionPlan",
    "ConvertSummary",
    "ModelFolder",
    "Read",
    "export_hugging_face",
    "global_shapes",
    "import_hugging_face",
    "named_layer",
    "open_model_folder",
    "open_newest",
    "plan_export",
    "plan_import",
    "serial_model",
    "tokenizer_of",
]
