"""The workshop: owns the tensors, decides nothing."""
