#define LAMINA_LINEAR_PORTABLE
#define LAMINA_LINEAR_NS linear_scalar
#include "vec_scalar.h"
#include "linear_kernels.h"
