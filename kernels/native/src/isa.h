// Which instruction sets this build has and this machine runs.
#pragma once
#include "lamina/linear.h"

namespace lamina {

// Runs the set's probe, guarded against the trap of a machine (or emulator, or kernel) that lacks it: what CPUID says
// is necessary and not sufficient. Changes the process's SIGILL handler while it runs; call it once, at load.
bool isa_works(Isa isa);

}  // namespace lamina
