"""The stores of blocks below the pool."""
