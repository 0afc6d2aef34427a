"""The benchmarks of the developers, which the wheel leaves out: they need a checkout."""
