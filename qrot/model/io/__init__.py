"""Models in files: GGUF, Hugging Face folders, the hub; and tokenizers."""
