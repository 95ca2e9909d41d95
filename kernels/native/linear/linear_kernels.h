// Everything that is compiled once per ISA, on top of the primitives of a vec_*.h: each isa_*.cpp names its namespace
// (so that no function of one translation unit can be taken for another's) and includes both.
#pragma once
#include "activation.h"
#include "formats.h"
#include "lamina/linear.h"

// The order matters: each builds on those before it.
#include "decode.h"
#include "quantise.h"
#include "direct.h"
#include "strip.h"
#include "dots.h"
#if defined(LAMINA_LINEAR_AMX)
#include "dots_amx.h"
#endif
#include "blocked.h"
#if defined(LAMINA_LINEAR_AMX)
#include "planes_amx.h"
#endif
#include "epilogue.h"
#include "panel.h"
#include "driver.h"
