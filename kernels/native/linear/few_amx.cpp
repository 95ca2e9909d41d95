#define LAMINA_LINEAR_NS linear_amx_few
#define LAMINA_LINEAR_AMX_FEW
#include "vec_avx512.h"
#include "linear_kernels.h"
