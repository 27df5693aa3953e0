"""What every backend's quantizer is made of: declaration, scopes, registry, capabilities."""
