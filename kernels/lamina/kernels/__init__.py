"""The tool cupboard: ops, their specifications, and the backends that run them. Knows nobody but spec.quant and spec.errors."""
