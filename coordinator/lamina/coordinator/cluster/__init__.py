"""Workers as the coordinator sees them: dialling, loading a placement, the streams that carry steps."""
