"""The inner loop: which tokens go into which step. The scheduler is pure; `engine.py` alone does IO."""
