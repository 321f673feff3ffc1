"""What runs cost, counted: FLOPs, bytes, operations and waits for a device."""
