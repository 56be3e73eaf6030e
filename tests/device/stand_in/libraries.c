/* cuBLAS: handles that know their stream, products that are launches. build.py adds the rest, which does nothing.
 * cuDNN only says which it is. */
#include "device.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static char something;

void enqueue_product(void **handle)
{
    count(PRODUCTS);
    enqueue_kernel(stream_of(*handle));
}

EXPORTED int cublasCreate_v2(void ***handle)
{
    *handle = calloc(1, sizeof **handle);
    return 0;
}

EXPORTED int cublasDestroy_v2(void **handle)
{
    free(handle);
    return 0;
}

EXPORTED int cublasSetStream_v2(void **handle, void *stream)
{
    *handle = stream;
    return 0;
}

EXPORTED int cublasGetMathMode(void **handle, int *mode)
{
    *mode = 0;
    return 0;
}

EXPORTED int cublasGetPointerMode_v2(void **handle, int *mode)
{
    *mode = 0;
    return 0;
}

EXPORTED size_t cublasLtGetVersion(void)
{
    return 130100;
}

EXPORTED int cublasLtMatmulDescCreate(void **made, int compute, int scale)
{
    *made = &something;
    return 0;
}

EXPORTED int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t leading)
{
    *made = &something;
    return 0;
}

EXPORTED int cublasLtMatmulPreferenceCreate(void **made)
{
    *made = &something;
    return 0;
}

EXPORTED int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int most, void *results, int *many)
{
    memset(results, 0, 96); /* one algorithm, without a workspace */
    *many = 1;
    return 0;
}

EXPORTED int cublasLtMatmul(
    void *handle, void *product, const void *alpha, const void *a, void *of_a, const void *b, void *of_b, const void *beta,
    const void *c, void *of_c, void *d, void *of_d, const void *algorithm, void *workspace, size_t size, void *stream)
{
    enqueue_product(&stream);
    return 0;
}

EXPORTED size_t cudnnGetVersion(void)
{
    return 92000;
}

EXPORTED size_t cudnnGetCudartVersion(void)
{
    return 13000;
}

EXPORTED int cuptiGetResultString(int result, const char **text)
{
    *text = "the stand-in lets nobody profile";
    return 0;
}
