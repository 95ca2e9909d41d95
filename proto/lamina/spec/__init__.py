"""What both sides agree on as plain values: no gRPC, no torch, no IO beyond reading a checkpoint's header."""
