"""What a model is worth: perplexity."""
