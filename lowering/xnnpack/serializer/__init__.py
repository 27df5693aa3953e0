"""What XNNPACK's serialized graph has to hold for the runtime to read it right."""
