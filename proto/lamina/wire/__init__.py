"""Between plain values and gRPC: the codec, frames, channels, status mapping. The only place that knows both sides."""
