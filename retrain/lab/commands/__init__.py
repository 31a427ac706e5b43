"""Commands of the lab; entry points register them."""
