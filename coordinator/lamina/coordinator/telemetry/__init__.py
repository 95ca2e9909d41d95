"""What the coordinator tells of itself: metrics, and the state of the cluster. Never on a token's path."""
