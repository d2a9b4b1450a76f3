"""What is compared: each peer is started, driven and measured by the bench itself."""
