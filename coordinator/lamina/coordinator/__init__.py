"""The office: talks to users, decides, owns no tensors."""
