"""What most ranks look up as they build a model: patterns of every architecture, which are read and compiled once."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
