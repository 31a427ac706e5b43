"""What credit is and what is optimized: advantages, transforms, signals, filters and loss terms."""
