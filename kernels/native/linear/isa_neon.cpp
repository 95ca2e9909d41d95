#define LAMINA_LINEAR_NS linear_neon
#include "vec_neon.h"
#include "linear_kernels.h"
