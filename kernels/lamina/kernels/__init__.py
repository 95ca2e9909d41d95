"""The tool cupboard: ops, their specifications, and backends that run them. Knows only spec.quant and spec.errors."""
