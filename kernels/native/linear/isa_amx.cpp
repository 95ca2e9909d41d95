#define LAMINA_LINEAR_NS linear_amx
#define LAMINA_LINEAR_AMX
#include "tiles_amx.h"
#include "linear_kernels.h"
