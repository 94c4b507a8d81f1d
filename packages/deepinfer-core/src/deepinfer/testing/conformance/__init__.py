"""The kernel conformance suite; its public names are those of `deepinfer.testing`."""
