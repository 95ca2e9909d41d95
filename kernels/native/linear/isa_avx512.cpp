#define LAMINA_LINEAR_NS linear_avx512
#include "vec_avx512.h"
#include "linear_kernels.h"
