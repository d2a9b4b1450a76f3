"""Benchmarks: every figure is a ratio taken in one run against a peer that the bench itself starts or builds."""
