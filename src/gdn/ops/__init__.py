"""The public functions, and the torch operators underneath them."""
