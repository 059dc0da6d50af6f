"""Models: finding, loading, identifying and qualifying them; their attention and linears."""
