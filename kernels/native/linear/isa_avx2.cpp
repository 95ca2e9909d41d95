#define LAMINA_LINEAR_NS linear_avx2
#include "vec_avx2.h"
#include "linear_kernels.h"
