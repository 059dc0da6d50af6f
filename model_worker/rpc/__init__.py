"""The worker's gRPC side: servicers, validation and the server that carries them."""
