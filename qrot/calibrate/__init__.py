"""What a network computes on calibration text, gathered a layer at a time."""
