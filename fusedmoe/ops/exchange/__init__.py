"""The ops that exchange tokens between ranks."""
