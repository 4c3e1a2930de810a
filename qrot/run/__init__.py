"""One run = one folder: configuration, execution, results."""
