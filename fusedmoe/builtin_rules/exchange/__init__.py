"""Rules for products that run beside an exchange of tokens between ranks."""
