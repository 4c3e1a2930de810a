"""Ways to round weights, (network, text, settings) -> network: one method, one file, one record."""
