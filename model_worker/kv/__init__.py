"""Working KV of running sequences."""
