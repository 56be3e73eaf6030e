/* Sums and the like over the buffers of several ranks, in the order of the ranks. */
#include "reduce.h"
#include "device.h"

#include <stdlib.h>
#include <string.h>

size_t size_of_type(int type)
{
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

const char *name_of_type(int type)
{
    static const char *names[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
    return names[type];
}

static double get(const void *buffer, size_t place, int type)
{
    uint32_t bits;
    float number;
    switch (type) {
    case ncclFloat16: return ((const _Float16 *)buffer)[place];
    case ncclFloat32: return ((const float *)buffer)[place];
    case ncclFloat64: return ((const double *)buffer)[place];
    case ncclBfloat16:
        bits = (uint32_t)((const uint16_t *)buffer)[place] << 16;
        memcpy(&number, &bits, sizeof number);
        return number;
    default: give_up("%s is not reduced here", name_of_type(type));
    }
}

static void put(void *buffer, size_t place, int type, double value)
{
    uint32_t bits;
    float number = (float)value;
    switch (type) {
    case ncclFloat16: ((_Float16 *)buffer)[place] = (_Float16)value; break;
    case ncclFloat32: ((float *)buffer)[place] = number; break;
    case ncclFloat64: ((double *)buffer)[place] = value; break;
    case ncclBfloat16: /* to nearest, ties to even; NaN stays one */
        memcpy(&bits, &number, sizeof bits);
        bits = number != number ? bits | 1 << 22 : bits + 0x7fff + (bits >> 16 & 1);
        ((uint16_t *)buffer)[place] = bits >> 16;
        break;
    default: give_up("%s is not reduced here", name_of_type(type));
    }
}

#define COMBINE(a, b, operation) \
    ((operation) == ncclProd ? (a) * (b) : (operation) == ncclMax ? ((a) > (b) ? (a) : (b)) \
     : (operation) == ncclMin ? ((a) < (b) ? (a) : (b)) : (a) + (b))

#define REDUCE_INTEGERS(type) \
    for (size_t i = 0; i < numbers; i++) { \
        type sum = ((type *)parts)[i]; \
        for (int rank = 1; rank < ranks; rank++) \
            sum = COMBINE(sum, ((type *)parts)[rank * numbers + i], operation); \
        ((type *)result)[i] = operation == ncclAvg ? (type)(sum / ranks) : sum; \
    } \
    return

void reduce(void *result, const void *parts, int ranks, size_t numbers, int type, int operation)
{
    if (operation > ncclAvg)
        give_up("sums with a factor of the caller's are not stood in for");
    switch (type) {
    case ncclInt8: REDUCE_INTEGERS(int8_t);
    case ncclUint8: REDUCE_INTEGERS(uint8_t);
    case ncclInt32: REDUCE_INTEGERS(int32_t);
    case ncclUint32: REDUCE_INTEGERS(uint32_t);
    case ncclInt64: REDUCE_INTEGERS(int64_t);
    case ncclUint64: REDUCE_INTEGERS(uint64_t);
    }
    for (size_t i = 0; i < numbers; i++) {
        double sum = get(parts, i, type);
        for (int rank = 1; rank < ranks; rank++)
            sum = COMBINE(sum, get(parts, rank * numbers + i, type), operation);
        put(result, i, type, operation == ncclAvg ? sum / ranks : sum);
    }
}
