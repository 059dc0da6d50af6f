"""Where blocks' KV lies: L1's arena, the payload format of stored blocks, and the protocol of the lower tiers."""
