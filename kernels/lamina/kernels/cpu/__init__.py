"""The native CPU backend: liblamina_cpu through ctypes. `backend.CpuBackend` is the way in."""
